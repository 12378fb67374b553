//! Comparison of a hunk's lines with those of a file, in steps of growing tolerance.

use crate::problem::Problem;
use crate::text::{Line, LineEnd};

/// Maximum number of lines compared to find the hunks of one reply. An ordinary hunk needs one comparison for each line
/// of its file and step.
pub(crate) const MAX_COMPARISONS: usize = 5_000_000;

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
    /// [`Problem::TooManyComparisons`] if they are not left.
    pub(crate) fn take(&mut self, path: &str, count: usize) -> Result<(), Problem> {
        self.left = self.left.saturating_sub(count);
        match self.left {
            0 => Err(Problem::TooManyComparisons { path: path.to_owned() }),
            _ => Ok(()),
        }
    }
}

/// How lines are compared. A later one finds all that an earlier one finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tolerance {
    Exact,
    TrailingBlanks,
    Indentation,
    LookAlikes,
}

impl Tolerance {
    pub(crate) const ALL: [Self; 4] = [Self::Exact, Self::TrailingBlanks, Self::Indentation, Self::LookAlikes];
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
}

/// Compares the lines of a file with those of a hunk, which are as many. `None` if they differ.
pub(crate) fn compare(
    tolerance: Tolerance,
    file: &[Line],
    hunk: &[&str],
    (path, budget): (&str, &mut ComparisonBudget),
) -> Result<Option<Reindent>, Problem> {
    let mut reindent = Reindent::None;
    let mut has_indent = false;
    for (line, text) in file.iter().zip(hunk) {
        budget.take(path, 1)?;
        let equal = match tolerance {
            Tolerance::Exact => is_exact(line, text),
            Tolerance::TrailingBlanks => line.text.trim_end() == text.trim_end(),
            Tolerance::Indentation | Tolerance::LookAlikes if text.trim().is_empty() => line.text.trim().is_empty(),
            Tolerance::Indentation | Tolerance::LookAlikes => {
                if !has_indent {
                    let Some(found) = difference(indent(&line.text), indent(text)) else { return Ok(None) };
                    (reindent, has_indent) = (found, true);
                }
                match (reindent.line(text), tolerance) {
                    (Some(text), Tolerance::LookAlikes) => fold(line.text.trim_end()) == fold(text.trim_end()),
                    (Some(text), _) => line.text.trim_end() == text.trim_end(),
                    (None, _) => false,
                }
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

/// How the indentation of a hunk's line differs from that of the file's line; `None` if neither contains the other.
fn difference(file: &str, hunk: &str) -> Option<Reindent> {
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
    use crate::text::Text;

    fn found(tolerance: Tolerance, file: &str, hunk: &[&str]) -> Option<Reindent> {
        compare(tolerance, &Text::new(file).lines, hunk, ("f", &mut ComparisonBudget::default())).unwrap()
    }

    #[test]
    fn each_step_tolerates_more() {
        use Tolerance::{Exact, Indentation, LookAlikes, TrailingBlanks};
        for (file, hunk, first) in [
            ("a\n", "a", Some(Exact)),
            ("a\r\n", "a", Some(Exact)),
            ("a\r\n", "a\r", Some(Exact)),
            ("a  \n", "a", Some(TrailingBlanks)),
            ("a\n", "a\t", Some(TrailingBlanks)),
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
        assert_eq!(found(Tolerance::Indentation, file, &["if a:", "", "    b"]), add("  "));
        assert_eq!(found(Tolerance::Indentation, file, &["if a:", "", "  b"]), None);
        assert_eq!(found(Tolerance::Indentation, "a\n", &["\ta"]), Some(Reindent::Remove("\t".into())));
    }

    #[test]
    fn line_that_lacks_the_blanks_to_remove_is_refused() {
        assert_eq!(Reindent::Remove("  ".into()).line("   x").as_deref(), Some(" x"));
        assert_eq!(Reindent::Remove("  ".into()).line("x"), None);
        assert_eq!(Reindent::Add("\t".into()).line("").as_deref(), Some(""));
    }
}
