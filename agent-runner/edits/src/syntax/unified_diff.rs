//! Unified diffs, as `diff -u` and git write them and as models write them: with wrong line numbers, wrong counts or none
//! at all, and without the blank before a line that is kept. The format is described by the
//! [POSIX standard](https://pubs.opengroup.org/onlinepubs/9799919799/utilities/diff.html) and by
//! [git](https://git-scm.com/docs/diff-format#generate_patch_text_with_p).

use super::MAX_HUNKS;
use super::diff_hunks::{HunkHeader, bare_hunk, hunks};
use super::diff_names::{DiffNames, same_path, unquoted};
use crate::edit::{Change, Edit, Hunk, HunkLine};
use crate::path::repo_path;
use crate::problem::{FileProblem, NotWritableReason, ReplyProblem};

/// Maximum number of lines between `Index:` and the names of the file.
const MAX_INDEX_LINES: usize = 3;

/// True if the header of a file is first.
pub(crate) fn starts_with_diff(lines: &[&str]) -> bool {
    let Some(first) = lines.first() else { return false };
    let is_index = || (1..=MAX_INDEX_LINES.min(lines.len() - 1)).any(|n| is_file_header(&lines[n..]));
    first.starts_with("diff --git ") || is_file_header(lines) || (first.starts_with("Index: ") && is_index())
}

/// True if the header of a hunk is first, and a change follows.
pub(crate) fn starts_with_hunk(lines: &[&str]) -> bool {
    lines.first().is_some_and(|line| HunkHeader::parse(line).is_some())
        && lines.iter().any(|line| line.starts_with(['+', '-']))
}

/// True if two lines with the old and the new name are first.
pub(super) fn is_file_header(lines: &[&str]) -> bool {
    matches!(lines, [old, new, ..] if old.starts_with("--- ") && new.starts_with("+++ "))
}

/// What the headers of a file state.
#[derive(Default)]
struct Headers {
    names: Option<DiffNames>,
    renamed_from: Option<String>,
    renamed_to: Option<String>,
    /// The path of `diff --git`, if the file has the same path before and after.
    both: Option<String>,
    is_new: bool,
    is_deleted: bool,
    executable: Option<bool>,
}

/// Parses the diffs in a fenced block. A hunk without the header of a file belongs to the file before, or to `path`. Other
/// lines between diffs are ignored. Changes without any header are one hunk.
///
/// # Errors
/// [`ReplyProblem::InvalidPatch`] for binary files, copies and lines that a new file cannot have,
/// [`ReplyProblem::Path`], [`ReplyProblem::File`] for links and submodules, or
/// [`ReplyProblem::TooManyEdits`].
pub(crate) fn parse(path: &str, lines: &[&str]) -> Result<Vec<Edit>, ReplyProblem> {
    let lines = without_signature(lines);
    let edits = read(path, lines, true)?.0;
    if !edits.is_empty() {
        return Ok(edits);
    }
    let modify = |hunk| modification(repo_path(path)?, Vec::new(), vec![hunk], None, None);
    bare_hunk(lines).map(modify).transpose().map(|edit| edit.into_iter().collect())
}

/// Parses a diff outside of fences, which is first in `lines`.
///
/// # Errors
/// As [`parse`].
pub(crate) fn parse_unfenced(path: &str, lines: &[&str]) -> Result<Vec<Edit>, ReplyProblem> {
    Ok(read(path, without_signature(lines), false)?.0)
}

/// Number of lines of the diff that is first in `lines`, outside of fences.
pub(crate) fn extent(lines: &[&str]) -> usize {
    // A diff that cannot be read is refused when it is parsed.
    read("a", lines, false).map_or(lines.len(), |(_, length)| length)
}

/// Returns the edits, and the number of lines read. Outside of a fenced block, reading ends at the first line that belongs
/// to no diff.
fn read(path: &str, lines: &[&str], fenced: bool) -> Result<(Vec<Edit>, usize), ReplyProblem> {
    let mut edits: Vec<Edit> = Vec::new();
    let mut hunk_count = 0;
    let mut rest = lines;
    let mut length = 0;
    while !rest.is_empty() {
        let (headers, after) = headers(rest)?;
        let has_headers = after.len() < rest.len();
        let (hunks, after) = hunks(after, fenced, &mut hunk_count)?;
        if !has_headers && hunks.is_empty() {
            // Text between diffs.
            if !fenced && !rest[0].trim().is_empty() {
                break;
            }
            rest = &rest[1..];
            continue;
        }
        if edits.len() >= MAX_HUNKS {
            return Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS });
        }
        match edits.last_mut().map(|edit| &mut edit.change) {
            Some(Change::Modify { hunks: before, .. }) if !has_headers => before.extend(hunks),
            _ => edits.extend(edit(headers, hunks, path)?),
        }
        rest = after;
        length = lines.len() - rest.len();
    }
    Ok((edits, length))
}

/// The lines without the version of git that ends a mail with a patch.
fn without_signature<'a, 't>(lines: &'a [&'t str]) -> &'a [&'t str] {
    let Some(mark) = lines.iter().rposition(|line| matches!(line.trim_end_matches('\r'), "-- " | "--")) else {
        return lines;
    };
    let is_version = |line: &&str| line.starts_with(|c: char| c.is_ascii_digit()) && !line.trim().contains(' ');
    let after = &lines[mark + 1..];
    let is_signature = after.first().is_some_and(is_version) && after[1..].iter().all(|line| line.trim().is_empty());
    if is_signature { &lines[..mark] } else { lines }
}

/// Reads the header lines of a file, and returns the lines after them.
fn headers<'a, 't>(lines: &'a [&'t str]) -> Result<(Headers, &'a [&'t str]), ReplyProblem> {
    let mut headers = Headers::default();
    let mut rest = lines;
    let mut is_git = false;
    while let Some(line) = rest.first().map(|line| line.trim_end_matches('\r')) {
        if let Some(paths) = line.strip_prefix("diff --git ") {
            if is_git {
                break;
            }
            is_git = true;
            headers.both = same_path(paths);
        } else if is_file_header(rest) {
            let new = rest[1].trim_end_matches('\r').get(4..).unwrap_or_default();
            let names = DiffNames::new(&line[4..], new);
            headers.is_new |= names.old.is_none();
            headers.is_deleted |= names.new.is_none();
            headers.names = Some(names);
            rest = &rest[2..];
            break;
        } else if !is_git && (line.starts_with("index ") || line.starts_with("Index: ")) {
            // Part of the header only if the names follow.
            match rest.get(1..) {
                Some(after) if is_file_header(after) || after.first().is_some_and(|l| l.starts_with("====")) => {}
                _ => break,
            }
        } else if !is_git && line.starts_with("====") && rest.get(1..).is_some_and(is_file_header) {
        } else if is_git && let Some(mode) = line.strip_prefix("new file mode ") {
            headers.is_new = true;
            headers.executable = Some(is_executable(mode, &headers)?);
        } else if is_git && let Some(mode) = line.strip_prefix("new mode ") {
            headers.executable = Some(is_executable(mode, &headers)?);
        } else if is_git && line.starts_with("deleted file mode ") {
            headers.is_deleted = true;
        } else if is_git && let Some(path) = line.strip_prefix("rename from ") {
            headers.renamed_from = Some(unquoted(path));
        } else if is_git && let Some(path) = line.strip_prefix("rename to ") {
            headers.renamed_to = Some(unquoted(path));
        } else if is_git && (line.starts_with("copy from ") || line.starts_with("copy to ")) {
            return Err(ReplyProblem::invalid_patch(line, "send the copied file whole"));
        } else if is_git && (line.starts_with("Binary files ") || line.starts_with("GIT binary patch")) {
            return Err(ReplyProblem::invalid_patch(line, "binary files cannot be changed"));
        } else if !(is_git
            && ["index ", "old mode ", "similarity index ", "dissimilarity index "]
                .iter()
                .any(|key| line.starts_with(key)))
        {
            break;
        }
        rest = &rest[1..];
    }
    Ok((headers, rest))
}

/// The edit of a file.
fn edit(headers: Headers, hunks: Vec<Hunk>, path: &str) -> Result<Option<Edit>, ReplyProblem> {
    let Headers { names, renamed_from, renamed_to, both, is_new, is_deleted, executable } = headers;
    let paths = match (names, both) {
        (Some(names), _) => names.paths(),
        (None, Some(both)) => vec![both],
        (None, None) => vec![path.to_owned()],
    };
    if let (Some(from), Some(to)) = (renamed_from, renamed_to) {
        return modification(repo_path(&from)?, Vec::new(), hunks, Some(repo_path(&to)?), executable).map(Some);
    }
    let first = repo_path(paths.first().map_or(path, String::as_str))?;
    let others: Vec<String> = paths.iter().skip(1).filter_map(|path| repo_path(path).ok()).collect();
    if is_deleted {
        let lines: Vec<String> = hunks.iter().flat_map(|hunk| hunk.old_lines()).map(str::to_owned).collect();
        let change = Change::Delete { lines: (!hunks.is_empty()).then_some(lines) };
        return Ok(Some(Edit { path: first, other_paths: others, change }));
    }
    if is_new {
        let change = Change::Create { content: new_content(&hunks)?, executable };
        return Ok(Some(Edit::new(first, change)));
    }
    if hunks.is_empty() && executable.is_none() {
        return Ok(None);
    }
    modification(first, others, hunks, None, executable).map(Some)
}

fn modification(
    path: String,
    other_paths: Vec<String>,
    hunks: Vec<Hunk>,
    rename_to: Option<String>,
    executable: Option<bool>,
) -> Result<Edit, ReplyProblem> {
    let rename_to = rename_to.filter(|to| *to != path);
    Ok(Edit { path, other_paths, change: Change::Modify { hunks, rename_to, executable, in_order: true } })
}

/// The content of a new file: the added lines of all hunks.
fn new_content(hunks: &[Hunk]) -> Result<String, ReplyProblem> {
    let mut content = String::new();
    for line in hunks.iter().flat_map(|hunk| &hunk.lines) {
        match line {
            HunkLine::Add(text) => content.push_str(text),
            // A model forgot the mark of a blank line.
            HunkLine::Keep(text) if text.trim().is_empty() => {}
            HunkLine::Keep(text) | HunkLine::Remove(text) => {
                return Err(ReplyProblem::invalid_patch(text, "each line of a new file begins with `+`"));
            }
        }
        content.push('\n');
    }
    if hunks.last().is_some_and(|hunk| hunk.final_newline == Some(false)) {
        content.pop();
    }
    Ok(content)
}

fn is_executable(mode: &str, headers: &Headers) -> Result<bool, ReplyProblem> {
    let refuse = |reason| {
        let path = headers.both.clone().unwrap_or_else(|| "the file".to_owned());
        Err(FileProblem { path, reason }.into())
    };
    match mode.trim() {
        "100644" => Ok(false),
        "100755" => Ok(true),
        "120000" => refuse(NotWritableReason::Symlink),
        "160000" => refuse(NotWritableReason::Submodule),
        _ => Err(ReplyProblem::invalid_patch(mode, "a file has the mode 100644 or 100755")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edit::Position;

    fn parsed(text: &str) -> Result<Vec<Edit>, ReplyProblem> {
        parse("f", &text.split('\n').collect::<Vec<_>>())
    }

    fn one_hunk(text: &str) -> Hunk {
        match parsed(text).unwrap().remove(0).change {
            Change::Modify { mut hunks, .. } if hunks.len() == 1 => hunks.remove(0),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn headers_of_git_are_understood() {
        let text = "Some text.\ndiff --git a/x y.py b/x y.py\nold mode 100644\nnew mode 100755\ndiff --git a/a.py \
                    b/b.py\nsimilarity index 90%\nrename from a.py\nrename to b.py\nindex 1..2 100644\n--- a/a.py\n+++ \
                    b/b.py\n@@ -1 +1 @@\n-x\n+y\ndiff --git a/n.sh b/n.sh\nnew file mode 100755\nindex 0..1\n--- \
                    /dev/null\n+++ b/n.sh\n@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file\ndiff --git a/o.py \
                    b/o.py\ndeleted file mode 100644\n--- a/o.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n";
        let edits = parsed(text).unwrap();
        let paths: Vec<_> = edits.iter().map(|e| e.path.as_str()).collect();
        assert_eq!(paths, ["x y.py", "a.py", "n.sh", "o.py"]);
        assert!(matches!(edits[0].change, Change::Modify { executable: Some(true), .. }));
        assert!(matches!(&edits[1].change, Change::Modify { rename_to: Some(to), .. } if to == "b.py"));
        assert_eq!(edits[2].change, Change::Create { content: "a\nb".into(), executable: Some(true) });
        assert_eq!(edits[3].change, Change::Delete { lines: Some(vec!["x".into()]) });
    }

    #[test]
    fn only_a_rename_of_git_gives_a_new_name() {
        let edit = parsed("--- app.c\n+++ app_new.c\n@@ -1 +1 @@\n-a\n+b\n").unwrap().remove(0);
        assert_eq!((edit.path.as_str(), edit.other_paths.as_slice()), ("app_new.c", &["app.c".to_owned()][..]));
        assert!(matches!(edit.change, Change::Modify { rename_to: None, .. }));
        assert!(matches!(parsed("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"), Err(ReplyProblem::Path(_))));
    }

    #[test]
    fn new_and_removed_files_may_have_several_hunks() {
        let new =
            "--- /dev/null\n+++ b/f\n@@ -0,0 +1,2 @@\n+a\n\n+b\n@@ -0,0 +3 @@\n+c\n\\ No newline at end of file\n";
        let content = Change::Create { content: "a\n\nb\nc".into(), executable: None };
        assert_eq!(parsed(new).unwrap()[0].change, content);
        let old = "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n@@ -2 +0,0 @@\n-b\n";
        assert_eq!(parsed(old).unwrap()[0].change, Change::Delete { lines: Some(vec!["a".into(), "b".into()]) });
        for line in ["- a", " a", "a"] {
            let text = format!("--- /dev/null\n+++ b/f.yml\n@@ -0,0 +1,2 @@\n+items:\n{line}\n");
            assert!(matches!(parsed(&text), Err(ReplyProblem::InvalidPatch { .. })), "{line}");
        }
    }

    #[test]
    fn lines_that_look_like_headers_are_read_by_the_counts() {
        let hunk = one_hunk("--- a/q.sql\n+++ b/q.sql\n@@ -1,3 +1,3 @@\n--- old\n+++ new\n x\n y\n");
        assert_eq!((hunk.old_lines(), hunk.new_lines()), (vec!["-- old", "x", "y"], vec!["++ new", "x", "y"]));
    }

    #[test]
    fn wrong_counts_missing_blanks_and_missing_numbers_are_tolerated() {
        for header in ["@@ -1,9 +1,9 @@", "@@ -1,1 +1,1 @@", "@@", "@@ ... @@", "@@ -1 @@"] {
            let hunk = one_hunk(&format!("--- a/f\n+++ b/f\n{header}\ndef f():\n-    x\n+    y\n\n"));
            assert_eq!(hunk.old_lines(), ["def f():", "    x"], "{header}");
            assert_eq!(hunk.new_lines(), ["def f():", "    y"], "{header}");
        }
        let position = |header: &str| one_hunk(&format!("--- a/f\n+++ b/f\n{header}\n-x\n+y\n")).position;
        assert_eq!(position("@@ -7,1 +7,1 @@ def f():"), Position::OldLine(7));
        assert_eq!(position("@@ -7 @@"), Position::OldLine(7));
        assert_eq!(position("@@ def f():"), Position::After(vec!["def f():".into()]));
        assert_eq!(position("@@ @@ def f():"), Position::After(vec!["def f():".into()]));
        assert_eq!(position("@@ line 7"), Position::Line(7));
        assert_eq!(position("@@"), Position::After(vec![]));
    }

    #[test]
    fn end_of_the_file_is_stated_by_the_marker() {
        let end = |text: &str| one_hunk(&format!("--- a/f\n+++ b/f\n{text}")).final_newline;
        assert_eq!(end("@@ -1 +1 @@\n-x\n+y\n"), None);
        assert_eq!(end("@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n"), Some(true));
        assert_eq!(end("@@ -1 +1 @@\n-x\n+y\n\\ No newline at end of file\n"), Some(false));
        assert_eq!(end("@@ -1,2 +1 @@\n-x\n y\n\\ No newline at end of file\n"), Some(false));
    }

    #[test]
    fn counts_that_are_too_small_lose_no_line() {
        for rest in ["\n-x = 1\n+x = 2\n y = 2", "d\n+new\n e", " d\n-x\n e"] {
            let text = format!("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n{rest}\n");
            let last = rest.lines().last().unwrap().trim();
            assert_eq!(one_hunk(&text).new_lines().last().map(|l| l.trim()), Some(last), "{text}");
        }
        let mail = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n-- \n2.43.0\n\n";
        assert_eq!(one_hunk(mail).old_lines(), ["a"]);
    }

    #[test]
    fn prose_ends_a_diff_outside_of_a_block() {
        let diff = "--- a/f\n+++ b/f\n@@ -1,9 +1,9 @@\n a\n-b\n+c\n";
        let lines = |text: &'static str| format!("{diff}{text}");
        for (rest, count) in [("That is all.\n", 6), ("\n- a list\n", 6), ("@@ -9 +9 @@\n-x\n+y\n", 9)] {
            let text = lines(rest).replace("-1,9 +1,9", "-1,2 +1,2");
            assert_eq!(extent(&text.lines().collect::<Vec<_>>()), count, "{rest}");
        }
        let text = lines("That is all.\n");
        assert_eq!(extent(&text.lines().collect::<Vec<_>>()), 6, "also with wrong counts");
    }

    #[test]
    fn hunk_without_names_belongs_to_the_file_before() {
        let text = "--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n\nand\n@@ -9 +9 @@\n-c\n+d\n";
        let edits = parsed(text).unwrap();
        assert!(
            matches!(&edits[..], [Edit { path, change: Change::Modify { hunks, .. }, .. }] if path == "g" && hunks.len() == 2)
        );
        assert_eq!(parse("f", &["@@ -1 +1 @@", "-a", "+b"]).unwrap()[0].path, "f");
        assert_eq!(parse("f", &["-a", "+b"]).unwrap()[0].path, "f");
        assert_eq!(parse("f", &["a", "b"]).unwrap(), []);
    }

    #[test]
    fn links_submodules_binary_files_and_copies_are_refused() {
        let git = |lines: &str| parsed(&format!("diff --git a/x b/x\n{lines}\n")).unwrap_err();
        assert!(matches!(git("new file mode 120000"), ReplyProblem::File(p) if p.reason == NotWritableReason::Symlink));
        assert!(
            matches!(git("new file mode 160000"), ReplyProblem::File(p) if p.reason == NotWritableReason::Submodule)
        );
        assert!(matches!(git("new mode 100777"), ReplyProblem::InvalidPatch { .. }));
        assert!(matches!(git("Binary files a/x and b/x differ"), ReplyProblem::InvalidPatch { .. }));
        assert!(matches!(git("copy from x\ncopy to y"), ReplyProblem::InvalidPatch { .. }));
    }
}
