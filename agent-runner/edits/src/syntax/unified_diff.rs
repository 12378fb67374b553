//! Unified diffs, as `diff -u` and git write them and as models write them: with wrong line numbers, wrong counts or none
//! at all, and without the blank before a line that is kept. The format is described by the
//! [POSIX standard](https://pubs.opengroup.org/onlinepubs/9799919799/utilities/diff.html) and by
//! [git](https://git-scm.com/docs/diff-format#generate_patch_text_with_p).
//!
//! A hunk whose counts agree with its lines is read by the counts, because a removed line `-- x` looks like a header.
//! All other hunks extend to the next header.

use crate::edit::{Change, Edit, Hunk, HunkLine, Position};
use crate::path::repo_path;
use crate::problem::{FileProblem, NotWritableReason, Problem};

use super::search_replace::MAX_HUNKS;

/// True if the lines contain the header of a file and a change.
pub(crate) fn is_diff(lines: &[&str]) -> bool {
    let has_git_header = lines.iter().any(|line| line.starts_with("diff --git "));
    has_git_header || (0..lines.len()).any(|n| is_file_header(&lines[n..]))
}

/// True if two lines with the old and the new name are first.
fn is_file_header(lines: &[&str]) -> bool {
    matches!(lines, [old, new, ..] if old.starts_with("--- ") && new.starts_with("+++ "))
}

/// What the headers of a file state.
#[derive(Default)]
struct Headers {
    old: Option<String>,
    new: Option<String>,
    renamed_from: Option<String>,
    renamed_to: Option<String>,
    /// The path of `diff --git`, if the file has the same path before and after.
    both: Option<String>,
    is_new: bool,
    is_deleted: bool,
    executable: Option<bool>,
}

/// Parses all diffs in `lines`. A hunk without the header of a file belongs to `path`. Lines before the first diff are
/// ignored.
///
/// # Errors
/// [`Problem::InvalidPatch`] for binary files and copies, [`Problem::UnnamedDiff`] if a hunk has no path,
/// [`Problem::Path`], [`Problem::File`] for links and submodules, or [`Problem::TooManyEdits`].
pub(crate) fn parse(path: Option<&str>, lines: &[&str]) -> Result<Vec<Edit>, Problem> {
    let mut edits = Vec::new();
    let mut hunk_count = 0;
    let mut rest = lines;
    while !rest.is_empty() {
        let (headers, after) = headers(rest)?;
        let has_headers = after.len() < rest.len();
        let (hunks, after) = hunks(after, &mut hunk_count)?;
        if !has_headers && hunks.is_empty() {
            // Text between diffs.
            rest = &rest[1..];
            continue;
        }
        if edits.len() >= MAX_HUNKS {
            return Err(Problem::TooManyEdits { max: MAX_HUNKS });
        }
        edits.extend(edit(headers, hunks, path)?);
        rest = after;
    }
    Ok(edits)
}

/// Reads the header lines of a file, and returns the lines after them.
fn headers<'a, 't>(lines: &'a [&'t str]) -> Result<(Headers, &'a [&'t str]), Problem> {
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
            let (old, new) =
                (file_name(&line[4..]), file_name(rest[1].trim_end_matches('\r').get(4..).unwrap_or_default()));
            (headers.old, headers.new) = without_prefixes(old, new);
            headers.is_new |= headers.old.is_none();
            headers.is_deleted |= headers.new.is_none();
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
            return Err(invalid(line, "send the copied file whole"));
        } else if is_git && (line.starts_with("Binary files ") || line.starts_with("GIT binary patch")) {
            return Err(invalid(line, "binary files cannot be changed"));
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

/// Reads the hunks of a file, and returns the lines after them.
fn hunks<'a, 't>(lines: &'a [&'t str], count: &mut usize) -> Result<(Vec<Hunk>, &'a [&'t str]), Problem> {
    let mut hunks = Vec::new();
    let mut rest = lines;
    while let Some(header) = rest.first().and_then(|line| hunk_header(line)) {
        *count += 1;
        if *count > MAX_HUNKS {
            return Err(Problem::TooManyEdits { max: MAX_HUNKS });
        }
        let (hunk, after) = match counted_lines(&rest[1..], &header) {
            Some(counted) => counted,
            None => uncounted_lines(&rest[1..]),
        };
        rest = after;
        if !hunk.is_empty() {
            hunks.push(finish(hunk, header.position()));
        }
        // Blank lines between hunks.
        let blank = rest.iter().take_while(|line| line.trim().is_empty()).count();
        if rest.get(blank).is_some_and(|line| hunk_header(line).is_some()) {
            rest = &rest[blank..];
        }
    }
    Ok((hunks, rest))
}

/// The changes in `lines`, which have no header at all, as one hunk for `path`.
pub(crate) fn bare_hunk(path: String, lines: &[&str]) -> Option<Edit> {
    let (lines, _) = uncounted_lines(lines);
    let is_change = |(line, _): &(HunkLine, bool)| !matches!(line, HunkLine::Keep(_));
    if !lines.iter().any(is_change) {
        return None;
    }
    let hunks = vec![finish(lines, Position::After(Vec::new()))];
    Some(Edit { path, change: Change::Modify { hunks, rename_to: None, executable: None, in_order: true } })
}

/// Line of a hunk, and whether the file ends there without a newline.
type MarkedLine = (HunkLine, bool);

/// Header of a hunk.
struct HunkHeader {
    /// First old line, and the numbers of old and new lines.
    range: Option<(usize, Option<(usize, usize)>)>,
    /// Text after the numbers.
    section: String,
    /// The number in `@@ line 12`, which a model copies from a list of candidates.
    stated: Option<usize>,
}

impl HunkHeader {
    fn position(&self) -> Position {
        match &self.range {
            Some((line, _)) => Position::OldLine(*line),
            None if self.stated.is_some() => self.stated.map_or(Position::Unstated, Position::Line),
            None if self.section.is_empty() => Position::After(Vec::new()),
            None => Position::After(vec![self.section.clone()]),
        }
    }
}

/// `@@ -1,2 +1,3 @@ section`, also incomplete: `@@ -1 @@`, `@@ ... @@`, `@@ section`, `@@`.
fn hunk_header(line: &str) -> Option<HunkHeader> {
    let text = line.trim_end().strip_prefix("@@")?;
    let (numbers, section) = text.split_once("@@").unwrap_or((text, ""));
    let section = section.trim().to_owned();
    let stated = numbers.trim().strip_prefix("line ").and_then(|number| number.trim().parse().ok());
    let mut words = numbers.split_whitespace();
    let old = words.next().and_then(|word| range(word.strip_prefix('-')?));
    let new = words.next().and_then(|word| range(word.strip_prefix('+')?));
    Some(match (old, new) {
        (Some((line, old)), Some((_, new))) => HunkHeader { range: Some((line, Some((old, new)))), section, stated },
        (Some((line, _)), None) => HunkHeader { range: Some((line, None)), section, stated },
        (None, _) => {
            let is_numbers = numbers.trim().chars().all(|c| c.is_ascii_digit() || " .,+-".contains(c));
            let section = if is_numbers { section } else { numbers.trim().to_owned() };
            HunkHeader { range: None, section, stated }
        }
    })
}

/// `12,3` or `12`, which is one line.
fn range(text: &str) -> Option<(usize, usize)> {
    match text.split_once(',') {
        Some((line, count)) => Some((line.parse().ok()?, count.parse().ok()?)),
        None => Some((text.parse().ok()?, 1)),
    }
}

/// The lines of a hunk whose counts are right: the line after the last counted one does not belong to the hunk.
fn counted_lines<'a, 't>(lines: &'a [&'t str], header: &HunkHeader) -> Option<(Vec<MarkedLine>, &'a [&'t str])> {
    let (mut old, mut new) = header.range.as_ref()?.1?;
    let mut hunk: Vec<MarkedLine> = Vec::new();
    let mut rest = lines;
    while old > 0 || new > 0 {
        let (line, after) = rest.split_first()?;
        rest = after;
        let line = match line.split_at_checked(1) {
            Some((" ", text)) => HunkLine::Keep(text.to_owned()),
            Some(("-", text)) => HunkLine::Remove(text.to_owned()),
            Some(("+", text)) => HunkLine::Add(text.to_owned()),
            Some(("\\", _)) => {
                hunk.last_mut()?.1 = true;
                continue;
            }
            // Some programs remove blanks at the end of a line.
            None => HunkLine::Keep(String::new()),
            Some(("\r", "")) => HunkLine::Keep("\r".to_owned()),
            Some(_) => return None,
        };
        if !matches!(line, HunkLine::Add(_)) {
            old = old.checked_sub(1)?;
        }
        if !matches!(line, HunkLine::Remove(_)) {
            new = new.checked_sub(1)?;
        }
        hunk.push((line, false));
    }
    if let Some((line, after)) = rest.split_first()
        && line.starts_with('\\')
    {
        hunk.last_mut()?.1 = true;
        rest = after;
    }
    let follows = rest.first().is_some_and(|line| line.starts_with([' ', '+', '-']) && !is_file_header(rest));
    (!follows).then_some((hunk, rest))
}

/// The lines of a hunk up to the next header, or to the end.
fn uncounted_lines<'a, 't>(lines: &'a [&'t str]) -> (Vec<MarkedLine>, &'a [&'t str]) {
    let mut hunk: Vec<MarkedLine> = Vec::new();
    let mut rest = lines;
    while let Some((line, after)) = rest.split_first() {
        let is_header = hunk_header(line).is_some() || line.starts_with("diff --git ") || line.starts_with("Index: ");
        if is_header || is_file_header(rest) {
            break;
        }
        rest = after;
        let line = match line.split_at_checked(1) {
            Some((" ", text)) => HunkLine::Keep(text.to_owned()),
            Some(("-", text)) => HunkLine::Remove(text.to_owned()),
            Some(("+", text)) => HunkLine::Add(text.to_owned()),
            Some(("\\", _)) => {
                if let Some(last) = hunk.last_mut() {
                    last.1 = true;
                }
                continue;
            }
            // A model forgot the blank.
            _ => HunkLine::Keep((*line).to_owned()),
        };
        hunk.push((line, false));
    }
    while hunk.last().is_some_and(|(line, _)| matches!(line, HunkLine::Keep(text) if text.trim().is_empty())) {
        hunk.pop();
    }
    (hunk, rest)
}

fn finish(lines: Vec<MarkedLine>, position: Position) -> Hunk {
    let has_marker = lines.iter().any(|(_, marked)| *marked);
    let new_has_marker = lines.iter().any(|(line, marked)| *marked && !matches!(line, HunkLine::Remove(_)));
    let has_carriage_return = |(line, _): &MarkedLine| match line {
        HunkLine::Keep(text) | HunkLine::Remove(text) | HunkLine::Add(text) => text.ends_with('\r'),
    };
    Hunk {
        position,
        final_newline: has_marker.then_some(!new_has_marker),
        states_line_ends: lines.iter().any(has_carriage_return),
        lines: lines.into_iter().map(|(line, _)| line).collect(),
    }
}

fn edit(headers: Headers, hunks: Vec<Hunk>, path: Option<&str>) -> Result<Vec<Edit>, Problem> {
    let Headers { old, new, renamed_from, renamed_to, both, is_new, is_deleted, executable } = headers;
    let old = renamed_from.or(old).or_else(|| both.clone());
    let new = renamed_to.or(new).or(both);
    if is_deleted {
        let path = repo_path(&old.ok_or(Problem::UnnamedDiff)?)?;
        let lines = hunks.first().map(|hunk| hunk.old_lines().into_iter().map(str::to_owned).collect());
        return Ok(vec![Edit { path, change: Change::Delete { lines } }]);
    }
    if is_new {
        let path = repo_path(&new.ok_or(Problem::UnnamedDiff)?)?;
        let content = hunks.first().map(new_content).unwrap_or_default();
        return Ok(vec![Edit { path, change: Change::Create { content, executable } }]);
    }
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (repo_path(&old)?, repo_path(&new)?),
        (Some(one), None) | (None, Some(one)) => (repo_path(&one)?, repo_path(&one)?),
        (None, None) => {
            let path = repo_path(path.ok_or(Problem::UnnamedDiff)?)?;
            (path.clone(), path)
        }
    };
    if hunks.is_empty() && old == new && executable.is_none() {
        return Ok(Vec::new());
    }
    let rename_to = (old != new).then_some(new);
    Ok(vec![Edit { path: old, change: Change::Modify { hunks, rename_to, executable, in_order: true } }])
}

fn new_content(hunk: &Hunk) -> String {
    let mut content = hunk.new_lines().join("\n");
    if hunk.final_newline.unwrap_or(true) && !hunk.new_lines().is_empty() {
        content.push('\n');
    }
    content
}

fn is_executable(mode: &str, headers: &Headers) -> Result<bool, Problem> {
    let refuse = |reason| {
        let path = headers.both.clone().unwrap_or_default();
        Err(FileProblem { path, reason }.into())
    };
    match mode.trim() {
        "100644" => Ok(false),
        "100755" => Ok(true),
        "120000" => refuse(NotWritableReason::Symlink),
        "160000" => refuse(NotWritableReason::Submodule),
        _ => Err(invalid(mode, "a file has the mode 100644 or 100755")),
    }
}

/// Name in a `---` or `+++` line; `None` for `/dev/null`. A tab separates the name from a time.
fn file_name(text: &str) -> Option<String> {
    let name = unquoted(text.split('\t').next().unwrap_or_default().trim_end());
    (name != "/dev/null").then_some(name)
}

/// Removes the prefixes `a/` and `b/`, or two others of one letter.
fn without_prefixes(old: Option<String>, new: Option<String>) -> (Option<String>, Option<String>) {
    let split = |name: &str| {
        let (prefix, rest) = name.split_once('/')?;
        let mut letters = prefix.chars();
        let letter = letters.next().filter(|c| c.is_ascii_lowercase() && letters.next().is_none())?;
        Some((letter, rest.to_owned()))
    };
    let old_split = old.as_deref().and_then(split);
    let new_split = new.as_deref().and_then(split);
    match (&old, &new, old_split, new_split) {
        (Some(_), Some(_), Some((a, old)), Some((b, new))) if (a, b) == ('a', 'b') || (a != b && old == new) => {
            (Some(old), Some(new))
        }
        (None, Some(_), _, Some(('b', new))) => (None, Some(new)),
        (Some(_), None, Some(('a', old)), _) => (Some(old), None),
        _ => (old, new),
    }
}

/// The path in `a/PATH b/PATH`, if both are the same.
fn same_path(paths: &str) -> Option<String> {
    let paths = paths.trim_end();
    let (old, new) = match paths.starts_with('"') {
        true => {
            let (old, new) = paths.split_once("\" ")?;
            (unquoted(&format!("{old}\"")), unquoted(new))
        }
        false => {
            let middle = paths.len() / 2;
            let (old, new) = (paths.get(..middle)?, paths.get(middle + 1..)?);
            (old.to_owned(), new.to_owned())
        }
    };
    let (old, new) = without_prefixes(Some(old), Some(new));
    if old == new { old } else { None }
}

/// Decodes a name that git put into quotation marks, with escapes as in C.
fn unquoted(text: &str) -> String {
    let Some(inner) = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')) else { return text.to_owned() };
    let mut bytes = Vec::with_capacity(inner.len());
    let mut rest = inner.bytes().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(digit @ b'0'..=b'7') => {
                let mut value = u32::from(digit - b'0');
                for _ in 0..2 {
                    if let Some(digit) = rest.next_if(|b| (b'0'..=b'7').contains(b)) {
                        value = value * 8 + u32::from(digit - b'0');
                    }
                }
                bytes.push(u8::try_from(value).unwrap_or(b'?'));
            }
            Some(b'n') => bytes.push(b'\n'),
            Some(b't') => bytes.push(b'\t'),
            Some(other) => bytes.push(other),
            None => {}
        }
    }
    // A name that is not UTF-8 is no valid path.
    String::from_utf8(bytes).unwrap_or_else(|_| "\0".to_owned())
}

fn invalid(line: &str, reason: &'static str) -> Problem {
    Problem::InvalidPatch { line: line.trim().chars().take(120).collect(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Edit>, Problem> {
        parse(None, &text.split('\n').collect::<Vec<_>>())
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
    fn prefixes_and_quotes_of_names_are_removed() {
        for (old, new, path) in [
            ("a/x.py", "b/x.py", "x.py"),
            ("x.py", "x.py", "x.py"),
            ("a/x.py", "a/x.py", "a/x.py"),
            ("i/x.py", "w/x.py", "x.py"),
            ("a/x.py\t2026-01-01", "b/x.py\t2026-01-02", "x.py"),
            ("\"a/\\303\\251\\\"x.py\"", "\"b/\\303\\251\\\"x.py\"", "é\"x.py"),
        ] {
            let edits = parsed(&format!("--- {old}\n+++ {new}\n@@ -1 +1 @@\n-a\n+b\n")).unwrap();
            assert_eq!(edits[0].path, path, "{old}");
        }
        assert_eq!(same_path("\"a/\\303\\251\" \"b/\\303\\251\"").as_deref(), Some("é"));
        assert!(matches!(parsed("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"), Err(Problem::Path(_))));
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
    fn several_hunks_and_a_diff_without_names() {
        let text = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n\n@@ -9 +9 @@\n-c\n+d\n";
        let edits = parsed(text).unwrap();
        assert!(matches!(&edits[0].change, Change::Modify { hunks, .. } if hunks.len() == 2));
        assert_eq!(parsed("@@ -1 +1 @@\n-a\n+b\n"), Err(Problem::UnnamedDiff));
        assert_eq!(parse(Some("f"), &["@@ -1 +1 @@", "-a", "+b"]).unwrap()[0].path, "f");
        assert_eq!(bare_hunk("f".into(), &["-a", "+b"]).unwrap().path, "f");
        assert_eq!(bare_hunk("f".into(), &["a", "b"]), None);
    }

    #[test]
    fn links_submodules_binary_files_and_copies_are_refused() {
        let git = |lines: &str| parsed(&format!("diff --git a/x b/x\n{lines}\n")).unwrap_err();
        assert!(matches!(git("new file mode 120000"), Problem::File(p) if p.reason == NotWritableReason::Symlink));
        assert!(matches!(git("new file mode 160000"), Problem::File(p) if p.reason == NotWritableReason::Submodule));
        assert!(matches!(git("new mode 100777"), Problem::InvalidPatch { .. }));
        assert!(matches!(git("Binary files a/x and b/x differ"), Problem::InvalidPatch { .. }));
        assert!(matches!(git("copy from x\ncopy to y"), Problem::InvalidPatch { .. }));
    }
}
