//! Fenced code blocks of a Markdown text. A closing fence is at least as long as the opening one, so a file that
//! contains fences can be sent in a longer fence. A block without a closing fence extends to the end of the text.

/// A fenced code block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FencedBlock<'t> {
    /// Info string: the text after the opening fence.
    pub info: &'t str,
    /// Nearest non-empty line above the block, unless it belongs to another block.
    pub line_above: Option<&'t str>,
    /// Content without the fences, dedented.
    pub lines: Vec<&'t str>,
    /// True if the block has a closing fence.
    pub closed: bool,
}

/// Number of lines directly above a block that are searched for its label.
const MAX_LABEL_DISTANCE: usize = 3;

/// Returns the fenced blocks of `text`, in order.
pub(crate) fn blocks(text: &str) -> Vec<FencedBlock<'_>> {
    let mut blocks = Vec::new();
    let mut outside: Vec<&str> = Vec::new();
    // A carriage return at the end of a line stays.
    let mut lines = text.strip_suffix('\n').unwrap_or(text).split('\n');
    while let Some(line) = lines.next() {
        // Reasoning between blocks; that at the beginning is removed earlier.
        if line.trim_start().starts_with("<think>") {
            let mut line = line;
            while !line.contains("</think>") {
                let Some(next) = lines.next() else { break };
                line = next;
            }
            outside.clear();
            continue;
        }
        let Some((indent, mark, length, info)) = opening_fence(line) else {
            outside.push(line);
            continue;
        };
        let line_above = outside.iter().rev().take(MAX_LABEL_DISTANCE).copied().find(|l| !l.trim().is_empty());
        outside.clear();
        let (mut body, mut closed) = (Vec::new(), false);
        for line in lines.by_ref() {
            if is_closing_fence(line, mark, length) && !(is_indented(line, indent) && is_diff(info, &body)) {
                closed = true;
                break;
            }
            body.push(dedent(line, indent));
        }
        blocks.push(FencedBlock { info, line_above, lines: body, closed });
    }
    blocks
}

/// Indentation, fence character, fence length and info string of an opening fence; `None` for other lines.
fn opening_fence(line: &str) -> Option<(usize, char, usize, &str)> {
    let text = line.trim_start();
    let indent = line.len() - text.len();
    let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let length = text.chars().take_while(|c| *c == mark).count();
    let info = text.get(length..)?.trim();
    (length >= 3 && !(mark == '`' && info.contains('`'))).then_some((indent, mark, length, info))
}

fn is_closing_fence(line: &str, mark: char, length: usize) -> bool {
    let text = line.trim();
    text.chars().count() >= length && text.chars().all(|c| c == mark)
}

fn is_indented(line: &str, indent: usize) -> bool {
    line.len() - line.trim_start().len() > indent
}

/// True if the block is a diff or patch, in which a line that the edit keeps begins with a blank, also if it is a fence.
fn is_diff(info: &str, body: &[&str]) -> bool {
    let is_header = |line: &&str| ["diff --git ", "--- ", "*** Begin Patch"].iter().any(|key| line.starts_with(key));
    matches!(info, "diff" | "patch" | "udiff")
        || body.iter().find(|line| !line.trim().is_empty()).is_some_and(is_header)
}

/// Removes up to `indent` leading bytes of white space: a block inside a list item is indented as a whole.
fn dedent(line: &str, indent: usize) -> &str {
    let blank = line.len() - line.trim_start_matches([' ', '\t']).len();
    line.get(blank.min(indent)..).unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_info_string_and_line_above() {
        let text = "Hello\n\n### a.py\n\n```python\nx = 1\n\n```\ntext\n~~~~\n```\ninner\n```\n~~~~\n";
        let found = blocks(text);
        let first =
            FencedBlock { info: "python", line_above: Some("### a.py"), lines: vec!["x = 1", ""], closed: true };
        assert_eq!(found[0], first);
        assert_eq!(found[1].lines, ["```", "inner", "```"]);
        assert_eq!((found[1].info, found[1].line_above), ("", Some("text")));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn unclosed_block_ends_with_the_text_and_indented_block_is_dedented() {
        let open = blocks("```py\na\nb").remove(0);
        assert_eq!((open.lines, open.closed), (vec!["a", "b"], false));
        assert_eq!(blocks("1. x\n   ```py\n   if a:\n       b\n   ```\n").remove(0).lines, ["if a:", "    b"]);
        let kept = "```diff\n--- a/r.md\n+++ b/r.md\n@@ -1,2 +1 @@\n ```\n-x\n ```\n```\n";
        assert_eq!(blocks(kept).remove(0).lines[3..], [" ```", "-x", " ```"]);
        assert!(blocks("inline ``` is none\nso is ```a``` this").is_empty());
    }
}
