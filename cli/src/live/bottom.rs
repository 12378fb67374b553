//! The part of the terminal below everything written so far: a few rows that are drawn anew in place.
//!
//! Drawn by hand because progress bar crates fill a row up to its last column: whatever the terminal echoes then (`^C`, a
//! key) begins a new row, and the next redraw leaves rests behind. Here the last columns stay free. Rows are counted by the
//! width at the time they are taken away: a terminal made narrower meanwhile has wrapped them.

use std::io::IsTerminal;

use console::{Term, measure_text_width};

/// Room for an echoed `^C`, and a free last column.
const MARGIN: usize = 3;
const NARROWEST: usize = 8;

pub struct Bottom {
    term: Term,
    drawn: Vec<String>,
}

impl Bottom {
    /// `None` off a terminal. stdout must be one as well as stderr: behind a pipe there may be a program (`tee`) that writes
    /// to the same terminal and knows nothing of this.
    pub fn of_terminal() -> Option<Self> {
        let term = Term::buffered_stderr();
        let fits = term.is_term() && std::io::stdout().is_terminal() && !console::is_dumb();
        fits.then(|| Self { term, drawn: Vec::new() })
    }

    /// Columns to use, now.
    pub fn width(&self) -> usize {
        self.columns().saturating_sub(MARGIN).max(NARROWEST)
    }

    fn columns(&self) -> usize {
        self.term.size_checked().map_or(80, |(_, columns)| usize::from(columns)).max(1)
    }

    /// Rows no wider than [`Bottom::width`].
    pub fn draw(&mut self, rows: Vec<String>) {
        if rows == self.drawn {
            return;
        }
        self.take_away();
        let written = self.term.write_str(&rows.join("\n")).and_then(|()| self.term.flush());
        self.drawn = rows;
        settle(written);
    }

    /// The cursor is then where the next line of the scrolled text begins.
    pub fn clear(&mut self) {
        self.take_away();
        settle(self.term.flush());
    }

    fn take_away(&mut self) {
        let columns = self.columns();
        let rows: usize = self.drawn.iter().map(|row| measure_text_width(row).div_ceil(columns).max(1)).sum();
        for row in 0..rows {
            let up = if row > 0 { self.term.move_cursor_up(1) } else { Ok(()) };
            settle(up.and_then(|()| self.term.clear_line()));
        }
        self.drawn.clear();
    }
}

impl Drop for Bottom {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A terminal that cannot be written to has nobody before it who could be told.
fn settle(written: std::io::Result<()>) {
    if let Err(error) = written {
        tracing::debug!(%error, "the terminal cannot be drawn on");
    }
}
