//! The footer of the terminal: a few rows below the scrolled output that are redrawn in place.
//!
//! Progress bar crates fill a row up to its last column. If the terminal then echoes anything (`^C`, a key), the echo
//! starts a new row, and the next redraw leaves fragments behind. This footer leaves the last columns free. The number
//! of rows to erase is computed from the terminal's current width, because a terminal that was made narrower after the
//! footer was drawn has wrapped the rows.

use std::io::IsTerminal;

use console::{Term, measure_text_width};

/// Columns left free at the end of a row: two for an echoed `^C`, and the last column.
const MARGIN_COLUMNS: usize = 3;
const MIN_COLUMNS: usize = 8;

pub struct Footer {
    term: Term,
    drawn: Vec<String>,
}

impl Footer {
    /// Creates the terminal's footer; `None` unless both stderr and stdout are terminals that can redraw rows: a
    /// program behind a pipe (`tee`) may write stdout to the same terminal, and its lines would mix with the footer.
    pub fn of_terminal() -> Option<Self> {
        let term = Term::buffered_stderr();
        let fits = term.is_term() && std::io::stdout().is_terminal() && !console::is_dumb();
        fits.then(|| Self { term, drawn: Vec::new() })
    }

    /// Columns that a row may use, at the current width of the terminal.
    pub fn width(&self) -> usize {
        self.columns().saturating_sub(MARGIN_COLUMNS).max(MIN_COLUMNS)
    }

    fn columns(&self) -> usize {
        self.term.size_checked().map_or(80, |(_, columns)| usize::from(columns)).max(1)
    }

    /// Replaces the rows, which must not be wider than [`Footer::width`].
    pub fn draw(&mut self, rows: Vec<String>) {
        if rows == self.drawn {
            return;
        }
        self.erase();
        let written = self.term.write_str(&rows.join("\n")).and_then(|()| self.term.flush());
        self.drawn = rows;
        log_error(written);
    }

    /// Erases the footer; the cursor is then at the start of the next line of the scrolled output.
    pub fn clear(&mut self) {
        self.erase();
        log_error(self.term.flush());
    }

    fn erase(&mut self) {
        let columns = self.columns();
        let rows: usize = self.drawn.iter().map(|row| measure_text_width(row).div_ceil(columns).max(1)).sum();
        for row in 0..rows {
            let up = if row > 0 { self.term.move_cursor_up(1) } else { Ok(()) };
            log_error(up.and_then(|()| self.term.clear_line()));
        }
        self.drawn.clear();
    }
}

impl Drop for Footer {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Logs a failure to draw: a terminal that cannot be written cannot show an error either.
fn log_error(written: std::io::Result<()>) {
    if let Err(error) = written {
        tracing::debug!(%error, "cannot draw on the terminal");
    }
}
