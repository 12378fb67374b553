//! Taking a task back from a runner that is lost, stalled or gave up. The task becomes ready again, or ends if it was
//! taken back too often without a committed step in between.
//!
//! The task ends by a step of its loop, so that its record shows the reason and its results stay usable: a hand-off is
//! held for a human, a task with a result escalates, and only a task without any result fails.

use cfq_convergence::{History, abandoned};
use cfq_proto::blob::Payload;
use cfq_proto::event::{EventBody, RunnerChange};
use cfq_proto::loop_step::{LoopState, Step};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::events::append;
use super::hints::{Hint, for_cancelled_task};
use super::jobs::cancel_jobs;
use super::tasks::{TaskRow, move_task};
use super::{StoreError, effects, pause, payload, steps};

/// Number of losses that one stall counts as. A runner that stalls (for example on a mount that hangs) will most likely
/// stall again, and each try costs a whole `task_step_timeout_ms`.
const LOSSES_PER_STALL: i32 = 3;

/// Maximum number of grants in a row that no runner receives. They are no losses, because the task is not their cause;
/// but without a limit, a task whose grant cannot be delivered would never end. The limit is high, because a runner that
/// receives nothing may ask for the same task again and again while another runner is busy.
const MAX_UNRECEIVED_GRANTS: i32 = 20;

/// Why a task is taken back from its runner. Its display text continues a sentence that starts with the runner's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RunnerLoss {
    /// A later boot of the runner registered, and the machine was not restarted in between.
    Restarted,
    /// The runner's machine was restarted.
    MachineRestarted,
    /// The lease expired before the first heartbeat that lists it: the runner did not receive the grant.
    NotReceived,
    /// The lease expired, because no heartbeat of the runner extended it in time.
    LeaseExpired,
    /// The runner cannot continue the task, for the given reason.
    Abandoned { reason: String },
    /// The runner sent heartbeats but committed no step for `ms`.
    Stalled { ms: u64 },
}

impl std::fmt::Display for RunnerLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Restarted => f.write_str("was restarted"),
            Self::MachineRestarted => f.write_str("was restarted together with its machine"),
            Self::NotReceived => f.write_str("did not receive the grant"),
            Self::LeaseExpired => f.write_str("did not renew its lease"),
            Self::Abandoned { reason } => write!(f, "abandoned the task: {reason}"),
            Self::Stalled { ms } => write!(f, "sent heartbeats but completed no step in {} s", ms / 1000),
        }
    }
}

/// Counts the loss of a locked task's runner, unless the task cannot be its cause, and makes the task ready again, or
/// pauses it if that was requested. Ends the task instead if the count exceeds `max_losses`, or after too many grants that no runner received.
pub(super) async fn reclaim(
    connection: &mut PgConnection,
    task: &TaskRow,
    loss: &RunnerLoss,
    max_losses: i32,
) -> Result<Vec<Hint>, StoreError> {
    let weight = match loss {
        // The task cannot be the cause.
        RunnerLoss::MachineRestarted | RunnerLoss::NotReceived => 0,
        RunnerLoss::Restarted | RunnerLoss::LeaseExpired | RunnerLoss::Abandoned { .. } => 1,
        RunnerLoss::Stalled { .. } => LOSSES_PER_STALL,
    };
    let losses = task.losses.saturating_add(weight);
    let unreceived = sqlx::query_scalar!(
        "update tasks set losses = $2, unreceived = unreceived + $3 where id = $1 returning unreceived",
        task.id.0,
        losses,
        i32::from(*loss == RunnerLoss::NotReceived)
    )
    .fetch_one(&mut *connection)
    .await
    .doing("counting a loss")?;
    let runner = task.runner.as_ref().map(ToString::to_string).unwrap_or_default();
    let change = RunnerChange::Lost { reason: loss.to_string() };
    let lost = EventBody::RunnerChanged { runner: runner.clone(), attempt: task.attempt, change };
    append(connection, task.id, &lost).await?;
    let mut hints = Vec::new();
    if losses > max_losses {
        let reason = format!("no runner made progress on this task; the last runner, {runner}, {loss}");
        hints.extend(end_task(connection, task, &reason).await?);
    } else if unreceived > MAX_UNRECEIVED_GRANTS {
        let reason = format!(
            "no runner received this task, although it was granted {unreceived} times; the last runner, {runner}, {loss}. \
             Look for errors in the log of that runner, then submit or continue the task"
        );
        hints.extend(end_task(connection, task, &reason).await?);
    } else {
        hints.extend(pause::make_ready(connection, task, &format!("{runner} {loss}")).await?);
    }
    hints.extend(for_cancelled_task(task));
    Ok(hints)
}

async fn end_task(connection: &mut PgConnection, task: &TaskRow, reason: &str) -> Result<Vec<Hint>, StoreError> {
    match history(connection, task).await? {
        Ok(history) => {
            if let Some(step) = abandoned(&history, reason.to_owned()) {
                match steps::write(connection, task, None, &step, history.active_ms).await? {
                    Ok(written) => return Ok(written.hints),
                    Err(rejection) => {
                        return Err(StoreError::Unreadable {
                            what: "loop",
                            text: format!("{}: {rejection}", task.number),
                        });
                    }
                }
            }
        }
        // No step can be appended to steps that cannot be read.
        Err(unreadable) => {
            tracing::error!(task = %task.number, unreadable, "unreadable steps; the task fails without a final step");
        }
    }
    move_task(connection, task, TaskState::Failed, reason).await?;
    if task.has_loop() {
        sqlx::query!("update tasks set loop_state = $2 where id = $1", task.id.0, LoopState::Failed.as_str())
            .execute(&mut *connection)
            .await
            .doing("ending a loop")?;
    }
    let hints = cancel_jobs(connection, task, reason).await?;
    effects::close_pr(connection, task, TaskState::Failed).await?;
    Ok(hints)
}

/// The task's history with every artifact loaded, or why it cannot be read.
pub(super) async fn history(
    connection: &mut PgConnection,
    task: &TaskRow,
) -> Result<Result<History, String>, StoreError> {
    let mut records = match steps::committed_steps(connection, task.id).await {
        Err(error) if error.is_row_local() && !error.may_retry() => return Ok(Err(error.to_string())),
        records => records?,
    };
    for record in &mut records {
        if let Step::Generated { artifact } = &mut record.step {
            *artifact = match payload::load(connection, artifact.clone()).await {
                Err(error @ StoreError::Unreadable { .. }) => return Ok(Err(error.to_string())),
                artifact => Payload::Inline(artifact?),
            };
        }
    }
    Ok(History::of(&records).map_err(|error| error.to_string()))
}
