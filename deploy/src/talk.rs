//! What is said while engines are looked for and fetched. It goes to stderr, since stdout is data; and it is talk, so
//! failing to say it is no error.

use std::io::{Write, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Talk {
    #[default]
    Silent,
    /// Lines on stderr; progress bars too, where it is a terminal.
    Stderr,
}

impl Talk {
    pub fn say(self, line: &str) {
        match self {
            Self::Silent => tracing::info!("{line}"),
            Self::Stderr => {
                if writeln!(stderr(), "{line}").is_err() {
                    tracing::debug!("{line}");
                }
            }
        }
    }

    /// A bar over about `bytes` bytes.
    pub fn bar(self, what: &str, bytes: u64) -> ProgressBar {
        let target = match self {
            Self::Silent => ProgressDrawTarget::hidden(),
            Self::Stderr => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_message(what.to_owned());
        match ProgressStyle::with_template("{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}
