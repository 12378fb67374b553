//! Labels of code blocks: the file path that a reply gives for a block, in the forms that models use.

use super::fence::FencedBlock;

/// Well-known file names without an extension.
const FILES_WITHOUT_EXTENSION: [&str; 12] = [
    "Makefile",
    "Dockerfile",
    "Containerfile",
    "Justfile",
    "justfile",
    "LICENSE",
    "README",
    "CHANGELOG",
    "Procfile",
    "Gemfile",
    "Rakefile",
    "Jenkinsfile",
];

/// Returns the path that labels a block, and whether the block's first line is the label.
pub(crate) fn block_label(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    if let Some(path) = path_in_info(block.info) {
        return Some((path, false));
    }
    if let Some(path) = block.line_above.and_then(path_in_line) {
        return Some((path, false));
    }
    block.lines.first().and_then(|line| path_in_comment(line)).map(|path| (path, true))
}

/// Path in an info string: `python src/a.py`, `python:src/a.py`, `py title="src/a.py"`, `src/a.py`.
fn path_in_info(info: &str) -> Option<String> {
    info.split_whitespace().find_map(|token| {
        let token = token.trim_matches(['{', '}', ',']);
        let value = ["title=", "file=", "filename=", "path=", "name="].iter().find_map(|key| token.strip_prefix(key));
        let token = value.unwrap_or_else(|| token.split_once(':').map_or(token, |(_, path)| path));
        let token = token.trim_matches(['"', '\'']);
        is_path(token).then(|| token.to_owned())
    })
}

/// Path in a line of prose: `### src/a.py`, `**src/a.py**:`, `File: src/a.py`, ``Create `src/a.py`:``.
pub(crate) fn path_in_line(line: &str) -> Option<String> {
    let mut quoted = line.split('`').skip(1).step_by(2).filter(|part| is_path(part));
    if let Some(path) = quoted.next() {
        return quoted.all(|other| other == path).then(|| path.to_owned());
    }
    let text = line.trim().trim_start_matches(['#', '*', '-', '>', ' ']);
    let text = without_list_number(text);
    let text = without_key(text.trim_matches(['*', ' ', '_'])).trim_matches(['*', ' ', ':', '"', '\'']);
    is_path(text).then(|| text.to_owned())
}

/// Removes the number of a list item: `1. a.py`, `2) a.py`.
fn without_list_number(text: &str) -> &str {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_item = rest.len() < text.len() && (rest.starts_with(". ") || rest.starts_with(") "));
    if is_item { rest[2..].trim_start() } else { text }
}

/// Path in a comment: `# src/a.py`, `// file: src/a.py`, `<!-- a.html -->`, `/* a.css */`.
fn path_in_comment(line: &str) -> Option<String> {
    let line = line.trim();
    let text = ["#", "//", "--", "/*", "<!--", ";"].iter().find_map(|mark| line.strip_prefix(mark))?;
    let text = text.trim_end_matches("*/").trim_end_matches("-->");
    let text = without_key(text.trim());
    is_path(text).then(|| text.to_owned())
}

/// Removes a key such as `File:` or `path:`.
fn without_key(text: &str) -> &str {
    let Some((key, rest)) = text.split_once(':') else { return text };
    let known = ["file", "filename", "file name", "path", "file path", "filepath"];
    let key = key.trim_matches(['*', '_', ' ']);
    if known.iter().any(|k| key.eq_ignore_ascii_case(k)) { rest.trim_matches(['*', '_', ' ']) } else { text }
}

/// True if a word can only mean a file: it has an extension or is a well-known name. Paths that lead outside the
/// repository match too, so that they are refused instead of ignored.
pub fn is_path(text: &str) -> bool {
    let is_candidate = !text.is_empty()
        && text.len() <= 1024
        && !text.contains("://")
        && text.chars().all(|c| c.is_alphanumeric() || "_./-+@[]()~\\:".contains(c));
    if !is_candidate {
        return false;
    }
    let name = text.rsplit(['/', '\\']).next().unwrap_or(text);
    if FILES_WITHOUT_EXTENSION.contains(&name) {
        return true;
    }
    match name.rsplit_once('.') {
        // `.gitignore`
        Some(("", rest)) => rest.len() > 1 && rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'),
        Some((stem, extension)) => {
            stem.chars().any(char::is_alphanumeric)
                && (1..=10).contains(&extension.len())
                && extension.starts_with(|c: char| c.is_ascii_alphabetic())
                && extension.chars().all(|c| c.is_ascii_alphanumeric())
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_in_the_forms_models_use_are_found() {
        for info in
            ["python src/a.py", "python:src/a.py", "py title=\"src/a.py\"", "src/a.py", "python {file=src/a.py}"]
        {
            assert_eq!(path_in_info(info).as_deref(), Some("src/a.py"), "{info}");
        }
        for line in [
            "### src/a.py",
            "**src/a.py**:",
            "File: src/a.py",
            "**File:** src/a.py",
            "1. `src/a.py`",
            "2) src/a.py",
            "Create the file `src/a.py`:",
            "src/a.py:",
            "#### File: `src/a.py`",
        ] {
            assert_eq!(path_in_line(line).as_deref(), Some("src/a.py"), "{line}");
        }
        for line in ["# src/a.py", "// file: src/a.py", "/* src/a.py */"] {
            assert_eq!(path_in_comment(line).as_deref(), Some("src/a.py"), "{line}");
        }
        assert_eq!(path_in_line("### .gitignore").as_deref(), Some(".gitignore"));
        assert_eq!(path_in_line("2fa.py").as_deref(), Some("2fa.py"));
        assert_eq!(path_in_line("Makefile:").as_deref(), Some("Makefile"));
        assert_eq!(path_in_line("### ../../evil.py").as_deref(), Some("../../evil.py"));
    }

    #[test]
    fn prose_is_not_a_label() {
        for line in [
            "Here is the code:",
            "Python 3.11:",
            "See https://x.org/a.py",
            "e.g. this",
            "and/or",
            "`f(x)` and `g(y)`",
            "`a.py` or `b.py`",
        ] {
            assert_eq!(path_in_line(line), None, "{line}");
        }
        assert_eq!(path_in_info("python"), None);
        assert_eq!(path_in_comment("#!/usr/bin/env python3"), None);
        assert_eq!(path_in_comment("x = 1"), None);
    }
}
