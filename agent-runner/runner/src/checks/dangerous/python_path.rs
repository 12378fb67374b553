//! Detects dangers in `.pth` files: Python executes their lines that begin with `import` at every start.

use super::{Danger, Lines, WorkLimit, grammar};
use crate::checks::language::Language;

/// Returns the dangers in the executed lines of a `.pth` file.
pub(super) fn dangers(text: &str, work: &WorkLimit) -> Vec<Danger> {
    let lines = Lines::new(text);
    let is_code = |line: &str| line.starts_with("import ") || line.starts_with("import\t");
    let rows = text.lines().enumerate().filter(|(_, line)| is_code(line));
    rows.flat_map(|(row, line)| {
        let dangers = grammar::dangers(Language::Python, line, work);
        dangers.into_iter().map(|danger| Danger::new(danger.kind, &lines, row, &danger.source)).collect::<Vec<_>>()
    })
    .collect()
}
