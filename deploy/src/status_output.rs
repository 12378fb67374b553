//! Status messages and progress bars, shown while the Postgres and NATS programs are searched for and fetched. They are
//! written to stderr, because stdout carries data; a failure to write them is not an error.

use std::io::{Write, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Destination of status messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StatusOutput {
    /// Messages go to the log, and no progress bar is drawn.
    #[default]
    Silent,
    /// Messages are lines on stderr; where it is a terminal, progress bars are drawn too.
    Stderr,
}

impl StatusOutput {
    pub fn print(self, line: &str) {
        match self {
            Self::Silent => tracing::info!("{line}"),
            Self::Stderr => {
                if writeln!(stderr(), "{line}").is_err() {
                    tracing::debug!("{line}");
                }
            }
        }
    }

    /// A progress bar over about `bytes` bytes, labelled `what`.
    pub fn progress_bar(self, what: &str, bytes: u64) -> ProgressBar {
        let target = match self {
            Self::Silent => ProgressDrawTarget::hidden(),
            Self::Stderr => ProgressDrawTarget::stderr(),
        };
        // A length of 0 would be drawn as complete.
        let length = Some(bytes).filter(|bytes| *bytes > 0);
        let bar = ProgressBar::with_draw_target(length, target).with_message(what.to_owned());
        match ProgressStyle::with_template("{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}
