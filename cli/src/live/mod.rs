//! What a person sees of a run while it goes on. Lines that are final scroll by on stdout as they would into a file; on a
//! terminal there is a bottom part besides: the row of text that a model is still writing, and under it one status line.
//!
//! The two never mix, because only this module writes while a run is watched: before final rows are written the bottom
//! part is taken away, and drawn again below them. The row that is open belongs to the bottom part, not to the scrolled
//! text, so nothing ever has to be written behind half a row that something else was drawn under.

mod bottom;
mod call;
mod progress;
mod rows;
mod status;

use std::time::{Duration, Instant};

use cfq_proto::task::Agent;

use crate::output;
use bottom::Bottom;
use progress::Progress;
use rows::Rows;

const SPINNER: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
/// How often the bottom part changes by itself: a spinner that turns, seconds that pass.
const TICK: Duration = Duration::from_millis(100);
/// Before every row of a model's text but its first.
const INDENT: &str = "        | ";

pub struct Screen {
    /// The bottom part, and text in rows of the terminal; `None` where there is none, or only data is wanted.
    bottom: Option<Bottom>,
    text: Text,
    pub progress: Progress,
    start: Instant,
}

/// What a model is writing.
enum Text {
    None,
    /// Written as it came; the line is not ended yet.
    Raw,
    Rows(Rows),
}

impl Screen {
    /// `live`: with a bottom part, where there is a terminal for it.
    pub fn new(live: bool) -> Self {
        let bottom = if live { Bottom::of_terminal() } else { None };
        Self { bottom, text: Text::None, progress: Progress::default(), start: Instant::now() }
    }

    /// Whether somebody sees [`Screen::progress`].
    pub fn is_live(&self) -> bool {
        self.bottom.is_some()
    }

    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// A final line that begins with `label`.
    pub fn line(&mut self, label: &str, text: &str) {
        self.end_text();
        let lines = match &self.bottom {
            None => format!("{label} {text}"),
            Some(bottom) => {
                let mut rows = Rows::new(format!("{label} "), " ".repeat(label.len() + 1));
                let mut done = rows.push(text, bottom.width());
                done.extend(rows.finish());
                done.join("\n")
            }
        };
        self.write(&lines);
    }

    /// Text that `role` goes on writing.
    pub fn text(&mut self, role: Agent, text: &str) {
        let Some(bottom) = &self.bottom else {
            let begin = if self.is_in_text() { String::new() } else { format!("  {role} | ") };
            self.text = Text::Raw;
            return output::raw(&format!("{begin}{}", text.replace('\n', &format!("\n{INDENT}"))));
        };
        let width = bottom.width();
        let mut rows = match std::mem::replace(&mut self.text, Text::None) {
            Text::Rows(rows) => rows,
            Text::None | Text::Raw => Rows::new(format!("  {:5} | ", role.as_str()), INDENT),
        };
        let done = rows.push(text, width);
        self.text = Text::Rows(rows);
        if done.is_empty() { self.draw() } else { self.write(&done.join("\n")) }
    }

    pub fn is_in_text(&self) -> bool {
        !matches!(self.text, Text::None)
    }

    fn end_text(&mut self) {
        match std::mem::replace(&mut self.text, Text::None) {
            Text::None => {}
            Text::Raw => self.write(""),
            Text::Rows(rows) => {
                if let Some(last) = rows.finish() {
                    self.write(&last);
                }
            }
        }
    }

    /// Waits for `wait` with the bottom part alive.
    pub async fn during<T>(&mut self, wait: impl Future<Output = T>) -> T {
        let mut wait = std::pin::pin!(wait);
        if self.bottom.is_none() {
            return wait.await;
        }
        loop {
            tokio::select! {
                biased;
                done = &mut wait => return done,
                () = tokio::time::sleep(TICK) => self.draw(),
            }
        }
    }

    fn write(&mut self, lines: &str) {
        if let Some(bottom) = &mut self.bottom {
            bottom.clear();
        }
        output::line(lines);
        self.draw();
    }

    fn draw(&mut self) {
        let now = self.now();
        let Some(bottom) = &mut self.bottom else { return };
        let turn = (now.as_millis() / TICK.as_millis()) as usize % SPINNER.len();
        let status = format!("{} {}", SPINNER[turn], self.progress.line(now, bottom.width().saturating_sub(2)));
        bottom.draw(match &self.text {
            Text::Rows(rows) => vec![rows.open_row(), status],
            Text::None | Text::Raw => vec![status],
        });
    }
}

impl Drop for Screen {
    /// Also when a watch is broken off: what a model had written so far stays; the bottom part goes by itself.
    fn drop(&mut self) {
        self.end_text();
    }
}
