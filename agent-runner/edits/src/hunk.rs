//! Applies hunks to the text of a file.

use std::borrow::Cow;

use crate::comparison::{ComparisonBudget, Pattern, Reindent};
use crate::edit::{Hunk, HunkLine, Position};
use crate::place::{Finder, Place};
use crate::problem::ReplyProblem;
use crate::text::{Line, LineEnd, Text};

/// Bytes of a file whose copy counts as one comparison.
const BYTES_PER_COMPARISON: usize = 64;

/// The state of a file in which hunks are applied.
#[derive(Debug)]
pub(crate) struct HunkTarget<'a> {
    /// Path of the file.
    pub path: &'a str,
    /// True if the file has been edited before, in this reply or in an earlier one.
    pub is_edited: bool,
    pub budget: &'a mut ComparisonBudget,
}

/// Applies the hunks of one edit to the text of a file. `max_bytes` is the maximum size of the text, also in the middle of
/// the hunks.
///
/// # Errors
/// The first [`ReplyProblem`] found.
pub(crate) fn apply_hunks(
    target: &mut HunkTarget<'_>,
    text: &mut Text,
    (hunks, in_order): (&[Hunk], bool),
    max_bytes: usize,
) -> Result<(), ReplyProblem> {
    let usual = text.usual_line_end();
    let mut progress = Progress { in_order, ..Progress::default() };
    for hunk in hunks {
        // Also limits how often a file of few long lines is read.
        let bytes: usize = text.lines.iter().map(|line| line.text.len() + 1).sum();
        target.budget.take(target.path, bytes / BYTES_PER_COMPARISON + 1)?;
        let (reading, place) = place_of(target, text, hunk, &progress)?;
        let (start, reindent) = match place {
            Place::Found { start, reindent } => (start, reindent),
            Place::AlreadyApplied { start } => {
                progress.advance(&reading, start, reading.new_lines().len());
                continue;
            }
        };
        let old = reading.old_lines().len();
        let reaches_end = start + old == text.lines.len();
        let final_newline = match reading.final_newline {
            Some(stated) if reaches_end => stated,
            Some(_) | None => text.has_final_newline(),
        };
        let new = new_lines(&text.lines, start, &reading, &reindent, usual);
        progress.advance(&reading, start, new.len());
        text.lines.splice(start..start + old, new);
        text.end_lines(final_newline, usual);
        if reaches_end
            && !final_newline
            && reading.states_line_ends
            && let Some(HunkLine::Add(added)) = reading.lines.iter().rfind(|line| !matches!(line, HunkLine::Remove(_)))
            && added.ends_with('\r')
            && let Some(last) = text.lines.last_mut()
        {
            // Without a newline after it, the carriage return is no line end.
            last.text.push('\r');
        }
        // Checked after each hunk, because each may add any text.
        let bytes: usize = text.lines.iter().map(|line| line.text.len() + 1).sum();
        if bytes > max_bytes.saturating_add(1) {
            return Err(ReplyProblem::TooLarge { path: target.path.to_owned(), bytes, max: max_bytes });
        }
    }
    Ok(())
}

/// What the hunks that are applied say about the place of the next one.
#[derive(Debug, Default)]
struct Progress {
    in_order: bool,
    /// Lines that were added, less those that were removed.
    offset: isize,
    /// How far the last hunk was from its stated line.
    drift: isize,
    /// Index of the first line after the last hunk.
    end: usize,
}

impl Progress {
    /// Goes on after a hunk whose lines begin at `start` and are now `count`.
    fn advance(&mut self, hunk: &Hunk, start: usize, count: usize) {
        if let Position::OldLine(line) = hunk.position {
            self.drift = signed(start) - (signed(line) - 1 + self.offset);
        }
        self.end = start + count;
        self.offset += signed(count) - signed(hunk.old_lines().len());
    }
}

fn signed(count: usize) -> isize {
    isize::try_from(count).unwrap_or(isize::MAX / 4)
}

/// The reading of a hunk that has a place, and the place.
fn place_of<'h>(
    target: &mut HunkTarget<'_>,
    text: &Text,
    hunk: &'h Hunk,
    progress: &Progress,
) -> Result<(Cow<'h, Hunk>, Place), ReplyProblem> {
    let mut place = |hunk: &Hunk| {
        let mut finder = Finder {
            path: target.path,
            lines: &text.lines,
            budget: &mut *target.budget,
            offset: progress.offset,
            drift: progress.drift,
            previous_end: progress.in_order.then_some(progress.end),
            is_edited: target.is_edited,
        };
        if hunk.old_lines().is_empty() { insertion(&mut finder, hunk) } else { finder.find(hunk) }
    };
    if hunk.other_readings.is_empty() {
        return Ok((Cow::Borrowed(hunk), place(hunk)?));
    }
    let (mut found, mut applied) = (Vec::new(), Vec::new());
    let mut problem = None;
    let others = hunk.other_readings.iter().map(|lines| Hunk { lines: lines.clone(), ..hunk.clone() });
    for reading in std::iter::once(hunk.clone()).chain(others) {
        match place(&reading) {
            Ok(place @ Place::Found { .. }) => found.push((reading, place)),
            Ok(place @ Place::AlreadyApplied { .. }) => applied.push((reading, place)),
            Err(error @ ReplyProblem::TooManyComparisons { .. }) => return Err(error),
            Err(error) => problem = problem.or(Some(error)),
        }
    }
    // What is applied in one reading counts only if no other reading has a place. If the old lines of a reading are in the
    // file, so are those of each shorter one.
    let possible = if found.is_empty() { applied } else { found };
    match (possible.into_iter().max_by_key(|(reading, _)| reading.old_lines().len()), problem) {
        (Some((reading, place)), _) => Ok((Cow::Owned(reading), place)),
        (None, Some(problem)) => Err(problem),
        (None, None) => Err(ReplyProblem::NoContext { path: target.path.to_owned() }),
    }
}

/// The place of a hunk without old lines.
fn insertion(finder: &mut Finder<'_>, hunk: &Hunk) -> Result<Place, ReplyProblem> {
    let end = finder.lines.len();
    let start = match &hunk.position {
        // Only an empty file has no context.
        Position::OldLine(_) if end > 0 => {
            return Err(ReplyProblem::NoContext { path: finder.path.to_owned() });
        }
        Position::OldLine(_) | Position::Unstated | Position::AtEndAfter(_) => end,
        Position::Line(line) => line.saturating_sub(1).min(end),
        Position::After(anchors) if anchors.is_empty() => end,
        Position::After(anchors) => match finder.anchors_end(anchors)?.as_slice() {
            [one] => *one,
            [] => {
                let line = anchors.join(" ... ");
                return Err(ReplyProblem::NotFound { path: finder.path.to_owned(), line, closest: None });
            }
            many => {
                let found: Vec<_> = many.iter().map(|n| (*n, Reindent::None)).collect();
                return Err(finder.ambiguous(&found, &Pattern::new(hunk), &hunk.position));
            }
        },
    };
    if finder.is_inserted(start, hunk)? {
        let before = if start == end { hunk.new_lines().len() } else { 0 };
        return Ok(Place::AlreadyApplied { start: start.saturating_sub(before) });
    }
    Ok(Place::Found { start, reindent: Reindent::None })
}

/// The lines that replace the old ones from `start`. Lines that the hunk keeps are those of the file.
fn new_lines(file: &[Line], start: usize, hunk: &Hunk, reindent: &Reindent, usual: LineEnd) -> Vec<Line> {
    let mut at = start;
    let mut new = Vec::new();
    // The added lines take the line end of the line above or, at the beginning, of the line below.
    let first = file.get(start).or(start.checked_sub(1).and_then(|above| file.get(above)));
    let mut end = first.map_or(usual, |line| line.end);
    for line in &hunk.lines {
        match line {
            HunkLine::Keep(_) | HunkLine::Remove(_) => {
                let Some(old) = file.get(at) else { continue };
                at += 1;
                end = old.end;
                if let HunkLine::Keep(_) = line {
                    new.push(old.clone());
                }
            }
            HunkLine::Add(text) => {
                let (text, end) = match (text.strip_suffix('\r'), hunk.states_line_ends) {
                    (Some(text), true) => (text, LineEnd::CrLf),
                    (None, true) => (text.as_str(), LineEnd::Lf),
                    (Some(text), false) => (text, end),
                    (None, false) => (text.as_str(), end),
                };
                let text = reindent.line(text).unwrap_or_else(|| text.to_owned());
                new.push(Line { text, end: if end == LineEnd::None { usual } else { end } });
            }
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hunk in a short form: each line begins with ` `, `-` or `+`.
    fn hunk(lines: &str, position: Position) -> Hunk {
        let line = |line: &str| match line.split_at(1) {
            ("-", text) => HunkLine::Remove(text.into()),
            ("+", text) => HunkLine::Add(text.into()),
            (_, text) => HunkLine::Keep(text.into()),
        };
        Hunk {
            lines: lines.lines().map(line).collect(),
            other_readings: Vec::new(),
            position,
            final_newline: None,
            states_line_ends: false,
            has_marks: true,
        }
    }

    fn applied_to(file: &str, hunks: &[Hunk], in_order: bool, is_edited: bool) -> Result<String, ReplyProblem> {
        let mut text = Text::new(file);
        let budget = &mut ComparisonBudget::default();
        apply_hunks(&mut HunkTarget { path: "f", is_edited, budget }, &mut text, (hunks, in_order), 1 << 20)?;
        Ok(text.to_string())
    }

    fn applied_all(file: &str, hunks: &[Hunk], in_order: bool) -> Result<String, ReplyProblem> {
        applied_to(file, hunks, in_order, false)
    }

    fn applied(file: &str, lines: &str) -> Result<String, ReplyProblem> {
        applied_all(file, &[hunk(lines, Position::Unstated)], false)
    }

    #[test]
    fn bytes_outside_the_replaced_lines_are_kept() {
        assert_eq!(applied("a \r\nb\t\nc", " a\n-b\n+x\n c").unwrap(), "a \r\nx\nc");
        assert_eq!(applied("a\r\nb\r\n", " a\n+x").unwrap(), "a\r\nx\r\nb\r\n");
        assert_eq!(applied("a\nb", "-b\n+x").unwrap(), "a\nx");
        assert_eq!(applied("a\nb", " b\n+x").unwrap(), "a\nb\nx");
        assert_eq!(applied("\u{feff}a\n", "-a\n+b").unwrap(), "\u{feff}b\n");
        assert_eq!(
            applied("x = \u{201c}a\u{201d} \ny\n", " x = \"a\"\n-y\n+z").unwrap(),
            "x = \u{201c}a\u{201d} \nz\n"
        );
    }

    #[test]
    fn added_lines_take_the_indentation_of_the_file() {
        let file = "class A:\n    def f(self):\n        return 1\n";
        let lines = "-def f(self):\n-    return 1\n+def f(self):\n+    x = 2\n+\n+    return x";
        let expected = "class A:\n    def f(self):\n        x = 2\n\n        return x\n";
        assert_eq!(applied(file, lines).unwrap(), expected);
        assert_eq!(applied("a\n", "-  a\n+  b\n+    c").unwrap(), "b\n  c\n");
        assert!(matches!(applied("a\n", "-  a\n+b"), Err(ReplyProblem::NotFound { .. })));
    }

    #[test]
    fn two_places_are_listed_and_one_can_be_chosen() {
        let file = "def f():\n    x = 1\n\ndef g():\n    x = 1\n";
        let problem = applied(file, "-    x = 1\n+    x = 2").unwrap_err();
        assert_eq!(
            problem.to_string(),
            "f: the text to search for is in the file 2 times: `x = 1`; 1. line 2 below `def f():`, 2. line 5 below \
             `def g():`; give more lines around it, or the line of the right place: `<<<<<<< SEARCH line 2`"
        );
        let chosen = |position| applied_all(file, &[hunk("-    x = 1\n+    x = 2", position)], false);
        let second = "def f():\n    x = 1\n\ndef g():\n    x = 2\n";
        assert_eq!(chosen(Position::Line(5)).unwrap(), second);
        assert_eq!(chosen(Position::OldLine(5)).unwrap(), second);
        assert_eq!(chosen(Position::After(vec!["def g():".into()])).unwrap(), second);
        assert!(matches!(chosen(Position::Line(3)), Err(ReplyProblem::Ambiguous { count: 2, .. })));
        let first = chosen(Position::After(vec!["def f():".into()])).unwrap();
        assert_eq!(first, "def f():\n    x = 2\n\ndef g():\n    x = 1\n");
    }

    #[test]
    fn later_step_of_tolerance_must_find_one_place_too() {
        assert!(matches!(applied("a \nb\na  \n", "-a\n+x"), Err(ReplyProblem::Ambiguous { count: 2, .. })));
        assert_eq!(applied("a \nb\na\n", "-a\n+x").unwrap(), "a \nb\nx\n");
    }

    #[test]
    fn stated_place_is_preferred_to_an_exact_match_elsewhere() {
        let hunk = hunk("-a\n+x", Position::OldLine(3));
        assert_eq!(applied_all("a\nb\na \n", &[hunk], true).unwrap(), "a\nb\nx\n");
    }

    #[test]
    fn line_numbers_of_a_diff_follow_the_earlier_hunks() {
        let hunks = [hunk("+new\n a", Position::OldLine(1)), hunk("-x\n+y", Position::OldLine(3))];
        assert_eq!(applied_all("a\nx\nx\n", &hunks, true).unwrap(), "new\na\nx\ny\n");
    }

    #[test]
    fn hunks_in_order_come_one_after_another() {
        let after = || Position::After(Vec::new());
        let hunks = [hunk(" b\n-x\n+1", after()), hunk("-x\n+2", after())];
        assert!(matches!(applied_all("x\nb\nx\nx\n", &hunks, false), Err(ReplyProblem::Ambiguous { .. })));
        assert_eq!(applied_all("x\nb\nx\nx\n", &hunks, true).unwrap(), "x\nb\n1\n2\n");
    }

    #[test]
    fn edit_that_is_applied_already_changes_nothing() {
        for (file, lines) in [
            ("a\nx\nb\n", " a\n+x\n b"),
            ("a\nx\ny\n", "-old\n+x\n+y"),
            ("a\nx\nb\n", " a\n+x"),
            ("x\na\n", "+x\n a"),
            ("a\nb\n", " a\n-old\n b"),
            ("a\n}\nb\n", " a\n-old\n+}\n b"),
            ("a\nx\n", "+x"),
        ] {
            assert_eq!(applied(file, lines).unwrap(), file, "{lines}");
        }
        let not_found = |file: &str, lines: &str, is_edited| {
            let hunks = [hunk(lines, Position::Unstated)];
            assert!(
                matches!(applied_to(file, &hunks, false, is_edited), Err(ReplyProblem::NotFound { .. })),
                "{lines}"
            );
        };
        // Too common, or at two places.
        not_found("a\n}\n", "-old\n+}", true);
        not_found("x\nx\n", "-old\n+x", true);
        // One line in a file that nothing has edited is there by coincidence.
        not_found("a\nx\n", "-old\n+x", false);
        let hunks = [hunk("-old\n+x", Position::Unstated)];
        assert_eq!(applied_to("a\nx\n", &hunks, false, true).unwrap(), "a\nx\n");
    }

    #[test]
    fn wrapped_and_indented_lines_are_not_wrapped_again() {
        for (old, lines, new) in [
            ("    x()\n", "-    x()\n+    if c:\n+        x()", "    if c:\n        x()\n"),
            ("  x: 1\n", "-  x: 1\n+    x: 1", "    x: 1\n"),
        ] {
            let hunks = [hunk(lines, Position::Unstated)];
            assert_eq!(applied(old, lines).unwrap(), new);
            assert_eq!(applied_to(new, &hunks, false, true).unwrap(), new, "{lines}");
        }
        let insertion = [hunk("+    log()", Position::After(vec!["def f():".into()]))];
        let once = applied_all("def f():\n    x()\n", &insertion, true).unwrap();
        assert_eq!(once, "def f():\n    log()\n    x()\n");
        assert_eq!(applied_to(&once, &insertion, true, true).unwrap(), once);
    }

    #[test]
    fn kept_line_may_lack_its_mark() {
        let expected = "root:\n    x: 1\n    y: 2\n    z: 3\n";
        assert_eq!(applied("root:\n    x: 1\n    z: 3\n", "    x: 1\n+    y: 2").unwrap(), expected);
    }

    #[test]
    fn stated_lines_follow_the_order_and_the_drift_of_the_hunks_before() {
        let old = |lines: &str, line| hunk(lines, Position::OldLine(line));
        let blocks = "n\nn\nn\nH\nA\nx\nB\nA\nx\nB\n";
        // Both the stated line and the one that is as far from it as the hunk before: neither is certain.
        let hunks = [old("-H", 1), old(" A\n-x\n+y\n B", 5)];
        assert!(matches!(applied_all(blocks, &hunks, true), Err(ReplyProblem::Ambiguous { .. })));
        let hunks = [old("-H", 1), old(" A\n-x\n+y\n B", 2)];
        assert_eq!(applied_all(blocks, &hunks, true).unwrap(), "n\nn\nn\nA\ny\nB\nA\nx\nB\n");
        let hunks = [old("-m\n+M", 3), old("-x\n+y", 1)];
        assert_eq!(applied_all("x\nk\nm\nx\n", &hunks, true).unwrap(), "x\nk\nM\ny\n");
    }

    #[test]
    fn lines_above_a_hunk_may_be_several_or_its_first_line() {
        let file = "class A:\n  def f():\n    x\nclass B:\n  def f():\n    x\nclass C:\n  def f():\n    x\n";
        let hunks = [hunk("-    x\n+    y", Position::After(vec!["class B:".into(), "def f():".into()]))];
        let expected = file.replacen("    x", "    1", 1).replacen("    x", "    y", 1).replace("    1", "    x");
        assert_eq!(applied_all(file, &hunks, true).unwrap(), expected);
        let hunks = [hunk(" class B:\n   def f():\n-    x\n+    y", Position::After(vec!["class B:".into()]))];
        assert_eq!(applied_all(file, &hunks, true).unwrap(), expected);
    }

    #[test]
    fn text_that_is_nowhere_names_the_most_similar_place() {
        let problem = applied("a\nb\nc\nd\n", "-b\n-c\n-x\n+y").unwrap_err();
        assert_eq!(
            problem,
            ReplyProblem::NotFound { path: "f".into(), line: "b".into(), closest: Some((2, "b".into())) }
        );
    }

    #[test]
    fn repetitive_search_is_refused() {
        let file = "\n".repeat(50_000) + "x\n";
        let lines = "-\n".repeat(20_000) + "-y";
        assert!(matches!(applied(&file, &lines), Err(ReplyProblem::TooManyComparisons { .. })));
    }
}
