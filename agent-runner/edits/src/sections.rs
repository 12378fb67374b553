//! Parts of a reply that may be edits, in order: fenced code blocks, and search/replace blocks, patches and diffs outside
//! of them. Everything between is prose.
//!
//! Fences follow [CommonMark](https://spec.commonmark.org/0.31.2/#fenced-code-blocks), with three exceptions, because files
//! contain fences too: between the markers of a search/replace block no fence ends the block; in a diff or patch, a fence
//! after a blank is a line that the edit keeps; and a fence with an info string inside a block opens an inner block. A block
//! without a closing fence extends to the end of the reply.

use crate::syntax::{apply_patch, search_replace, unified_diff};

/// A part of a reply that may be an edit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Section<'t> {
    Block(FencedBlock<'t>),
    /// A search/replace block outside of fences: its lines, and the nearest line above that is not blank.
    Hunk {
        lines: Vec<&'t str>,
        line_above: Option<&'t str>,
    },
    /// A patch outside of fences.
    Patch(Vec<&'t str>),
    /// A diff outside of fences.
    Diff(Vec<&'t str>),
}

/// A fenced code block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FencedBlock<'t> {
    /// Info string: the text after the opening fence.
    pub info: &'t str,
    /// Nearest line above the block that is not blank, unless it belongs to another section.
    pub line_above: Option<&'t str>,
    /// Content without the fences, dedented.
    pub lines: Vec<&'t str>,
    /// True if the block has a closing fence.
    pub closed: bool,
}

/// Number of lines directly above a section that are searched for its label.
const MAX_LABEL_DISTANCE: usize = 3;

/// Returns the sections of a reply, and its last line if it is prose.
pub(crate) fn sections(text: &str) -> (Vec<Section<'_>>, Option<&str>) {
    // A carriage return at the end of a line stays.
    let lines: Vec<&str> = text.strip_suffix('\n').unwrap_or(text).split('\n').collect();
    let mut sections = Vec::new();
    // Index of the first line after the last section.
    let mut prose = 0;
    let mut n = 0;
    while let Some(line) = lines.get(n) {
        let rest = &lines[n..];
        let above = lines[prose..n].iter().rev().take(MAX_LABEL_DISTANCE).copied().find(|l| !l.trim().is_empty());
        let (section, length) = if line.trim_start().starts_with("<think>") {
            // Reasoning between sections; that at the beginning is removed earlier.
            let end = rest.iter().position(|line| line.contains("</think>")).map_or(rest.len(), |end| end + 1);
            (None, end)
        } else if let Some(fence) = Fence::opening(line) {
            let (block, length) = fence.block(above, &rest[1..]);
            (Some(Section::Block(block)), length + 1)
        } else if search_replace::is_search_marker(line) {
            let end = rest.iter().position(|line| search_replace::is_replace_marker(line));
            let end = end.map_or(rest.len(), |end| end + 1);
            (Some(Section::Hunk { lines: rest[..end].to_vec(), line_above: above }), end)
        } else if apply_patch::is_patch(&rest[..1]) {
            let end = rest.iter().position(|line| apply_patch::is_end(line)).map_or(rest.len(), |end| end + 1);
            (Some(Section::Patch(rest[..end].to_vec())), end)
        } else if unified_diff::starts_with_diff(rest) {
            let end = unified_diff::extent(rest);
            (Some(Section::Diff(rest[..end].to_vec())), end)
        } else {
            n += 1;
            continue;
        };
        sections.extend(section);
        n += length.max(1);
        prose = n;
    }
    let last = lines[prose.min(lines.len())..].iter().rev().copied().find(|line| !line.trim().is_empty());
    (sections, last)
}

/// An opening fence.
#[derive(Debug, Clone, Copy)]
struct Fence<'t> {
    indent: usize,
    mark: char,
    length: usize,
    info: &'t str,
}

impl<'t> Fence<'t> {
    fn opening(line: &'t str) -> Option<Self> {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let length = text.chars().take_while(|c| *c == mark).count();
        let info = text.get(length..)?.trim();
        (length >= 3 && !(mark == '`' && info.contains('`'))).then_some(Self { indent, mark, length, info })
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let text = line.trim();
        let indent = line.len() - line.trim_start().len();
        indent <= self.indent + 3 && text.chars().count() >= self.length && text.chars().all(|c| c == self.mark)
    }

    /// Reads the block that begins with the lines after the fence. Returns it and the number of lines that it takes.
    fn block(self, line_above: Option<&'t str>, lines: &[&'t str]) -> (FencedBlock<'t>, usize) {
        let end = self.end(lines, true).or_else(|| self.end(lines, false));
        let body = &lines[..end.unwrap_or(lines.len())];
        let body = body.iter().map(|line| dedent(line, self.indent)).collect();
        let block = FencedBlock { info: self.info, line_above, lines: body, closed: end.is_some() };
        (block, end.map_or(lines.len(), |end| end + 1))
    }

    /// Index of the closing fence. `nested` if the block may contain others.
    fn end(self, lines: &[&str], nested: bool) -> Option<usize> {
        let mut inner = 0_usize;
        let mut in_hunk = false;
        let mut is_marked = matches!(self.info, "diff" | "patch" | "udiff");
        let mut first_lines = 0;
        for (n, line) in lines.iter().enumerate() {
            if first_lines < 2 && !line.trim().is_empty() {
                first_lines += 1;
                let has_header = ["diff --git ", "--- ", "*** "].iter().any(|key| line.starts_with(key));
                is_marked |= has_header;
            }
            if !is_marked && search_replace::is_search_marker(line) {
                in_hunk = true;
            } else if in_hunk {
                in_hunk = !search_replace::is_replace_marker(line);
            } else if self.is_closed_by(line) {
                let is_kept = is_marked && line.len() - line.trim_start().len() > self.indent;
                match inner {
                    _ if is_kept => {}
                    0 => return Some(n),
                    _ => inner -= 1,
                }
            } else if nested
                && !is_marked
                && Fence::opening(line).is_some_and(|f| f.mark == self.mark && f.length >= self.length)
            {
                inner += 1;
            }
        }
        None
    }
}

/// Removes up to `indent` leading bytes of white space: a block inside a list item is indented as a whole.
fn dedent(line: &str, indent: usize) -> &str {
    let blank = line.len() - line.trim_start_matches([' ', '\t']).len();
    line.get(blank.min(indent)..).unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(text: &str) -> Vec<FencedBlock<'_>> {
        let block = |section| match section {
            Section::Block(block) => Some(block),
            Section::Hunk { .. } | Section::Patch(_) | Section::Diff(_) => None,
        };
        sections(text).0.into_iter().filter_map(block).collect()
    }

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
        assert!(blocks("inline ``` is none\nso is ```a``` this").is_empty());
    }

    #[test]
    fn fences_in_files_do_not_end_the_block() {
        for (text, lines) in [
            ("```diff\n--- a/r.md\n+++ b/r.md\n@@ -1,2 +1 @@\n ```\n-x\n ```\n```\n", 6),
            (
                "```bash\napply_patch <<'EOF'\n*** Begin Patch\n*** Update File: a\n ```\n+x\n ```\n*** End Patch\nEOF\n```\n",
                8,
            ),
            ("```markdown\n# T\n\n```bash\nrun\n```\n\nend\n```\n", 7),
            ("```markdown\n1. Install\n\n    ```\n    pip\n    ```\n```\n", 5),
            ("```\n<<<<<<< SEARCH\n```\na\n=======\n```\nb\n>>>>>>> REPLACE\n```\n", 7),
        ] {
            let found = blocks(text);
            assert_eq!((found.len(), found[0].lines.len(), found[0].closed), (1, lines, true), "{text}");
        }
        // A block whose closing fence is missing does not take all others with it.
        let two = blocks("```python\na\n\nb.py\n```python\nb\n```\nc.py\n```python\nc\n```\n");
        assert_eq!((two.len(), two[1].lines.as_slice()), (2, &["c"][..]));
    }

    #[test]
    fn edits_outside_of_fences_are_sections() {
        let text = "I do this:\n\na.py\n<<<<<<< SEARCH\n```\n=======\n~~~\n>>>>>>> REPLACE\nand\n*** Begin Patch\n*** Update File: \
                    r.md\n ```python\n-x\n*** End Patch\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n ```\n-a\n+b\n\n- a list\nend";
        let (found, last) = sections(text);
        let [Section::Hunk { lines, line_above: Some("a.py") }, Section::Patch(patch), Section::Diff(diff)] =
            found.as_slice()
        else {
            panic!("{found:?}")
        };
        assert_eq!((lines.len(), patch.len(), diff.len(), last), (5, 5, 6, Some("end")));
        let skipped = "<think>\n```\n<<<<<<< SEARCH\n</think>\ntext";
        assert_eq!(sections(skipped), (vec![], Some("text")));
    }
}
