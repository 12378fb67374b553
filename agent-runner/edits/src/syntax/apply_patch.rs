//! The patch format of OpenAI's `apply_patch` tool: `*** Begin Patch`, then `*** Add File: PATH` with `+` lines, `***
//! Delete File: PATH`, or `*** Update File: PATH` with hunks and, before them, possibly `*** Move to: PATH`. A hunk begins
//! with `@@` and, after it, a line of the file that comes before the hunk; there may be several, one below the other. `***
//! End of File` after a hunk states that it is the last one. As an extension, `@@ line 12` states the line.
//! Format: <https://github.com/openai/codex/blob/main/codex-rs/apply-patch/apply_patch_tool_instructions.md>.

use crate::edit::{Change, Edit, Hunk, HunkLine, Position};
use crate::path::repo_path;
use crate::problem::Problem;

use super::search_replace::MAX_HUNKS;

const BEGIN: &str = "*** Begin Patch";
const END: &str = "*** End Patch";

/// True if a patch begins in the lines.
pub(crate) fn is_patch(lines: &[&str]) -> bool {
    lines.iter().any(|line| line.trim_end() == BEGIN || file_header(line).is_some())
}

/// True if the patch in the lines has its last line.
pub(crate) fn is_complete(lines: &[&str]) -> bool {
    lines.iter().any(|line| line.trim_end() == END)
}

/// What a header line of a file announces.
enum Header<'t> {
    Add(&'t str),
    Delete(&'t str),
    Update(&'t str),
}

fn file_header(line: &str) -> Option<Header<'_>> {
    // A line with a blank before it is one that a hunk keeps.
    let text = line.trim_end().strip_prefix("*** ")?;
    let path = |key: &str| text.strip_prefix(key).map(str::trim);
    path("Add File:")
        .map(Header::Add)
        .or_else(|| path("Delete File:").map(Header::Delete))
        .or_else(|| path("Update File:").map(Header::Update))
}

/// Parses all patches in `lines`. Lines outside of files are ignored.
///
/// # Errors
/// [`Problem::InvalidPatch`] for a line that the format does not allow, [`Problem::Path`], or
/// [`Problem::TooManyEdits`].
pub(crate) fn parse(lines: &[&str]) -> Result<Vec<Edit>, Problem> {
    let mut edits = Vec::new();
    let mut hunk_count = 0;
    let mut rest = lines;
    while let Some((line, after)) = rest.split_first() {
        rest = after;
        let Some(header) = file_header(line) else { continue };
        // The body ends before the next header, or at the end of the patch.
        let is_end = |line: &&str| file_header(line).is_some() || matches!(line.trim_end(), BEGIN | END);
        let length = rest.iter().position(is_end).unwrap_or(rest.len());
        let body = &rest[..length];
        rest = &rest[length..];
        if edits.len() >= MAX_HUNKS {
            return Err(Problem::TooManyEdits { max: MAX_HUNKS });
        }
        edits.push(match header {
            Header::Add(path) => Edit { path: repo_path(path)?, change: added_file(body)? },
            Header::Delete(path) => Edit { path: repo_path(path)?, change: Change::Delete { lines: None } },
            Header::Update(path) => Edit { path: repo_path(path)?, change: updated_file(body, &mut hunk_count)? },
        });
    }
    Ok(edits)
}

fn added_file(body: &[&str]) -> Result<Change, Problem> {
    let mut content = String::new();
    for line in without_blank_end(body) {
        let text = match line.strip_prefix('+') {
            Some(text) => text,
            // Models forget the `+` of blank lines.
            None if line.trim().is_empty() => "",
            None => return Err(invalid(line, "each line of an added file begins with `+`")),
        };
        content.push_str(text.trim_end_matches('\r'));
        content.push('\n');
    }
    Ok(Change::Create { content, executable: None })
}

fn updated_file(body: &[&str], hunk_count: &mut usize) -> Result<Change, Problem> {
    let mut rename_to = None;
    let mut hunks: Vec<Hunk> = Vec::new();
    let (mut anchors, mut stated): (Vec<String>, Option<usize>) = (Vec::new(), None);
    let mut lines: Vec<HunkLine> = Vec::new();
    let mut end_hunk = |lines: &mut Vec<HunkLine>, position: Position| {
        if !lines.is_empty() {
            let lines = std::mem::take(lines);
            hunks.push(Hunk { lines, position, final_newline: None, states_line_ends: false });
            *hunk_count += 1;
        }
        match *hunk_count > MAX_HUNKS {
            true => Err(Problem::TooManyEdits { max: MAX_HUNKS }),
            false => Ok(()),
        }
    };
    for line in without_blank_end(body) {
        let line = line.trim_end_matches('\r');
        if let Some(path) = line.strip_prefix("*** Move to:") {
            rename_to = Some(repo_path(path)?);
        } else if line.trim_end() == "*** End of File" {
            end_hunk(&mut lines, Position::EndAfter(std::mem::take(&mut anchors)))?;
            stated = None;
        } else if let Some(text) = line.strip_prefix("@@") {
            if !lines.is_empty() {
                end_hunk(&mut lines, position(&mut anchors, &mut stated))?;
            }
            let text = text.trim().trim_end_matches("@@").trim();
            match text.strip_prefix("line ").map(|number| number.trim().parse()) {
                Some(Ok(number)) => stated = Some(number),
                Some(Err(_)) | None if !text.is_empty() => anchors.push(text.to_owned()),
                Some(Err(_)) | None => {}
            }
        } else {
            lines.push(match line.split_at_checked(1) {
                Some((" ", text)) => HunkLine::Keep(text.to_owned()),
                Some(("-", text)) => HunkLine::Remove(text.to_owned()),
                Some(("+", text)) => HunkLine::Add(text.to_owned()),
                None => HunkLine::Keep(String::new()),
                Some(_) => return Err(invalid(line, "each line of a hunk begins with a blank, `-` or `+`")),
            });
        }
    }
    end_hunk(&mut lines, position(&mut anchors, &mut stated))?;
    Ok(Change::Modify { hunks, rename_to, executable: None, in_order: true })
}

fn position(anchors: &mut Vec<String>, stated: &mut Option<usize>) -> Position {
    let anchors = std::mem::take(anchors);
    stated.take().map_or(Position::After(anchors), Position::Line)
}

/// The lines without blank ones at the end, which separate the patch from what follows.
fn without_blank_end<'a, 't>(lines: &'a [&'t str]) -> &'a [&'t str] {
    let length = lines.iter().rposition(|line| !line.trim_end_matches('\r').is_empty()).map_or(0, |last| last + 1);
    &lines[..length]
}

fn invalid(line: &str, reason: &'static str) -> Problem {
    Problem::InvalidPatch { line: line.trim().chars().take(120).collect(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Edit>, Problem> {
        parse(&text.lines().collect::<Vec<_>>())
    }

    #[test]
    fn all_operations_are_parsed() {
        let text = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n\n+y = 2\n*** Delete File: b.py\n*** Update File: c.py\n\
                    *** Move to: d.py\n@@ class A:\n@@     def f(self):\n     a\n-b\n+c\n*** End of File\n*** End Patch\n";
        let edits = parsed(text).unwrap();
        assert_eq!(edits[0].change, Change::Create { content: "x = 1\n\ny = 2\n".into(), executable: None });
        assert_eq!(edits[1], Edit { path: "b.py".into(), change: Change::Delete { lines: None } });
        let Change::Modify { hunks, rename_to, in_order: true, .. } = &edits[2].change else { panic!("{edits:?}") };
        assert_eq!(rename_to.as_deref(), Some("d.py"));
        assert_eq!(hunks[0].position, Position::EndAfter(vec!["class A:".into(), "def f(self):".into()]));
        assert_eq!(hunks[0].new_lines(), ["    a", "c"]);
    }

    #[test]
    fn hunks_are_separated_by_their_first_line() {
        let edits = parsed("*** Update File: c.py\n-a\n+b\n@@\n-c\n+d\n@@ line 7\n-e\n+f\n").unwrap();
        let Change::Modify { hunks, .. } = &edits[0].change else { panic!("{edits:?}") };
        let positions: Vec<_> = hunks.iter().map(|h| h.position.clone()).collect();
        assert_eq!(positions, [Position::After(vec![]), Position::After(vec![]), Position::Line(7)]);
    }

    #[test]
    fn invalid_lines_and_paths_are_refused() {
        assert!(matches!(parsed("*** Add File: a\nx\n"), Err(Problem::InvalidPatch { .. })));
        assert!(matches!(parsed("*** Update File: a\n-x\n*y\n"), Err(Problem::InvalidPatch { .. })));
        assert!(matches!(parsed("*** Delete File: ../a\n"), Err(Problem::Path(_))));
        assert!(matches!(parsed("*** Update File: a\n*** Move to: .git/x\n"), Err(Problem::Path(_))));
        let many = "*** Update File: a\n-x\n".repeat(MAX_HUNKS + 1);
        assert!(matches!(parsed(&many), Err(Problem::TooManyEdits { .. })));
    }
}
