//! Cancel: whatever a task is doing, it ends as cancelled, once. Against a completion, a grant or a sweep the task's row lock
//! decides who was first; the loser finds a terminal state or a stale fence.

use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::looping::Step;
use cfq_proto::task::TaskState;

use super::error::Doing;
use super::hint::Hint;
use super::tasks::{cancel_jobs, lock_task, move_task};
use super::{Store, StoreError, nothing, steps};

#[derive(Debug, Clone, PartialEq)]
pub enum Cancelled {
    Done {
        number: TaskNumber,
        hints: Vec<Hint>,
    },
    /// It was cancelled before; nothing changed.
    Already {
        number: TaskNumber,
    },
    /// It ended otherwise, or its merge has begun.
    TooLate {
        number: TaskNumber,
        state: TaskState,
        why: String,
    },
    Unknown,
}

impl Store {
    /// `by` names who, with their reason, for people.
    pub async fn cancel(&self, task: TaskId, by: &str) -> Result<Cancelled, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, Cancelled::Unknown).await };
        let number = task.number;
        match task.state {
            TaskState::Cancelled => return nothing(tx, Cancelled::Already { number }).await,
            TaskState::Merged | TaskState::Accepted | TaskState::Failed => {
                let why = format!("{number} is {} already", task.state);
                return nothing(tx, Cancelled::TooLate { number, state: task.state, why }).await;
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
                Err(why) => return nothing(tx, Cancelled::TooLate { number, state: task.state, why }).await,
            }
        } else {
            move_task(&mut tx, &task, TaskState::Cancelled, &format!("cancelled by {by}")).await?;
            hints.extend(cancel_jobs(&mut tx, task.id, "cancelled").await?);
        }
        cfq_link::failpoint::hit("scheduler.cancel.before_commit");
        tx.commit().await.doing("cancelling a task")?;
        cfq_link::failpoint::hit("scheduler.cancel.after_commit");
        if let (Some(runner), Some(fence)) = (task.runner.clone(), task.fence()) {
            hints.push(Hint::CancelTask { runner, fence });
        }
        Ok(Cancelled::Done { number, hints })
    }
}
