//! Wall-clock deadlines of tasks, apart from the limit of working time. The leader judges them, by the database's clock: a
//! runner's clock may be wrong, and a task that no runner holds has a deadline too.
//!
//! A task whose loop would ask a model next escalates with what is there (L1: timeout). One that nobody has begun has no
//! loop to escalate, and fails. An answer to an escalation that comes after the deadline lifts it: whoever gives it knows
//! the time. Like a cancel, all this races with the runner's own steps for the task's row, and the loser is stale.

use cfq_convergence::overdue;
use cfq_proto::ids::TaskId;
use cfq_proto::looping::{LoopState, Step};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::hint::Hint;
use super::leader::{Leadership, hold_lead};
use super::take_back;
use super::tasks::{TaskRow, cancel_jobs, lock_task, move_task};
use super::{Store, StoreError, nothing, steps};

impl Store {
    /// Ends the waiting and the work of tasks whose deadline has passed. One that cannot be read keeps no other from its end.
    pub async fn sweep_deadlines(&self, lead: Leadership) -> Result<Vec<Hint>, StoreError> {
        let due = sqlx::query_scalar!(
            r#"select id from tasks
               where deadline <= now() and state in ('ready', 'running')
                 and loop_state in ('idle', 'generating', 'reviewing', 'revising')
                 and not exists (select from questions where task = tasks.id and answered_at >= tasks.deadline)
               order by id"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding passed deadlines")?;
        let mut hints = Vec::new();
        for task in due.into_iter().map(TaskId) {
            let passed = self.pass_deadline(lead, task).await;
            hints.extend(self.swept("task", task.0, passed)?);
        }
        Ok(hints)
    }

    async fn pass_deadline(&self, lead: Leadership, task: TaskId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, vec![]).await };
        let held = match task.state {
            TaskState::Ready => false,
            TaskState::Running => true,
            // It changed since it was found.
            TaskState::Queued
            | TaskState::Blocked
            | TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated
            | TaskState::Merged
            | TaskState::Accepted
            | TaskState::Failed
            | TaskState::Cancelled => return nothing(tx, vec![]).await,
        };
        let ended = match task.loop_state {
            LoopState::Idle if held => None,
            LoopState::Idle => {
                let why = "its deadline passed before a runner began it; submit it anew with a later one";
                move_task(&mut tx, &task, TaskState::Failed, why).await?;
                Some(cancel_jobs(&mut tx, task.id, why).await?)
            }
            LoopState::Generating | LoopState::Reviewing | LoopState::Revising => escalated(&mut tx, &task).await?,
            LoopState::Converged | LoopState::Escalated | LoopState::Failed => None,
        };
        let Some(hints) = ended else { return nothing(tx, vec![]).await };
        tx.commit().await.doing("passing a deadline")?;
        Ok(hints)
    }
}

/// Writes the escalation; `None` where no model is asked next, so that what is there is decided first.
async fn escalated(connection: &mut PgConnection, task: &TaskRow) -> Result<Option<Vec<Hint>>, StoreError> {
    let unreadable = |text: String| StoreError::Unreadable { what: "step", text };
    let history = take_back::history(connection, task).await?.map_err(unreadable)?;
    let Some(decided) = overdue(&history) else { return Ok(None) };
    let step = Step::Decided { iteration: history.current_iteration(), decided };
    match steps::write(connection, task, None, &step, history.active_ms).await? {
        Ok(written) => {
            let mut hints = written.hints;
            hints.extend(
                task.runner.clone().zip(task.fence()).map(|(runner, fence)| Hint::CancelTask { runner, fence }),
            );
            Ok(Some(hints))
        }
        Err(why) => Err(unreadable(why)),
    }
}
