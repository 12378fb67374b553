//! `cfq wait TASK...`: waits until tasks have ended or need a human, for scripts.

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{TaskDetail, TaskQuery, TaskSummary};
use cfq_proto::ids::TaskKey;
use cfq_proto::label::Label;
use cfq_proto::task::TaskState;

use crate::args::WaitArgs;
use crate::commands::ls;
use crate::commands::watch::{RECONNECT_TIMEOUT, waits_for_user};
use crate::exit::{self, Code};
use crate::output::{self, Output};

/// Interval of the requests for each task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of tasks with the wanted labels: that of a page of the list.
const MAX_LABELLED: u32 = 1_000;

pub async fn run(client: &Client, out: Output, args: WaitArgs) -> anyhow::Result<Code> {
    let WaitArgs { tasks, label, fail_fast, timeout } = args;
    let print = |task: &TaskSummary| out.print(task, |task| format!("{} is {}", task.number, task.state));
    let mut waiting = Waiting { tasks, labels: label, fail_fast };
    if !waiting.labels.is_empty() {
        waiting.tasks = labelled(client, &waiting.labels).await?;
    }
    let waited = wait(client, print, &mut waiting);
    let Some(timeout) = timeout else { return waited.await };
    match tokio::time::timeout(timeout, waited).await {
        Ok(ended) => ended,
        Err(_) => {
            let message = format!("not ended in time: {}; the tasks continue", names(&waiting.tasks));
            Err(exit::CodedError { code: Code::TimedOut, message }.into())
        }
    }
}

/// Waits until a task has ended or needs a human, and prints nothing.
pub async fn until_settled(client: &Client, task: TaskKey) -> anyhow::Result<Code> {
    wait(client, |_| Ok(()), &mut Waiting { tasks: vec![task], ..Waiting::default() }).await
}

/// The tasks that are waited for.
#[derive(Default)]
struct Waiting {
    /// Those that have not settled.
    tasks: Vec<TaskKey>,
    /// Labels that all of them have; empty: they were named.
    labels: Vec<Label>,
    /// Whether the first one that does not succeed ends the wait.
    fail_fast: bool,
}

/// The tasks with these labels that count: those that have not ended, and failed ones that are not acknowledged, because
/// they may have failed just before the wait.
async fn labelled(client: &Client, labels: &[Label]) -> anyhow::Result<Vec<TaskKey>> {
    let query = |states| TaskQuery { states, labels: labels.to_vec(), limit: MAX_LABELLED, ..TaskQuery::default() };
    let open = query(open_states());
    let list = client.list_tasks(&open).await?;
    ls::check_filters(&list, &open)?;
    if list.next.is_some() {
        return Err(exit::usage(format!("more than {MAX_LABELLED} tasks with this label are open: name the tasks")));
    }
    let failed = client.list_tasks(&query(vec![TaskState::Failed])).await?.tasks;
    let tasks: Vec<TaskKey> = failed
        .iter()
        .filter(|task| !task.is_acknowledged)
        .chain(&list.tasks)
        .map(|task| TaskKey::Number(task.number))
        .collect();
    if tasks.is_empty() {
        let any = TaskQuery { limit: 1, ..query(Vec::new()) };
        if client.list_tasks(&any).await?.tasks.is_empty() {
            return Err(exit::usage(format!("no task has the label {}", output::list(labels))));
        }
    }
    Ok(tasks)
}

fn open_states() -> Vec<TaskState> {
    TaskState::ALL.into_iter().filter(|state| !state.is_terminal()).collect()
}

/// Waits, and removes the tasks from `waiting` that have settled, after `print` was called with them.
async fn wait(
    client: &Client,
    print: impl Fn(&TaskSummary) -> anyhow::Result<()>,
    waiting: &mut Waiting,
) -> anyhow::Result<Code> {
    let mut worst = Code::Done;
    let mut disconnected_since: Option<Instant> = None;
    let (all, flag) = (waiting.tasks.clone(), if waiting.fail_fast { " --fail-fast" } else { "" });
    // A task that does not exist is refused before the wait, and a server that was never reached is not waited for.
    if waiting.labels.is_empty() {
        for task in &waiting.tasks {
            client.task(*task).await?;
        }
    }
    loop {
        match settled(client, waiting).await {
            Ok(settled) => {
                disconnected_since = None;
                for (task, code) in settled {
                    print(&task)?;
                    worst = worst.worse(code);
                    let keys = [TaskKey::Number(task.number), TaskKey::Id(task.id)];
                    waiting.tasks.retain(|key| !keys.contains(key));
                    if waiting.fail_fast && worst != Code::Done {
                        return Ok(worst);
                    }
                }
            }
            Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 429 | 503, .. }) => {
                let since = *disconnected_since.get_or_insert_with(Instant::now);
                if since.elapsed() > RECONNECT_TIMEOUT {
                    return Err(exit::unreachable(format!(
                        "lost the connection to the server; the tasks are not affected: run `cfq wait {}{flag}` again \
                         when the server is back",
                        names(&all)
                    )));
                }
            }
            Err(error) => return Err(error.into()),
        }
        if waiting.tasks.is_empty() {
            return Ok(worst);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Those of the tasks that have ended or need a human, with their exit codes. Tasks with labels are read as one list.
async fn settled(client: &Client, waiting: &Waiting) -> Result<Vec<(TaskSummary, Code)>, ClientError> {
    let mut settled = Vec::new();
    if waiting.labels.is_empty() {
        for key in &waiting.tasks {
            let detail = client.task(*key).await?;
            settled.extend(code_of(&detail).map(|code| (detail.summary, code)));
        }
        return Ok(settled);
    }
    let query = TaskQuery {
        states: open_states(),
        labels: waiting.labels.clone(),
        limit: MAX_LABELLED,
        ..TaskQuery::default()
    };
    let open = client.list_tasks(&query).await?.tasks;
    for key in &waiting.tasks {
        match open.iter().find(|task| TaskKey::Number(task.number) == *key) {
            Some(task) if task.state.is_settled() => settled.push((task.clone(), exit::of_state(task.state))),
            Some(task) if task.state != TaskState::Blocked => {}
            // It may wait for a task that failed, or has ended.
            Some(_) | None => {
                let detail = client.task(*key).await?;
                settled.extend(code_of(&detail).map(|code| (detail.summary, code)));
            }
        }
    }
    Ok(settled)
}

fn names(tasks: &[TaskKey]) -> String {
    tasks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// The exit code that reports the task; `None` while it continues by itself.
fn code_of(detail: &TaskDetail) -> Option<Code> {
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
