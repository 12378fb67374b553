//! `cfq wait TASK...`: waits until tasks have ended or need a human, for scripts.

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{TaskDetail, TaskQuery};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;

use crate::args::WaitArgs;
use crate::commands::watch::{RECONNECT_TIMEOUT, waits_for_user};
use crate::exit::{self, Code};
use crate::output::Output;

/// Interval of the requests for each task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of tasks with the wanted labels; that of a page of the list.
const MAX_LABELLED: u32 = 1_000;

pub async fn run(client: &Client, out: Output, args: WaitArgs) -> anyhow::Result<Code> {
    let WaitArgs { tasks, label, fail_fast, timeout } = args;
    let mut waiting = tasks;
    if !label.is_empty() {
        let states = TaskState::ALL.into_iter().filter(|state| !state.is_terminal()).collect();
        let query = TaskQuery { states, labels: label, limit: MAX_LABELLED, ..TaskQuery::default() };
        let list = client.list_tasks(&query).await?;
        if list.next.is_some() {
            return Err(exit::usage(format!("more than {MAX_LABELLED} open tasks have this label: name the tasks")));
        }
        waiting = list.tasks.iter().map(|task| TaskKey::Number(task.number)).collect();
        if waiting.is_empty() {
            out.status("no open task has this label");
            return Ok(Code::Done);
        }
    }
    let print =
        |detail: &TaskDetail| out.print(&detail.summary, |summary| format!("{} is {}", summary.number, summary.state));
    let waited = wait(client, print, &mut waiting, fail_fast);
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
    wait(client, |_| Ok(()), &mut vec![task], false).await
}

/// Waits, and removes the tasks from `waiting` that have settled, after `print` was called with them. With `fail_fast`,
/// the first one that did not succeed ends the wait.
async fn wait(
    client: &Client,
    print: impl Fn(&TaskDetail) -> anyhow::Result<()>,
    waiting: &mut Vec<TaskKey>,
    fail_fast: bool,
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
                            if fail_fast && worst != Code::Done {
                                return Ok(worst);
                            }
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
