//! Limit of the work that the checks do for one file, and positions of its lines.
//!
//! A reply can contain a file that is small, but costs quadratic time to check: deep nesting, endless chains of calls,
//! thousands of dangers. The limit counts steps instead of time, so that a check of the same file always has the same
//! result. A file that exceeds it is not checked to its end and must not pass.

use std::cell::Cell;

/// Maximum number of steps for one file; a step is about one visited syntax node or one compared word. Ordinary sources
/// of 500 KB need less than a quarter of it.
const MAX_CHECK_STEPS: usize = 5_000_000;

/// Remaining work for one file.
#[derive(Debug)]
pub(super) struct WorkLimit(Cell<usize>);

impl Default for WorkLimit {
    fn default() -> Self {
        Self(Cell::new(MAX_CHECK_STEPS))
    }
}

impl WorkLimit {
    /// Uses `steps` of the limit. Returns false if it is exceeded; the caller then stops.
    pub fn take(&self, steps: usize) -> bool {
        self.0.set(self.0.get().saturating_sub(steps));
        !self.is_exceeded()
    }

    /// Uses up the limit.
    pub fn exceed(&self) {
        self.0.set(0);
    }

    /// True if the file was not checked to its end.
    pub fn is_exceeded(&self) -> bool {
        self.0.get() == 0
    }
}

/// A text with the positions of its lines.
pub(super) struct Lines<'t> {
    pub text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    pub fn new(text: &'t str) -> Self {
        Self { text, starts: std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect() }
    }

    /// Row of a byte offset, from 0.
    pub fn row_of(&self, offset: usize) -> usize {
        self.starts.partition_point(|start| *start <= offset).saturating_sub(1)
    }

    /// The row's line, without its line ending.
    pub fn line(&self, row: usize) -> &'t str {
        let Some(start) = self.starts.get(row) else { return "" };
        let end = self.starts.get(row + 1).copied().unwrap_or(self.text.len());
        self.text[*start..end].trim_end_matches(['\r', '\n'])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_lines_of_offsets_are_found() {
        let lines = Lines::new("a\r\nbc\n\nd");
        assert_eq!([0, 2, 3, 5, 6, 7, 99].map(|offset| lines.row_of(offset)), [0, 0, 1, 1, 2, 3, 3]);
        assert_eq!([0, 1, 2, 3, 4].map(|row| lines.line(row)), ["a", "bc", "", "d", ""]);
    }

    #[test]
    fn limit_is_exceeded_once_used_up() {
        let work = WorkLimit::default();
        assert!(work.take(MAX_CHECK_STEPS - 1) && !work.is_exceeded());
        assert!(!work.take(1) && work.is_exceeded());
    }
}
