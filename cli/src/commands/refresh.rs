//! `--watch` of the lists: redraws a list every two seconds on a terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::commands::watch::RECONNECT_TIMEOUT;
use crate::connect;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone};

const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Prints the lines of `fetch` until Ctrl-C, for at most a minute without a response of the server.
pub async fn run(out: Output, mut fetch: impl AsyncFnMut() -> anyhow::Result<Vec<Line>>) -> anyhow::Result<Code> {
    if out.json || !std::io::stdout().is_terminal() {
        return Err(exit::usage(
            "--watch needs a terminal: in scripts, use --json, and `cfq wait` for the end of tasks",
        ));
    }
    // The first error is reported before the terminal changes.
    let mut lines = fetch().await?;
    let mut lost_since: Option<Instant> = None;
    // Why the list could not be read again.
    let mut lost: Option<String> = None;
    let mut interrupted = std::pin::pin!(cfq_link::stop::signalled());
    loop {
        draw(&lines, lost.as_deref());
        tokio::select! {
            () = &mut interrupted => return Ok(Code::Interrupted),
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
        }
        let fetched = tokio::select! {
            () = &mut interrupted => return Ok(Code::Interrupted),
            fetched = fetch() => fetched,
        };
        match fetched {
            Ok(newer) => (lines, lost_since, lost) = (newer, None, None),
            Err(error) if lost_since.get_or_insert_with(Instant::now).elapsed() > RECONNECT_TIMEOUT => {
                return Err(error);
            }
            // The last list stays visible.
            Err(error) => lost = Some(output::one_line(&describe(&error))),
        }
    }
}

fn describe(error: &anyhow::Error) -> String {
    error.downcast_ref().map_or_else(|| format!("{error:#}"), connect::describe_error)
}

/// Draws the lines from the top of the terminal; those below its last row are left out.
fn draw(lines: &[Line], lost: Option<&str>) {
    let (rows, columns) = console::Term::stdout().size();
    let room = usize::from(rows).saturating_sub(2).max(1);
    let columns = usize::from(columns);
    let lines = output::cut_rows(lines, columns);
    let mut shown = lines[..lines.len().min(room)].to_vec();
    let left = lines.len() - shown.len();
    let left = if left > 0 { format!("{left} more lines; ") } else { String::new() };
    shown.push(match lost {
        Some(error) => Line::row(format!("retrying: {error}"), Tone::Bad),
        None => Line::row(format!("({left}Ctrl-C ends)"), Tone::Faint),
    });
    let text = output::paint(&shown, Some(columns), console::colors_enabled());
    // Each line is erased after its end, and all lines below the last one, so that nothing flickers.
    let text = text.replace('\n', "\u{1b}[K\n");
    output::print_raw(&format!("\u{1b}[H{text}\u{1b}[K\n\u{1b}[J"));
}
