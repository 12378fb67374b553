//! Cancellation of tasks: a task in any state that is not terminal ends as cancelled. When a cancel races with a
//! completion, a grant or a sweep, the lock on the task's row decides which one comes first; the later one finds a
//! terminal state or a stale fence.

use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::Step;
use cfq_proto::task::TaskState;

use super::hints::{Hint, for_cancelled_task};
use super::jobs::cancel_jobs;
use super::step_rejection::StepRejection;
use super::tasks::{lock_task, move_task};
use super::transaction::Run;
use super::{Store, StoreError, roll_back, steps};

/// Result of a cancel.
#[derive(Debug, Clone, PartialEq)]
pub enum Cancelled {
    Done {
        number: TaskNumber,
        hints: Vec<Hint>,
    },
    /// The task was cancelled before; nothing changed.
    Already {
        number: TaskNumber,
    },
    /// The task cannot be cancelled any more.
    TooLate {
        number: TaskNumber,
        state: TaskState,
        reason: TooLateReason,
    },
    /// There is no such task.
    Unknown,
}

/// Why a task cannot be cancelled any more.
#[derive(Debug, Clone, PartialEq)]
pub enum TooLateReason {
    /// The task ended in another way.
    Ended(TaskState),
    /// The loop does not allow a cancel now, for example because the merge has begun.
    Rejected(StepRejection),
}

impl Store {
    /// Cancels a task. `by` names the author and the reason; it is shown to users.
    pub async fn cancel(&self, task: TaskId, by: &str, run: Run) -> Result<Cancelled, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Cancelled::Unknown).await };
        let (number, state) = (task.number, task.state);
        match state {
            TaskState::Cancelled => return roll_back(tx, Cancelled::Already { number }).await,
            TaskState::Merged | TaskState::Accepted | TaskState::Reviewed | TaskState::Failed => {
                let reason = TooLateReason::Ended(state);
                return roll_back(tx, Cancelled::TooLate { number, state, reason }).await;
            }
            TaskState::Queued
            | TaskState::Blocked
            | TaskState::Ready
            | TaskState::Running
            | TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated => {}
        }
        let mut hints = Vec::new();
        if task.has_loop() {
            let step = Step::Cancelled { by: by.to_owned() };
            match steps::write(&mut tx, &task, None, &step, task.active_ms.max(0) as u64).await? {
                Ok(written) => hints.extend(written.hints),
                Err(rejection) => {
                    let reason = TooLateReason::Rejected(rejection);
                    return roll_back(tx, Cancelled::TooLate { number, state, reason }).await;
                }
            }
        } else {
            move_task(&mut tx, &task, TaskState::Cancelled, &format!("cancelled by {by}")).await?;
            hints.extend(cancel_jobs(&mut tx, &task, "cancelled").await?);
        }
        cfq_link::failpoint::hit("scheduler.cancel.before_commit");
        tx.finish(run, "cancelling a task").await?;
        cfq_link::failpoint::hit("scheduler.cancel.after_commit");
        hints.extend(for_cancelled_task(&task));
        Ok(Cancelled::Done { number, hints })
    }
}
