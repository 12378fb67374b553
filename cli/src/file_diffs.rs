//! The files of a unified diff in git's format; <https://git-scm.com/docs/diff-format>.

use std::borrow::Cow;
use std::fmt::Write;

use cfq_agent_runner::edits::{Encoding, encode, unquoted};

/// The part of a diff that concerns one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section<'d> {
    /// Path of the file after the change, or before it if the change removes the file.
    pub path: String,
    /// The whole part, from its line `diff --git`.
    pub text: &'d str,
}

/// Number of changed lines of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChangedLines {
    pub added: usize,
    pub removed: usize,
    /// True if the lines are not compared, because the file is binary or too large.
    pub not_compared: bool,
}

/// The files of the diff, in its order. Only the first line of a file begins with `diff --git`, because the lines of a
/// change have a mark before them.
pub fn sections(diff: &str) -> Vec<Section<'_>> {
    let mut starts: Vec<usize> = Vec::new();
    let mut at = 0;
    for line in diff.split_inclusive('\n') {
        if line.starts_with("diff --git ") {
            starts.push(at);
        }
        at += line.len();
    }
    let ends = starts.iter().copied().skip(1).chain([diff.len()]);
    let texts = starts.iter().zip(ends).filter_map(|(start, end)| diff.get(*start..end));
    texts.map(|text| Section { path: path_of(text), text }).collect()
}

impl Section<'_> {
    /// The changed lines, without the lines before the first `@@`.
    pub fn changed_lines(&self) -> ChangedLines {
        let mut lines = ChangedLines::default();
        let mut in_hunk = false;
        for line in self.text.lines() {
            match line.as_bytes().first() {
                Some(b'@') => in_hunk = true,
                Some(b'+') if in_hunk => lines.added += 1,
                Some(b'-') if in_hunk => lines.removed += 1,
                Some(b'B') if !in_hunk && line.starts_with("Binary files ") => lines.not_compared = true,
                _ => {}
            }
        }
        lines
    }

    /// Mode of the file after the change, such as `100755`; `None` if the diff does not name it.
    pub fn mode(&self) -> Option<&str> {
        let header = self.text.split("\n@@").next().unwrap_or_default();
        let named = |prefix: &str| header.lines().find_map(|line| line.strip_prefix(prefix));
        let index = || named("index ").and_then(|ids| ids.split_once(' ')).map(|(_, mode)| mode);
        named("new mode ").or_else(|| named("new file mode ")).or_else(index)
    }

    /// The change from the new file to the old one.
    pub fn reversed(&self) -> String {
        let (mut text, mut removed, mut added) = (String::new(), String::new(), String::new());
        let mut in_hunk = false;
        let mut last_is_added = false;
        let mut lines = self.text.split_inclusive('\n').peekable();
        while let Some(line) = lines.next() {
            let is_start = line.starts_with("@@ ");
            match line.as_bytes().first() {
                Some(b'+') if in_hunk => {
                    removed += "-";
                    removed += &line[1..];
                    last_is_added = true;
                }
                Some(b'-') if in_hunk => {
                    added += "+";
                    added += &line[1..];
                    last_is_added = false;
                }
                // `\ No newline at end of file` belongs to the line before it.
                Some(b'\\') if in_hunk && !(removed.is_empty() && added.is_empty()) => {
                    let block = if last_is_added { &mut removed } else { &mut added };
                    *block += line;
                }
                _ => {
                    text += &std::mem::take(&mut removed);
                    text += &std::mem::take(&mut added);
                    in_hunk |= is_start;
                    text += &if in_hunk && is_start {
                        reversed_range(line)
                    } else {
                        reversed_header(line, in_hunk, &mut lines)
                    };
                }
            }
        }
        text + &removed + &added
    }
}

/// `@@ -1,2 +3,4 @@` as `@@ -3,4 +1,2 @@`.
fn reversed_range(line: &str) -> String {
    let mut words = line.splitn(4, ' ');
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some(start), Some(old), Some(new), Some(rest)) => {
            format!("{start} -{} +{} {rest}", new.trim_start_matches('+'), old.trim_start_matches('-'))
        }
        _ => line.to_owned(),
    }
}

/// A line before the first hunk, with the names and modes of the other side; a pair of lines that name both sides is read
/// from `lines` and exchanged.
fn reversed_header<'l>(
    line: &str,
    in_hunk: bool,
    lines: &mut std::iter::Peekable<impl Iterator<Item = &'l str>>,
) -> String {
    if in_hunk {
        return line.to_owned();
    }
    let other_side = |path: &str| match path {
        path if path.starts_with("a/") || path.starts_with("\"a/") => path.replacen("a/", "b/", 1),
        path => path.replacen("b/", "a/", 1),
    };
    if let Some(old) = line.strip_prefix("--- ")
        && let Some(new) = lines.next_if(|next| next.starts_with("+++ "))
    {
        return format!("--- {}+++ {}", other_side(&new[4..]), other_side(old));
    }
    if let Some(old) = line.strip_prefix("old mode ")
        && let Some(new) = lines.next_if(|next| next.starts_with("new mode "))
    {
        return format!("old mode {}new mode {old}", &new[9..]);
    }
    if let Some(mode) = line.strip_prefix("new file mode ") {
        return format!("deleted file mode {mode}");
    }
    if let Some(mode) = line.strip_prefix("deleted file mode ") {
        return format!("new file mode {mode}");
    }
    if let Some(ids) = line.strip_prefix("index ")
        && let Some((old, rest)) = ids.split_once("..")
    {
        let end = rest.find([' ', '\n']).unwrap_or(rest.len());
        return format!("index {}..{old}{}", &rest[..end], &rest[end..]);
    }
    line.to_owned()
}

/// The path that the lines before the first hunk name.
fn path_of(section: &str) -> String {
    let header = section.split("\n@@").next().unwrap_or_default();
    let named = |prefix: &str| {
        let path = header.lines().find_map(|line| line.strip_prefix(prefix))?;
        // git ends a name that contains a blank with a tab.
        let path = unquoted(path.strip_suffix('\t').unwrap_or(path));
        path.get(2..).filter(|_| path.starts_with("a/") || path.starts_with("b/")).map(str::to_owned)
    };
    named("+++ ").or_else(|| named("--- ")).unwrap_or_else(|| {
        // A file whose lines do not change: both names are equal.
        let names = header.lines().next().and_then(|line| line.strip_prefix("diff --git ")).unwrap_or_default();
        let new = names.get(names.len() / 2 + 1..).map(unquoted).unwrap_or_default();
        new.strip_prefix("b/").unwrap_or(&new).to_owned()
    })
}

/// The diff with the bytes of the files: `encoded` are the positions of those whose lines were decoded as Windows-1252.
pub fn encode_diff<'d>(diff: &'d str, encoded: &[u32]) -> Cow<'d, [u8]> {
    if encoded.is_empty() {
        return Cow::Borrowed(diff.as_bytes());
    }
    let mut bytes = Vec::with_capacity(diff.len());
    for (n, section) in (0..).zip(sections(diff)) {
        let mut in_hunk = false;
        for line in section.text.split_inclusive('\n') {
            in_hunk |= line.starts_with("@@ ");
            let is_content = in_hunk && line.starts_with(['+', '-', ' ']);
            match encode(line, Encoding::Windows1252) {
                Ok(line) if is_content && encoded.contains(&n) => bytes.extend_from_slice(&line),
                _ => bytes.extend_from_slice(line.as_bytes()),
            }
        }
    }
    Cow::Owned(bytes)
}

/// The table that `git diff --stat` prints, at most `columns` wide.
pub fn stat(sections: &[Section<'_>], columns: usize) -> String {
    if sections.is_empty() {
        return "no differences".to_owned();
    }
    let lines: Vec<ChangedLines> = sections.iter().map(Section::changed_lines).collect();
    let most = lines.iter().map(|lines| lines.added + lines.removed).max().unwrap_or(0);
    let min_digits = if lines.iter().any(|lines| lines.not_compared) { 3 } else { 1 };
    let digits = most.to_string().len().max(min_digits);
    let names: Vec<String> = sections.iter().map(|section| crate::output::sanitize(&section.path)).collect();
    let width = |name: &str| console::measure_text_width(name);
    let name_width =
        names.iter().map(|name| width(name)).max().unwrap_or(0).min(columns.saturating_sub(digits + 14).max(10));
    let marks = columns.saturating_sub(name_width + digits + 6).clamp(4, 60);
    let mut text = String::new();
    for (name, lines) in names.iter().zip(&lines) {
        let name = console::truncate_str(name, name_width, "…");
        let pad = " ".repeat(name_width.saturating_sub(width(&name)));
        let changed = lines.added + lines.removed;
        // As many marks as changed lines, or fewer in proportion; at least one for each kind of change.
        let scaled = |n: usize| if most <= marks { n } else { (n * marks).div_ceil(most) };
        let marks = format!("{}{}", "+".repeat(scaled(lines.added)), "-".repeat(scaled(lines.removed)));
        let count = if lines.not_compared { "Bin".to_owned() } else { changed.to_string() };
        let line = format!(" {name}{pad} | {count:>digits$} {marks}");
        _ = writeln!(text, "{}", line.trim_end());
    }
    let (added, removed) = lines.iter().fold((0, 0), |sum, lines| (sum.0 + lines.added, sum.1 + lines.removed));
    let noun = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut total = format!(" {} changed", noun(sections.len(), "file"));
    if added > 0 || removed == 0 {
        total += &format!(", {}(+)", noun(added, "insertion"));
    }
    if removed > 0 || added == 0 {
        total += &format!(", {}(-)", noun(removed, "deletion"));
    }
    text + &total
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIFF: &str = "diff --git a/a b.py b/a b.py\nindex 1..2 100644\n--- a/a b.py\t\n+++ b/a b.py\t\n@@ -1,2 +1,3 @@ def f():\n \
                        x\n-y\n+z\n++++ b/not a header\n\\ No newline at end of file\n\
                        diff --git \"a/n\\303\\244.py\" \"b/n\\303\\244.py\"\nnew file mode 100644\nindex 0..3\n--- /dev/null\n\
                        +++ \"b/n\\303\\244.py\"\n@@ -0,0 +1 @@\n+diff --git a/x b/x\n\
                        diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n\
                        diff --git a/i.png b/i.png\nindex 1..2 100644\nBinary files a/i.png and b/i.png differ\n";

    #[test]
    fn files_and_their_changed_lines_are_found() {
        let found = sections(DIFF);
        let paths: Vec<&str> = found.iter().map(|section| section.path.as_str()).collect();
        assert_eq!(paths, ["a b.py", "nä.py", "run.sh", "i.png"]);
        let modes: Vec<Option<&str>> = found.iter().map(Section::mode).collect();
        assert_eq!(modes, [Some("100644"), Some("100644"), Some("100755"), Some("100644")]);
        let lines = |added, removed, not_compared| ChangedLines { added, removed, not_compared };
        let counted: Vec<ChangedLines> = found.iter().map(Section::changed_lines).collect();
        assert_eq!(counted, [lines(2, 1, false), lines(1, 0, false), lines(0, 0, false), lines(0, 0, true)]);
        assert_eq!(found.iter().map(|section| section.text).collect::<String>(), DIFF);
        let expected = " a b.py |   3 ++-\n nä.py  |   1 +\n run.sh |   0\n i.png  | Bin\n 4 files changed, 3 insertions(+), 1 deletion(-)";
        assert_eq!(stat(&found, 80), expected);
    }

    #[test]
    fn reversed_twice_is_the_same_change() {
        for section in sections(DIFF) {
            let reversed = section.reversed();
            let again = sections(&reversed)[0].reversed();
            let lines = |text: &str| {
                let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
                lines.sort_unstable();
                lines
            };
            assert_eq!(lines(&again), lines(section.text), "{reversed}");
            let (forth, back) = (section.changed_lines(), sections(&reversed)[0].changed_lines());
            assert_eq!((forth.added, forth.removed), (back.removed, back.added), "{reversed}");
        }
        assert!(
            sections(DIFF)[1]
                .reversed()
                .contains("deleted file mode 100644\nindex 3..0\n--- \"a/n\\303\\244.py\"\n+++ /dev/null\n")
        );
    }

    #[test]
    fn many_changed_lines_have_marks_in_proportion() {
        let section = |path: &str, added: usize| {
            format!("diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n{}", "+x\n".repeat(added))
        };
        let diff = section("a.py", 500) + &section("b.py", 1);
        let text = stat(&sections(&diff), 40);
        assert!(text.lines().all(|line| line.chars().count() <= 50), "{text}");
        assert!(text.contains("b.py |   1 +\n") && text.contains("a.py | 500 +++"), "{text}");
    }

    #[test]
    fn lines_of_files_that_are_not_utf8_get_their_bytes_back() {
        let diff = "diff --git a/u b/u\n@@ -1 +1 @@\n+é\ndiff --git a/w b/w\n@@ -1 +1 @@ é\n-é\u{81}\n+Ã©\n";
        let expected = [
            &b"diff --git a/u b/u\n@@ -1 +1 @@\n+\xc3\xa9\ndiff --git a/w b/w\n@@ -1 +1 @@ \xc3\xa9\n"[..],
            &b"-\xe9\x81\n+\xc3\xa9\n"[..],
        ]
        .concat();
        assert_eq!(encode_diff(diff, &[1]).as_ref(), expected.as_slice());
        assert_eq!(encode_diff(diff, &[]).as_ref(), diff.as_bytes());
    }
}
