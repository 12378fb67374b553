//! A task that is taken from its runner: ready again, or at its end if that went on too often without a step between.
//!
//! The end is a step like any other, so that whoever reads the task finds why, and what there is stays usable: a hand-off is
//! held for a human, a task with a result escalates, and only one that has nothing fails.

use cfq_convergence::{History, abandoned};
use cfq_proto::event::EventBody;
use cfq_proto::looping::{LoopState, Step};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::events::append;
use super::hint::Hint;
use super::tasks::{TaskRow, cancel_jobs, move_task};
use super::{Store, StoreError, effects, steps};

/// A runner that beats and gets no further (a mount that hangs) will most likely not the next time either, and each time
/// costs a whole `task_step_ms`.
const STUCK_COUNTS: i32 = 3;

/// How a runner lost its task.
pub(super) enum Lost {
    /// In words that follow its name.
    Gone(String),
    /// It beats, and completed nothing for this long.
    Stuck { ms: u64 },
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gone(why) => f.write_str(why),
            Self::Stuck { ms } => write!(f, "beats but got no step done in {} s", ms / 1000),
        }
    }
}

pub(super) async fn take_back(
    connection: &mut PgConnection,
    task: &TaskRow,
    why: &Lost,
    max_losses: i32,
) -> Result<Vec<Hint>, StoreError> {
    let weight = match why {
        Lost::Gone(_) => 1,
        Lost::Stuck { .. } => STUCK_COUNTS,
    };
    let losses = task.losses.saturating_add(weight);
    sqlx::query!("update tasks set losses = $2 where id = $1", task.id.0, losses)
        .execute(&mut *connection)
        .await
        .doing("counting a loss")?;
    let runner = task.runner.as_ref().map(ToString::to_string).unwrap_or_default();
    let lost = EventBody::RunnerChanged { runner: runner.clone(), attempt: task.attempt, what: format!("lost: {why}") };
    append(connection, task.id, &lost).await?;
    let mut hints = Vec::new();
    if losses > max_losses {
        let reason = format!("no runner got any further with this task ({runner} last, which {why})");
        hints.extend(end(connection, task, reason).await?);
    } else {
        move_task(connection, task, TaskState::Ready, &format!("{runner} {why}")).await?;
        hints.push(Hint::WorkWaits);
    }
    if let (Some(runner), Some(fence)) = (task.runner.clone(), task.fence()) {
        hints.push(Hint::CancelTask { runner, fence });
    }
    Ok(hints)
}

async fn end(connection: &mut PgConnection, task: &TaskRow, reason: String) -> Result<Vec<Hint>, StoreError> {
    match history(connection, task).await? {
        Ok(history) => {
            if let Some(step) = abandoned(&history, reason.clone()) {
                match steps::write(connection, task, None, &step, history.active_ms).await? {
                    Ok(written) => return Ok(written.hints),
                    Err(illegal) => {
                        return Err(StoreError::Unreadable {
                            what: "loop",
                            text: format!("{}: {illegal}", task.number),
                        });
                    }
                }
            }
        }
        // No step follows on a record that nobody can read.
        Err(unreadable) => tracing::error!(task = %task.number, unreadable, "a task ends whose record cannot be read"),
    }
    move_task(connection, task, TaskState::Failed, &reason).await?;
    if task.has_loop() {
        sqlx::query!("update tasks set loop_state = $2 where id = $1", task.id.0, LoopState::Failed.as_str())
            .execute(&mut *connection)
            .await
            .doing("ending a loop")?;
    }
    let hints = cancel_jobs(connection, task.id, &reason).await?;
    effects::close_pr(connection, task, TaskState::Failed).await?;
    Ok(hints)
}

/// The task's history with every artifact inside, or why it cannot be read.
pub(super) async fn history(
    connection: &mut PgConnection,
    task: &TaskRow,
) -> Result<Result<History, String>, StoreError> {
    let mut records = match super::task_lease::steps(connection, task.id).await {
        Err(error) if error.spares_others() && !error.may_retry() => return Ok(Err(error.to_string())),
        records => records?,
    };
    for record in &mut records {
        if let Step::Generated { artifact } = &mut record.step {
            *artifact = match Store::carried(connection, artifact.clone()).await {
                Err(error @ StoreError::Unreadable { .. }) => return Ok(Err(error.to_string())),
                artifact => cfq_proto::blob::Carried::Inline(artifact?),
            };
        }
    }
    Ok(History::of(&records).map_err(|error| error.to_string()))
}
