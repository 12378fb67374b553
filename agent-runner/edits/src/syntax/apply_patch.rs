//! The patch format of OpenAI's `apply_patch` tool: `*** Begin Patch`, then `*** Add File: PATH` with `+` lines, `***
//! Delete File: PATH`, or `*** Update File: PATH` with hunks and, before them, possibly `*** Move to: PATH`. A hunk begins
//! with `@@` and, after it, a line of the file that comes before the hunk; there may be several, one below the other. `***
//! End of File` after a hunk states that it is the last one. As an extension, `@@ line 12` states the line.
//! Format: <https://github.com/openai/codex/blob/main/codex-rs/apply-patch/apply_patch_tool_instructions.md>.

use crate::edit::{Change, Edit, Hunk, HunkLine, Position};
use crate::path::repo_path;
use crate::problem::ReplyProblem;

use super::MAX_HUNKS;

const BEGIN: &str = "*** Begin Patch";
const END: &str = "*** End Patch";

/// True if a patch begins in the lines.
pub(crate) fn is_patch(lines: &[&str]) -> bool {
    lines.iter().any(|line| line.trim_end() == BEGIN || file_header(line).is_some())
}

/// True for the last line of a patch.
pub(crate) fn is_end(line: &str) -> bool {
    line.trim_end() == END
}

/// True if every patch in the lines has its last line.
pub(crate) fn is_complete(lines: &[&str]) -> bool {
    let end = lines.iter().rposition(|line| is_end(line));
    end > lines.iter().rposition(|line| line.trim_end() == BEGIN || file_header(line).is_some())
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
/// [`ReplyProblem::InvalidPatch`] for a line that the format does not allow, [`ReplyProblem::Path`], or
/// [`ReplyProblem::TooManyEdits`].
pub(crate) fn parse(lines: &[&str]) -> Result<Vec<Edit>, ReplyProblem> {
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
            return Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS });
        }
        edits.push(match header {
            Header::Add(path) => Edit::new(repo_path(path)?, added_file(body)?),
            Header::Delete(path) => Edit::new(repo_path(path)?, Change::Delete { lines: None }),
            Header::Update(path) => {
                let path = repo_path(path)?;
                let change = updated_file(&path, body, &mut hunk_count)?;
                Edit::new(path, change)
            }
        });
    }
    Ok(edits)
}

fn added_file(body: &[&str]) -> Result<Change, ReplyProblem> {
    let mut content = String::new();
    for line in without_blank_end(body) {
        let text = match line.strip_prefix('+') {
            Some(text) => text,
            // Models forget the `+` of blank lines.
            None if line.trim().is_empty() => "",
            None => return Err(ReplyProblem::invalid_patch(line, "each line of an added file begins with `+`")),
        };
        content.push_str(text.trim_end_matches('\r'));
        content.push('\n');
    }
    Ok(Change::Create { content, executable: None })
}

fn updated_file(path: &str, body: &[&str], hunk_count: &mut usize) -> Result<Change, ReplyProblem> {
    let mut rename_to = None;
    let mut hunks: Vec<Hunk> = Vec::new();
    let (mut anchors, mut stated): (Vec<String>, Option<usize>) = (Vec::new(), None);
    let mut lines: Vec<HunkLine> = Vec::new();
    let mut end_hunk = |lines: &mut Vec<HunkLine>, position: Position| {
        // Blank lines between hunks.
        while matches!(lines.last(), Some(HunkLine::Keep(text)) if text.is_empty()) {
            lines.pop();
        }
        if !lines.is_empty() {
            let lines = std::mem::take(lines);
            let other_readings = Vec::new();
            hunks.push(Hunk {
                lines,
                other_readings,
                position,
                final_newline: None,
                states_line_ends: false,
                has_marks: true,
            });
            *hunk_count += 1;
        }
        match *hunk_count > MAX_HUNKS {
            true => Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS }),
            false => Ok(()),
        }
    };
    let mut body = without_blank_end(body);
    // Models add the header of a diff.
    if let [old, new, rest @ ..] = body
        && old.starts_with("--- ")
        && new.starts_with("+++ ")
    {
        body = rest;
    }
    for line in body {
        let line = line.trim_end_matches('\r');
        if let Some(new) = line.strip_prefix("*** Move to:") {
            rename_to = Some(repo_path(new)?).filter(|new| new != path);
        } else if line.trim_end() == "*** End of File" {
            end_hunk(&mut lines, Position::AtEndAfter(std::mem::take(&mut anchors)))?;
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
                Some(_) => {
                    return Err(ReplyProblem::invalid_patch(
                        line,
                        "each line of a hunk begins with a blank, `-` or `+`",
                    ));
                }
            });
        }
    }
    end_hunk(&mut lines, position(&mut anchors, &mut stated))?;
    if hunks.is_empty() && rename_to.is_none() {
        return Err(ReplyProblem::invalid_patch(path, "it has no hunk for this file"));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Edit>, ReplyProblem> {
        parse(&text.lines().collect::<Vec<_>>())
    }

    #[test]
    fn all_operations_are_parsed() {
        let text = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n\n+y = 2\n*** Delete File: b.py\n*** Update File: c.py\n\
                    *** Move to: d.py\n@@ class A:\n@@     def f(self):\n     a\n-b\n+c\n*** End of File\n*** End Patch\n";
        let edits = parsed(text).unwrap();
        assert_eq!(edits[0].change, Change::Create { content: "x = 1\n\ny = 2\n".into(), executable: None });
        assert_eq!(edits[1], Edit::new("b.py", Change::Delete { lines: None }));
        let Change::Modify { hunks, rename_to, in_order: true, .. } = &edits[2].change else { panic!("{edits:?}") };
        assert_eq!(rename_to.as_deref(), Some("d.py"));
        assert_eq!(hunks[0].position, Position::AtEndAfter(vec!["class A:".into(), "def f(self):".into()]));
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
    fn blank_lines_between_hunks_and_headers_of_a_diff_are_ignored() {
        let edits = parsed("*** Update File: a\n--- a/a\n+++ b/a\n@@\n-a\n+b\n\n@@\n-c\n+d\n\n").unwrap();
        let Change::Modify { hunks, .. } = &edits[0].change else { panic!("{edits:?}") };
        assert_eq!((hunks[0].old_lines(), hunks[1].new_lines()), (vec!["a"], vec!["d"]));
    }

    #[test]
    fn patch_is_complete_if_its_last_line_is_the_end() {
        let lines = |text: &'static str| text.lines().collect::<Vec<_>>();
        assert!(is_complete(&lines("*** Begin Patch\n*** Delete File: a\n*** End Patch\nDone.")));
        assert!(!is_complete(&lines("*** Begin Patch\n*** Delete File: a\n*** End Patch\n*** Begin Patch\n")));
        assert!(!is_complete(&lines("*** Delete File: a\n")));
    }

    #[test]
    fn invalid_lines_and_paths_are_refused() {
        assert!(matches!(parsed("*** Add File: a\nx\n"), Err(ReplyProblem::InvalidPatch { .. })));
        assert!(matches!(parsed("*** Update File: a\n-x\n*y\n"), Err(ReplyProblem::InvalidPatch { .. })));
        assert!(matches!(parsed("*** Update File: a\n"), Err(ReplyProblem::InvalidPatch { .. })));
        assert!(matches!(parsed("*** Delete File: ../a\n"), Err(ReplyProblem::Path(_))));
        assert!(matches!(parsed("*** Update File: a\n*** Move to: .git/x\n"), Err(ReplyProblem::Path(_))));
        let many = "*** Update File: a\n-x\n".repeat(MAX_HUNKS + 1);
        assert!(matches!(parsed(&many), Err(ReplyProblem::TooManyEdits { .. })));
    }
}
