//! Fenced code blocks of a Markdown text. A fence is closed by one at least as long, so a file that itself contains
//! fences can be sent in a longer one; a block that is never closed goes to the end.

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block<'t> {
    /// What stands behind the opening fence.
    pub info: &'t str,
    /// The nearest line above that is not empty, if it is not part of another block.
    pub above: Option<&'t str>,
    pub lines: Vec<&'t str>,
    /// Its closing fence came.
    pub closed: bool,
}

/// How far above a block its name may stand, in lines.
const REACH: usize = 3;

pub(super) fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut outside: Vec<&str> = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some((indent, mark, length, info)) = opening(line) else {
            outside.push(line);
            continue;
        };
        let above = outside.iter().rev().take(REACH).copied().find(|l| !l.trim().is_empty());
        outside.clear();
        let (mut body, mut closed) = (Vec::new(), false);
        for line in lines.by_ref() {
            if closes(line, mark, length) {
                closed = true;
                break;
            }
            body.push(dedent(line, indent));
        }
        blocks.push(Block { info, above, lines: body, closed });
    }
    blocks
}

/// Indentation, fence character, fence length and info string of a line that opens a block.
fn opening(line: &str) -> Option<(usize, char, usize, &str)> {
    let text = line.trim_start();
    let indent = line.len() - text.len();
    let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let length = text.chars().take_while(|c| *c == mark).count();
    let info = text.get(length..)?.trim();
    (length >= 3 && !(mark == '`' && info.contains('`'))).then_some((indent, mark, length, info))
}

fn closes(line: &str, mark: char, length: usize) -> bool {
    let text = line.trim();
    text.chars().count() >= length && text.chars().all(|c| c == mark)
}

/// A block inside a list is indented as a whole.
fn dedent(line: &str, indent: usize) -> &str {
    let blank = line.len() - line.trim_start_matches([' ', '\t']).len();
    line.get(blank.min(indent)..).unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_info_and_the_line_above() {
        let text = "Hello\n\n### a.py\n\n```python\nx = 1\n\n```\ntext\n~~~~\n```\ninner\n```\n~~~~\n";
        let found = blocks(text);
        assert_eq!(found[0], Block { info: "python", above: Some("### a.py"), lines: vec!["x = 1", ""], closed: true });
        assert_eq!(found[1].lines, ["```", "inner", "```"]);
        assert_eq!((found[1].info, found[1].above), ("", Some("text")));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn an_unclosed_block_goes_to_the_end_and_indented_ones_are_moved() {
        let open = blocks("```py\na\nb").remove(0);
        assert_eq!((open.lines, open.closed), (vec!["a", "b"], false));
        assert_eq!(blocks("1. x\n   ```py\n   if a:\n       b\n   ```\n").remove(0).lines, ["if a:", "    b"]);
        assert!(blocks("inline ``` is none\nso is ```a``` this").is_empty());
    }
}
