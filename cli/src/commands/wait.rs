//! `cfq wait TASK...`: waits until tasks have ended or need a human, for scripts.

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;

use crate::commands::watch::{RECONNECT_TIMEOUT, waits_for_user};
use crate::exit::{self, Code};
use crate::output::Output;

/// Interval of the requests for each task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub async fn run(client: &Client, out: Output, tasks: Vec<TaskKey>, timeout: Option<Duration>) -> anyhow::Result<Code> {
    let mut waiting = tasks;
    let print =
        |detail: &TaskDetail| out.print(&detail.summary, |summary| format!("{} is {}", summary.number, summary.state));
    let waited = wait(client, print, &mut waiting);
    let Some(timeout) = timeout else { return waited.await };
    match tokio::time::timeout(timeout, waited).await {
        Ok(ended) => ended,
        Err(_) => {
            let message = format!("not ended in time: {}; the tasks continue", names(&waiting));
            Err(exit::CodedError { code: Code::TimedOut, message }.into())
        }
    }
}

/// Waits until a task has ended or needs a human, and prints nothing.
pub async fn until_settled(client: &Client, task: TaskKey) -> anyhow::Result<Code> {
    wait(client, |_| Ok(()), &mut vec![task]).await
}

/// Waits, and removes the tasks from `waiting` that have settled, after `print` was called with them.
async fn wait(
    client: &Client,
    print: impl Fn(&TaskDetail) -> anyhow::Result<()>,
    waiting: &mut Vec<TaskKey>,
) -> anyhow::Result<Code> {
    let mut worst = Code::Done;
    let mut disconnected_since: Option<Instant> = None;
    // A task that does not exist is refused before the wait, and a server that was never reached is not waited for.
    for task in waiting.iter() {
        client.task(*task).await?;
    }
    loop {
        let mut next = 0;
        while let Some(task) = waiting.get(next) {
            match client.task(*task).await {
                Ok(detail) => {
                    disconnected_since = None;
                    match settled(&detail) {
                        Some(code) => {
                            print(&detail)?;
                            worst = worst.worse(code);
                            waiting.remove(next);
                        }
                        None => next += 1,
                    }
                }
                Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 429 | 503, .. }) => {
                    disconnected_since.get_or_insert_with(Instant::now);
                    next += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if waiting.is_empty() {
            return Ok(worst);
        }
        if disconnected_since.is_some_and(|since| since.elapsed() > RECONNECT_TIMEOUT) {
            return Err(exit::unreachable(format!(
                "lost the connection to the server; the tasks are not affected: run `cfq wait {}` again when the server \
                 is back",
                names(waiting)
            )));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn names(tasks: &[TaskKey]) -> String {
    tasks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// The exit code that reports the task; `None` while it continues by itself.
fn settled(detail: &TaskDetail) -> Option<Code> {
    let state = detail.summary.state;
    (state.is_settled() || waits_for_user(detail)).then(|| exit::of_state(state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_reported_before_a_task_that_needs_a_human() {
        let all = |codes: &[Code]| codes.iter().copied().fold(Code::Done, Code::worse);
        assert_eq!(all(&[Code::Done, Code::Done]), Code::Done);
        assert_eq!(all(&[Code::NeedsHuman, Code::Done]), Code::NeedsHuman);
        assert_eq!(all(&[Code::Failed, Code::NeedsHuman, Code::Done]), Code::Failed);
        assert_eq!(all(&[Code::NeedsHuman, Code::Failed]), Code::Failed);
    }
}
