//! `cfq logs TASK` and `cfq logs --process NAME`

mod process;

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::event::Event;
use cfq_proto::ids::TaskKey;
use jiff::Timestamp;

use crate::commands::describe::{Detail, describe};
use crate::commands::watch::{RECONNECT_TIMEOUT, until_signalled, waits_for_user};
use crate::exit::{self, Code};
use crate::output::{self, Output};

pub use process::{PROCESSES, process};

/// Interval at which new events are asked for.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Which lines are printed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Selection {
    /// Whether new lines are printed as they are written.
    pub follow: bool,
    /// Maximum number of lines from the end; `None`: all.
    pub tail: Option<usize>,
    /// Time before which no line is printed.
    pub since: Option<Timestamp>,
}

pub async fn task(
    client: &Client,
    out: Output,
    task: TaskKey,
    selection: Selection,
    is_verbose: bool,
) -> anyhow::Result<Code> {
    let detail = Detail::of(is_verbose);
    let since = selection.since.map_or(f64::MIN, |since| since.as_second() as f64);
    let text = |event: &Event| line(event, out, detail).filter(|_| event.at >= since);
    // The state before the events, so that no event of the end is missed.
    let mut end = end_of(client, task).await?;
    let events = client.events(task, 0).await?.events;
    let lines: Vec<String> = events.iter().filter_map(text).collect();
    let first = selection.tail.map_or(0, |tail| lines.len().saturating_sub(tail));
    lines[first..].iter().for_each(|line| output::print_line(line));
    if !selection.follow {
        if lines.is_empty() && selection.since.is_some() {
            out.status(&format!("no events of {task} since then"));
        }
        return Ok(Code::Done);
    }
    let mut read = events.last().map_or(0, |event| event.task_seq);
    let follow = async {
        let mut lost_since: Option<Instant> = None;
        loop {
            if let Some(code) = end {
                return Ok(code);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            let newer = async {
                let end = end_of(client, task).await?;
                Ok::<_, ClientError>((end, client.events(task, read).await?.events))
            };
            match newer.await {
                Ok((newer_end, events)) => {
                    (end, lost_since) = (newer_end, None);
                    events.iter().filter_map(text).for_each(|line| output::print_line(&line));
                    read = events.last().map_or(read, |event| event.task_seq);
                }
                Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 429 | 503, .. }) => {
                    if lost_since.get_or_insert_with(Instant::now).elapsed() > RECONNECT_TIMEOUT {
                        return Err(exit::unreachable(format!(
                            "lost the connection to the server; the task is not affected: run `cfq logs -f {task}` again \
                             when the server is back"
                        )));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    };
    until_signalled(task, follow).await
}

/// The exit code that reports the task's state; `None` while it continues by itself.
async fn end_of(client: &Client, task: TaskKey) -> Result<Option<Code>, ClientError> {
    let detail = client.task(task).await?;
    let state = detail.summary.state;
    Ok((state.is_settled() || waits_for_user(&detail)).then(|| exit::of_state(state)))
}

/// An event as a line; `None` for events that are not displayed.
fn line(event: &Event, out: Output, detail: Detail) -> Option<String> {
    if out.json {
        return output::json(event).ok();
    }
    let text = describe(&event.body, detail)?;
    let at = Timestamp::from_second(event.at as i64).map(|at| at.to_string()).unwrap_or_default();
    Some(output::indent_rest(&format!("{at} {} {}", event.number, output::sanitize(&text))))
}
