//! Applies hunks to the text of a file.

use crate::comparison::{ComparisonBudget, Reindent};
use crate::edit::{Hunk, HunkLine, Position};
use crate::place::{Finder, Place};
use crate::problem::Problem;
use crate::text::{Line, LineEnd, Text};

/// Bytes of a file whose copy counts as one comparison.
const BYTES_PER_COMPARISON: usize = 64;

/// Applies the hunks of one edit to the text of the file at `path`.
///
/// # Errors
/// The first [`Problem`] found. A text of more than `max_bytes` is one, also in the middle of the hunks.
pub(crate) fn apply_hunks(
    path: &str,
    text: &mut Text,
    (hunks, in_order): (&[Hunk], bool),
    max_bytes: usize,
    budget: &mut ComparisonBudget,
) -> Result<(), Problem> {
    let (mut offset, mut end) = (0_isize, 0);
    let usual = text.usual_line_end();
    for hunk in hunks {
        // Also limits how often a file of few long lines is read.
        let bytes: usize = text.lines.iter().map(|line| line.text.len() + 1).sum();
        budget.take(path, bytes / BYTES_PER_COMPARISON + 1)?;
        let previous_end = in_order.then_some(end);
        let mut finder = Finder { path, lines: &text.lines, budget, offset, previous_end };
        let (start, reindent) = match hunk.old_lines().is_empty() {
            true => (insertion(&mut finder, hunk)?, Reindent::None),
            false => match finder.find(hunk)? {
                Place::Found { start, reindent } => (start, reindent),
                Place::AlreadyApplied { start } => {
                    let new = hunk.new_lines().len();
                    end = start + new;
                    offset += difference(new, hunk.old_lines().len());
                    continue;
                }
            },
        };
        let old = hunk.old_lines().len();
        let reaches_end = start + old == text.lines.len();
        let final_newline = match hunk.final_newline {
            Some(stated) if reaches_end => stated,
            Some(_) | None => text.has_final_newline(),
        };
        let new = new_lines(&text.lines, start, hunk, &reindent, usual);
        end = start + new.len();
        offset += difference(new.len(), old);
        text.lines.splice(start..start + old, new);
        text.end_lines(final_newline, usual);
        if reaches_end
            && !final_newline
            && hunk.states_line_ends
            && let Some(HunkLine::Add(added)) = hunk.lines.iter().rfind(|line| !matches!(line, HunkLine::Remove(_)))
            && added.ends_with('\r')
            && let Some(last) = text.lines.last_mut()
        {
            // Without a newline after it, the carriage return is no line end.
            last.text.push('\r');
        }
        // Checked after each hunk, because each may add any text.
        let new_bytes: usize = text.lines.iter().map(|line| line.text.len() + 1).sum();
        if new_bytes > max_bytes.max(bytes) {
            return Err(Problem::TooLarge { path: path.to_owned(), bytes: new_bytes, max: max_bytes });
        }
    }
    Ok(())
}

fn difference(new: usize, old: usize) -> isize {
    isize::try_from(new).unwrap_or(isize::MAX) - isize::try_from(old).unwrap_or(isize::MAX)
}

/// Index at which a hunk without old lines is inserted.
fn insertion(finder: &mut Finder<'_>, hunk: &Hunk) -> Result<usize, Problem> {
    let end = finder.lines.len();
    match &hunk.position {
        // Only an empty file has no context.
        Position::OldLine(_) if end > 0 => Err(Problem::NoContext { path: finder.path.to_owned() }),
        Position::OldLine(_) | Position::Unstated => Ok(end),
        Position::Line(line) => Ok(line.saturating_sub(1).min(end)),
        Position::After(anchors) | Position::EndAfter(anchors) if anchors.is_empty() => Ok(end),
        Position::EndAfter(_) => Ok(end),
        Position::After(anchors) => match finder.anchors_end(anchors)?.as_slice() {
            [one] => Ok(*one),
            [] => Err(Problem::NotFound { path: finder.path.to_owned(), line: anchors.join(" ... "), closest: None }),
            many => {
                let found: Vec<_> = many.iter().map(|n| (*n, Reindent::None)).collect();
                let anchors: Vec<&str> = anchors.iter().map(String::as_str).collect();
                Err(finder.ambiguous(&found, &anchors, &hunk.position))
            }
        },
    }
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
        Hunk { lines: lines.lines().map(line).collect(), position, final_newline: None, states_line_ends: false }
    }

    fn applied_all(file: &str, hunks: &[Hunk], in_order: bool) -> Result<String, Problem> {
        let mut text = Text::new(file);
        apply_hunks("f", &mut text, (hunks, in_order), 1 << 20, &mut ComparisonBudget::default())?;
        Ok(text.to_string())
    }

    fn applied(file: &str, lines: &str) -> Result<String, Problem> {
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
        assert!(matches!(applied("a\n", "-  a\n+b"), Err(Problem::NotFound { .. })));
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
        assert!(matches!(chosen(Position::Line(3)), Err(Problem::Ambiguous { count: 2, .. })));
        let first = chosen(Position::After(vec!["def f():".into()])).unwrap();
        assert_eq!(first, "def f():\n    x = 2\n\ndef g():\n    x = 1\n");
    }

    #[test]
    fn later_step_of_tolerance_must_find_one_place_too() {
        assert!(matches!(applied("a \nb\na  \n", "-a\n+x"), Err(Problem::Ambiguous { count: 2, .. })));
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
        assert!(matches!(applied_all("x\nb\nx\nx\n", &hunks, false), Err(Problem::Ambiguous { .. })));
        assert_eq!(applied_all("x\nb\nx\nx\n", &hunks, true).unwrap(), "x\nb\n1\n2\n");
    }

    #[test]
    fn edit_that_is_applied_already_changes_nothing() {
        for (file, lines) in
            [("a\nx\nb\n", " a\n+x\n b"), ("a\nx\n", "-old\n+x"), ("a\nx\nb\n", " a\n+x"), ("x\na\n", "+x\n a")]
        {
            assert_eq!(applied(file, lines).unwrap(), file, "{lines}");
        }
        // Not recognized: too common.
        assert!(matches!(applied("a\n}\n", "-old\n+}"), Err(Problem::NotFound { .. })));
        // Two places.
        assert!(matches!(applied("x\nx\n", "-old\n+x"), Err(Problem::NotFound { .. })));
    }

    #[test]
    fn text_that_is_nowhere_names_the_most_similar_place() {
        let problem = applied("a\nb\nc\nd\n", "-b\n-c\n-x\n+y").unwrap_err();
        assert_eq!(problem, Problem::NotFound { path: "f".into(), line: "b".into(), closest: Some((2, "b".into())) });
    }

    #[test]
    fn repetitive_search_is_refused() {
        let file = "\n".repeat(50_000) + "x\n";
        let lines = "-\n".repeat(20_000) + "-y";
        assert!(matches!(applied(&file, &lines), Err(Problem::TooManyComparisons { .. })));
    }
}
