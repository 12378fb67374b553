//! Live display of a running task. Final lines are written to stdout, in the same form whether stdout is a terminal or
//! a file. A terminal also shows a footer: the row of text that a model is still writing, and below it one status line.
//!
//! Scrolled lines and footer never mix, because only this module writes while a task is watched: the footer is erased
//! before final rows are written, and drawn again below them. The row that a model is still writing belongs to the
//! footer, not to the scrolled text, so output is never appended to an unfinished row with the status line below it.

mod call;
mod footer;
mod progress;
mod review_lines;
mod status;
mod wrap;

use std::time::{Duration, Instant};

use cfq_proto::job::JobRole;

use crate::output;
use footer::Footer;
use progress::TaskProgress;
pub use review_lines::ReviewLines;
use wrap::WrappedText;

const SPINNER: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
/// Redraw interval of the footer, for the spinner and the elapsed seconds.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Prefix of the rows of a model's text, except the first row.
const INDENT: &str = "        | ";

pub struct Screen {
    /// The footer; `None` without a terminal, or with `--json`. With a footer, text is wrapped to the width of the
    /// terminal.
    footer: Option<Footer>,
    text: ModelText,
    pub progress: TaskProgress,
    start: Instant,
}

/// The text that a model is writing.
enum ModelText {
    None,
    /// Text is written as it is received; its last line has not ended yet.
    Raw,
    Wrapped(WrappedText),
}

impl Screen {
    /// Creates a screen. It has a footer if `live` is true and there is a terminal.
    pub fn new(live: bool) -> Self {
        let footer = if live { Footer::of_terminal() } else { None };
        Self { footer, text: ModelText::None, progress: TaskProgress::default(), start: Instant::now() }
    }

    /// Whether [`Screen::progress`] is shown.
    pub fn is_live(&self) -> bool {
        self.footer.is_some()
    }

    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Writes a final line that starts with `label`.
    pub fn print_line(&mut self, label: &str, text: &str) {
        self.end_text();
        let lines = match &self.footer {
            None => plain_line(label, text),
            Some(footer) => {
                let mut rows = WrappedText::new(format!("{label} "), " ".repeat(label.len() + 1));
                let mut done = rows.push(text, footer.width());
                done.extend(rows.finish());
                done.join("\n")
            }
        };
        self.write(&lines);
    }

    /// Appends to the text that `role` is writing.
    pub fn append_text(&mut self, role: JobRole, text: &str) {
        let Some(footer) = &self.footer else {
            let begin = if self.is_in_text() { String::new() } else { format!("  {role} | ") };
            self.text = ModelText::Raw;
            return output::print_raw(&format!("{begin}{}", text.replace('\n', &format!("\n{INDENT}"))));
        };
        let width = footer.width();
        let mut rows = match std::mem::replace(&mut self.text, ModelText::None) {
            ModelText::Wrapped(rows) => rows,
            ModelText::None | ModelText::Raw => WrappedText::new(format!("  {:5} | ", role.as_str()), INDENT),
        };
        let done = rows.push(text, width);
        self.text = ModelText::Wrapped(rows);
        if done.is_empty() { self.draw() } else { self.write(&done.join("\n")) }
    }

    /// Whether a model's text is being written.
    pub fn is_in_text(&self) -> bool {
        !matches!(self.text, ModelText::None)
    }

    fn end_text(&mut self) {
        match std::mem::replace(&mut self.text, ModelText::None) {
            ModelText::None => {}
            ModelText::Raw => self.write(""),
            ModelText::Wrapped(rows) => {
                if let Some(last) = rows.finish() {
                    self.write(&last);
                }
            }
        }
    }

    /// Awaits `wait`, and redraws the footer at intervals until it completes.
    pub async fn redraw_while<T>(&mut self, wait: impl Future<Output = T>) -> T {
        let mut wait = std::pin::pin!(wait);
        if self.footer.is_none() {
            return wait.await;
        }
        loop {
            tokio::select! {
                biased;
                done = &mut wait => return done,
                () = tokio::time::sleep(REDRAW_INTERVAL) => self.draw(),
            }
        }
    }

    fn write(&mut self, lines: &str) {
        if let Some(footer) = &mut self.footer {
            footer.clear();
        }
        output::print_line(lines);
        self.draw();
    }

    fn draw(&mut self) {
        let now = self.now();
        let Some(footer) = &mut self.footer else { return };
        let turn = (now.as_millis() / REDRAW_INTERVAL.as_millis()) as usize % SPINNER.len();
        let status = format!("{} {}", SPINNER[turn], self.progress.status_line(now, footer.width().saturating_sub(2)));
        footer.draw(match &self.text {
            ModelText::Wrapped(rows) => vec![rows.open_row(), status],
            ModelText::None | ModelText::Raw => vec![status],
        });
    }
}

impl Drop for Screen {
    /// Writes the unfinished text, also when a watch is interrupted; the footer erases itself.
    fn drop(&mut self) {
        self.end_text();
    }
}

/// A final line without a terminal. The lines of a text are indented, so that a model cannot forge a line of cfq.
fn plain_line(label: &str, text: &str) -> String {
    format!("{label} {}", output::indent_rest(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_with_line_ends_is_recognized_as_one_line() {
        assert_eq!(plain_line("1", "x\n2 t7 is merged"), "1 x\n          2 t7 is merged");
    }
}
