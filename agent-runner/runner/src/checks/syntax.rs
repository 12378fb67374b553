//! Syntax check: finds the first syntax error of a file, which is reported to the creator.

use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use tree_sitter::{Node, TreeCursor};

use super::language::Language;
use super::limits::CheckLimitExceeded;

/// A syntax error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntaxError {
    /// Line number, from 1.
    pub line: u32,
    /// Description of the error, with an excerpt of the line.
    pub message: String,
}

/// Returns the first syntax error of `text`; `None` if it parses.
///
/// # Errors
/// [`CheckLimitExceeded`] if the text is too large or too complex to be parsed.
pub fn syntax_error(language: Language, text: &str) -> Result<Option<SyntaxError>, CheckLimitExceeded> {
    let tree = language.parse(text)?;
    let root = tree.root_node();
    if !root.has_error() {
        return Ok(None);
    }
    let node = first_error(root).unwrap_or(root);
    let row = node.start_position().row;
    let line = text.lines().nth(row).unwrap_or_default().trim();
    let excerpt: String = line.chars().take(80).collect();
    let excerpt = visible(&excerpt, TERMINAL_CHARACTERS);
    let message = if node.is_missing() {
        format!("does not parse: {} is missing at `{excerpt}`", node.kind())
    } else {
        format!("does not parse near `{excerpt}`")
    };
    Ok(Some(SyntaxError { line: u32::try_from(row + 1).unwrap_or(u32::MAX), message }))
}

/// First error node in document order. Uses a cursor instead of recursion: generated text can nest deeper than the
/// stack allows.
fn first_error(root: Node<'_>) -> Option<Node<'_>> {
    let mut cursor = root.walk();
    loop {
        let node = cursor.node();
        if node.is_error() || node.is_missing() {
            return Some(node);
        }
        if !advance(&mut cursor, node.has_error()) {
            return None;
        }
    }
}

/// Moves the cursor to the next node in document order, into the children if `descend`. Returns false at the end.
pub(super) fn advance(cursor: &mut TreeCursor<'_>, descend: bool) -> bool {
    if descend && cursor.goto_first_child() {
        return true;
    }
    loop {
        if cursor.goto_next_sibling() {
            return true;
        }
        if !cursor.goto_parent() {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_code_passes_and_syntax_error_has_a_line() {
        for (language, valid, broken, line) in [
            (Language::Python, "def f(x):\n    return x\n", "x = 1\ndef f(x:\n    return x\n", 2),
            (Language::JavaScript, "function f(x) { return x }\n", "function f(x) {\n  return x\n", 1),
            (Language::TypeScript, "let x: number = 1;\n", "let x: = 1;\n", 1),
            (Language::Tsx, "const a = <b>{1}</b>;\n", "const a = <b>{1}</c;\n", 1),
            (Language::Rust, "fn f() -> u8 { 1 }\n", "fn f( -> u8 { 1 }\n", 1),
            (Language::Go, "package a\n\nfunc f() int { return 1 }\n", "package a\n\nfunc f( int { return 1 }\n", 3),
        ] {
            assert_eq!(syntax_error(language, valid), Ok(None), "{language:?}");
            let error = syntax_error(language, broken).unwrap().unwrap();
            assert!(error.line.abs_diff(line) <= 1, "{language:?}: {error:?}");
        }
    }

    #[test]
    fn prose_is_not_python() {
        assert!(syntax_error(Language::Python, "Here is the function you asked for:\n").unwrap().is_some());
    }

    #[test]
    fn deep_nesting_does_not_overflow() {
        let deep = format!("{}{}", "(".repeat(50_000), "]");
        assert_ne!(syntax_error(Language::Python, &deep), Ok(None));
    }

    #[test]
    fn large_text_is_not_parsed() {
        let large = "x = 1\n".repeat(1_000_000);
        let error = syntax_error(Language::Python, &large).unwrap_err();
        assert_eq!(error, CheckLimitExceeded::Bytes { bytes: large.len() });
        assert!(error.to_string().contains("split the file"), "{error}");
        assert_eq!(syntax_error(Language::Python, &"x = 1\n".repeat(80_000)), Ok(None), "480 KB");
    }
}
