//! Wall-clock deadlines of tasks, separate from the limit on working time. The leader checks them by the database's
//! clock: a runner's clock may be wrong, and a task that no runner holds has a deadline too.
//!
//! When the deadline has passed, a task whose loop would call a model next escalates with its results so far (L1:
//! timeout). A task that no runner has started yet has no loop that could escalate, and fails, whether it waits for a
//! runner, for its time or for other tasks. If a user answers an escalation after the deadline, the deadline no longer
//! applies, because the user knew that it had passed. Ending an overdue task races with the runner's own steps for the
//! lock on the task's row, as a cancel does; the later of the two finds a stale fence.

use cfq_convergence::overdue;
use cfq_proto::ids::TaskId;
use cfq_proto::loop_step::{LoopState, Step};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::hints::{Hint, for_cancelled_task};
use super::jobs::cancel_jobs;
use super::leader::{Leadership, lock_leader_row};
use super::reclaim;
use super::tasks::{TaskRow, lock_task, move_task};
use super::time_limit::limited;
use super::{Store, StoreError, roll_back, steps};

impl Store {
    /// Escalates or fails the tasks whose deadline has passed. A task that cannot be read does not stop this for the
    /// other tasks.
    pub async fn sweep_deadlines(&self, leadership: Leadership) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query_scalar!(
            r#"select id from tasks
               where deadline <= now() and state in ('queued', 'blocked', 'ready', 'running')
                 and loop_state in ('idle', 'generating', 'reviewing', 'revising')
                 and not exists (select from questions where task = tasks.id and answered_at >= tasks.deadline)
               order by id"#
        )
        .fetch_all(&self.pool);
        let due = limited("finding passed deadlines", async { found.await.doing("finding passed deadlines") }).await?;
        let mut hints = Vec::new();
        for task in due.into_iter().map(TaskId) {
            let ended = limited("ending an overdue task", self.end_overdue(leadership, task)).await;
            hints.extend(self.skip_faulty_row("task", task.0, ended)?);
        }
        Ok(hints)
    }

    pub(super) async fn end_overdue(&self, leadership: Leadership, task: TaskId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, vec![]).await };
        // A user may have answered an escalation since the query.
        if !is_overdue(&mut tx, task.id).await? {
            return roll_back(tx, vec![]).await;
        }
        let is_held = match task.state {
            TaskState::Queued | TaskState::Blocked | TaskState::Ready => false,
            TaskState::Running => true,
            // The state changed since the query.
            TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated
            | TaskState::Merged
            | TaskState::Accepted
            | TaskState::Reviewed
            | TaskState::Failed
            | TaskState::Cancelled => return roll_back(tx, vec![]).await,
        };
        let ended = match task.loop_state {
            LoopState::Idle if is_held => None,
            LoopState::Idle => {
                let reason = "the deadline passed before a runner started the task; \
                              submit the task again with a later deadline";
                move_task(&mut tx, &task, TaskState::Failed, reason).await?;
                Some(cancel_jobs(&mut tx, &task, reason).await?)
            }
            LoopState::Generating | LoopState::Reviewing | LoopState::Revising => escalate(&mut tx, &task).await?,
            LoopState::Converged | LoopState::Escalated | LoopState::Failed => None,
        };
        let Some(hints) = ended else { return roll_back(tx, vec![]).await };
        tx.commit().await.doing("ending an overdue task")?;
        Ok(hints)
    }
}

/// Whether the deadline has passed, and no answer after it ended it.
async fn is_overdue(connection: &mut PgConnection, task: TaskId) -> Result<bool, StoreError> {
    let overdue = sqlx::query_scalar!(
        r#"select exists (select from tasks where id = $1 and deadline <= now()
                          and not exists (select from questions
                                          where task = tasks.id and answered_at >= tasks.deadline)) as "overdue!""#,
        task.0
    );
    overdue.fetch_one(connection).await.doing("reading a deadline")
}

/// Writes the escalation step of an overdue task. `None` if the next action of the loop is not a model call: the loop
/// first decides on the existing results.
async fn escalate(connection: &mut PgConnection, task: &TaskRow) -> Result<Option<Vec<Hint>>, StoreError> {
    let unreadable = |text: String| StoreError::Unreadable { what: "step", text };
    let history = reclaim::history(connection, task).await?.map_err(unreadable)?;
    let Some(decided) = overdue(&history) else { return Ok(None) };
    let step = Step::Decided { iteration: history.current_iteration(), decided };
    match steps::write(connection, task, None, &step, history.active_ms).await? {
        Ok(written) => {
            let mut hints = written.hints;
            hints.extend(for_cancelled_task(task));
            Ok(Some(hints))
        }
        Err(rejection) => Err(unreadable(rejection.to_string())),
    }
}
