//! Comparison of a hunk's lines with those of a file, in steps of growing tolerance.

use crate::edit::{Hunk, HunkLine};
use crate::problem::ReplyProblem;
use crate::text::{Line, LineEnd};

/// Maximum number of lines compared to find the hunks of one reply. An ordinary hunk needs one comparison for each line
/// of its file and step.
pub(crate) const MAX_COMPARISONS: usize = 60_000_000;
/// Bytes of a line whose comparison counts as one more.
const BYTES_PER_COMPARISON: usize = 64;

/// Number of comparisons that are left.
#[derive(Debug)]
pub(crate) struct ComparisonBudget {
    left: usize,
}

impl Default for ComparisonBudget {
    fn default() -> Self {
        Self { left: MAX_COMPARISONS }
    }
}

impl ComparisonBudget {
    /// Takes `count` comparisons.
    ///
    /// # Errors
    /// [`ReplyProblem::TooManyComparisons`] if none is left afterwards.
    pub(crate) fn take(&mut self, path: &str, count: usize) -> Result<(), ReplyProblem> {
        self.left = self.left.saturating_sub(count);
        match self.left {
            0 => Err(ReplyProblem::TooManyComparisons { path: path.to_owned() }),
            _ => Ok(()),
        }
    }
}

/// How lines are compared. Each but [`Self::MissingBlank`] also finds what the ones before it find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tolerance {
    Exact,
    TrailingBlanks,
    /// A kept line of a diff may lack its first blank: the model forgot the mark of the line.
    MissingBlank,
    Indentation,
    LookAlikes,
}

impl Tolerance {
    pub(crate) const ALL: [Self; 5] =
        [Self::Exact, Self::TrailingBlanks, Self::MissingBlank, Self::Indentation, Self::LookAlikes];
    /// Those that do not change the added lines.
    pub(crate) const SAME_INDENTATION: [Self; 3] = [Self::Exact, Self::TrailingBlanks, Self::MissingBlank];
}

/// Lines to search for.
#[derive(Debug)]
pub(crate) struct Pattern<'h> {
    lines: Vec<PatternLine<'h>>,
}

#[derive(Debug)]
struct PatternLine<'h> {
    text: &'h str,
    /// Without the blanks at the end.
    trimmed: &'h str,
    /// Without the blanks at both ends.
    content: &'h str,
    /// The content, with look-alike characters folded.
    folded: String,
    is_blank: bool,
    may_lack_blank: bool,
}

impl<'h> Pattern<'h> {
    /// The lines that a hunk replaces or keeps.
    pub(crate) fn old(hunk: &'h Hunk) -> Self {
        let is_old = |line: &&HunkLine| !matches!(line, HunkLine::Add(_));
        Self { lines: hunk.lines.iter().filter(is_old).map(|line| PatternLine::new(line, hunk.has_marks)).collect() }
    }

    /// The lines that result from a hunk.
    pub(crate) fn new(hunk: &'h Hunk) -> Self {
        let is_new = |line: &&HunkLine| !matches!(line, HunkLine::Remove(_));
        Self { lines: hunk.lines.iter().filter(is_new).map(|line| PatternLine::new(line, hunk.has_marks)).collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.len()
    }

    /// Texts of the lines.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &'h str> {
        self.lines.iter().map(|line| line.text)
    }
}

impl<'h> PatternLine<'h> {
    fn new(line: &'h HunkLine, has_marks: bool) -> Self {
        let (text, is_kept) = match line {
            HunkLine::Keep(text) => (text, true),
            HunkLine::Remove(text) | HunkLine::Add(text) => (text, false),
        };
        let trimmed = text.trim_end();
        Self {
            text,
            trimmed,
            content: &trimmed[indent(trimmed).len()..],
            folded: fold(&trimmed[indent(trimmed).len()..]),
            is_blank: trimmed.is_empty(),
            may_lack_blank: is_kept && has_marks,
        }
    }
}

/// Difference between the indentation of a hunk and that of the file; the same for all lines of the hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reindent {
    None,
    /// The file has these blanks before each line of the hunk.
    Add(String),
    /// The hunk has these blanks before each line of the file.
    Remove(String),
}

impl Reindent {
    /// Gives a line of the hunk the indentation of the file. `None` if the line lacks the blanks to remove.
    pub(crate) fn line(&self, text: &str) -> Option<String> {
        match self {
            _ if text.trim().is_empty() => Some(text.to_owned()),
            Self::None => Some(text.to_owned()),
            Self::Add(blanks) => Some(format!("{blanks}{text}")),
            Self::Remove(blanks) => text.strip_prefix(blanks.as_str()).map(str::to_owned),
        }
    }

    /// True if a line of the hunk, with the indentation of the file, is that of the file.
    fn is_equal(&self, file: &str, hunk: &str) -> bool {
        match self {
            Self::None => file == hunk,
            Self::Add(blanks) => file.strip_prefix(blanks.as_str()) == Some(hunk),
            Self::Remove(blanks) => hunk.strip_prefix(blanks.as_str()) == Some(file),
        }
    }
}

/// Compares the lines of a file with a pattern of the same number of lines. `None` if they differ.
pub(crate) fn compare(
    tolerance: Tolerance,
    file: &[Line],
    pattern: &Pattern<'_>,
    (path, budget): (&str, &mut ComparisonBudget),
) -> Result<Option<Reindent>, ReplyProblem> {
    let mut reindent = Reindent::None;
    let mut has_indent = false;
    for (line, wanted) in file.iter().zip(&pattern.lines) {
        budget.take(path, 1 + line.text.len() / BYTES_PER_COMPARISON)?;
        let equal = match tolerance {
            Tolerance::Exact => is_exact(line, wanted.text),
            Tolerance::TrailingBlanks => line.text.trim_end() == wanted.trimmed,
            Tolerance::MissingBlank => {
                let text = line.text.trim_end();
                text == wanted.trimmed || (wanted.may_lack_blank && text.strip_prefix(' ') == Some(wanted.trimmed))
            }
            Tolerance::Indentation | Tolerance::LookAlikes if wanted.is_blank => line.text.trim().is_empty(),
            Tolerance::Indentation | Tolerance::LookAlikes => {
                let text = line.text.trim_end();
                let content = &text[indent(text).len()..];
                // First, because the indentation may be long.
                let is_content = match tolerance {
                    Tolerance::LookAlikes => fold(content) == wanted.folded,
                    _ => content == wanted.content,
                };
                if !is_content {
                    return Ok(None);
                }
                if !has_indent {
                    let Some(found) = reindent_between(indent(text), indent(wanted.trimmed)) else { return Ok(None) };
                    (reindent, has_indent) = (found, true);
                }
                reindent.is_equal(indent(text), indent(wanted.trimmed))
            }
        };
        if !equal {
            return Ok(None);
        }
    }
    Ok(Some(reindent))
}

/// True if the texts are equal. The text of a hunk may contain the carriage return of the line end.
fn is_exact(line: &Line, text: &str) -> bool {
    line.text == text || (line.end == LineEnd::CrLf && text.strip_suffix('\r') == Some(line.text.as_str()))
}

fn indent(text: &str) -> &str {
    &text[..text.len() - text.trim_start_matches([' ', '\t']).len()]
}

/// How the indentation of a hunk's line differs from that of the file's line; `None` if neither ends with the other.
fn reindent_between(file: &str, hunk: &str) -> Option<Reindent> {
    match (file.strip_suffix(hunk), hunk.strip_suffix(file)) {
        (Some(""), _) => Some(Reindent::None),
        (Some(more), _) => Some(Reindent::Add(more.to_owned())),
        (_, Some(more)) => Some(Reindent::Remove(more.to_owned())),
        (None, None) => None,
    }
}

/// Replaces characters that look like an ASCII one by it, and removes invisible ones.
fn fold(text: &str) -> String {
    let mut folded = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{2018}'..='\u{201b}' | '\u{2032}' | '\u{02bc}' => folded.push('\''),
            '\u{201c}'..='\u{201f}' | '\u{2033}' => folded.push('"'),
            '\u{2010}'..='\u{2015}' | '\u{2212}' | '\u{fe63}' | '\u{ff0d}' => folded.push('-'),
            '\u{a0}' | '\u{2000}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}' => folded.push(' '),
            '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}' | '\u{ad}' => {}
            '\u{2026}' => folded.push_str("..."),
            c => folded.push(c),
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edit::Position;
    use crate::text::Text;

    fn found(tolerance: Tolerance, file: &str, hunk: &[&str]) -> Option<Reindent> {
        let hunk = Hunk {
            lines: hunk.iter().map(|text| HunkLine::Keep((*text).to_owned())).collect(),
            other_readings: Vec::new(),
            position: Position::Unstated,
            final_newline: None,
            states_line_ends: false,
            has_marks: true,
        };
        let budget = &mut ComparisonBudget::default();
        compare(tolerance, &Text::new(file).lines, &Pattern::old(&hunk), ("f", budget)).unwrap()
    }

    #[test]
    fn each_step_tolerates_more() {
        use Tolerance::{Exact, Indentation, LookAlikes, MissingBlank, TrailingBlanks};
        for (file, hunk, first) in [
            ("a\n", "a", Some(Exact)),
            ("a\r\n", "a", Some(Exact)),
            ("a\r\n", "a\r", Some(Exact)),
            ("a  \n", "a", Some(TrailingBlanks)),
            ("a\n", "a\t", Some(TrailingBlanks)),
            ("    a\n", "   a", Some(MissingBlank)),
            ("    a\n", "a", Some(Indentation)),
            ("a\n", "  a", Some(Indentation)),
            ("x = \u{201c}a\u{2014}b\u{201d}\n", "x = \"a-b\"", Some(LookAlikes)),
            ("  a\u{a0}b\n", "a b", Some(LookAlikes)),
            ("\ta\n", "  a", None),
            ("a\n", "b", None),
        ] {
            let step = Tolerance::ALL.into_iter().find(|step| found(*step, file, &[hunk]).is_some());
            assert_eq!(step, first, "{file:?} {hunk:?}");
        }
    }

    #[test]
    fn indentation_differs_by_the_same_blanks_on_every_line() {
        let file = "  if a:\n\n      b\n";
        let add = |blanks: &str| Some(Reindent::Add(blanks.into()));
        for tolerance in [Tolerance::Indentation, Tolerance::LookAlikes] {
            assert_eq!(found(tolerance, file, &["if a:", "", "    b"]), add("  "));
            assert_eq!(found(tolerance, file, &["if a:", "", "  b"]), None);
            assert_eq!(found(tolerance, "a\n", &["\ta"]), Some(Reindent::Remove("\t".into())));
        }
    }

    #[test]
    fn line_that_lacks_the_blanks_to_remove_is_refused() {
        assert_eq!(Reindent::Remove("  ".into()).line("   x").as_deref(), Some(" x"));
        assert_eq!(Reindent::Remove("  ".into()).line("x"), None);
        assert_eq!(Reindent::Add("\t".into()).line("").as_deref(), Some(""));
    }
}
