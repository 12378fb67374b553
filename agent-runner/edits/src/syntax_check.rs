//! Refuses hunks that add a syntax error to a file, and shows the lines around it before and after.

use crate::languages::Languages;
use crate::problem::{MAX_SHOWN_CHARS, ReplyProblem};

/// Number of lines above and below a syntax error that a problem shows.
const SHOWN_LINES: usize = 3;

/// Checks that a file without a syntax error has none after its hunks.
///
/// # Errors
/// [`ReplyProblem::AddsSyntaxError`] if it has one.
pub(crate) fn check_syntax(
    path: &str,
    before: &str,
    after: &str,
    languages: &impl Languages,
) -> Result<(), ReplyProblem> {
    if before.is_empty() || languages.syntax_error(path, before).is_some() {
        return Ok(());
    }
    let Some(error) = languages.syntax_error(path, after) else { return Ok(()) };
    // The error's line, or the first line that differs, if that is earlier.
    let equal = before.lines().zip(after.lines()).take_while(|(a, b)| a == b).count();
    let place_before = error.line.min(equal + 1);
    Err(ReplyProblem::AddsSyntaxError {
        path: path.to_owned(),
        line: error.line,
        message: error.message,
        before: view(before, place_before),
        after: view(after, error.line),
    })
}

/// The lines around a line, with their numbers.
fn view(text: &str, line: usize) -> String {
    let first = line.saturating_sub(SHOWN_LINES + 1);
    let lines = text.lines().enumerate().skip(first).take(2 * SHOWN_LINES + 1);
    let shown = lines.map(|(n, line)| {
        let line: String = line.chars().take(MAX_SHOWN_CHARS).collect();
        format!("{:>4}| {line}", n + 1)
    });
    shown.collect::<Vec<_>>().join("\n")
}
