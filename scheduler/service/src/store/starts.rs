//! Start of tasks that waited for their predecessors or for their time. The sweep reads the edges that were marked since
//! the last one, and the queued tasks whose time has come, so its cost does not depend on the number of waiting tasks.
//! Each task is processed in its own leader transaction, which computes the task's state again under the lock on its row.

use cfq_proto::ids::TaskId;
use cfq_proto::task::TaskState;
use cfq_scheduler_core::{StartState, start_state};
use sqlx::PgConnection;

use super::batch::waiting_reason;
use super::columns::pg_text;
use super::dependencies::predecessors;
use super::error::Doing;
use super::hints::Hint;
use super::leader::{Leadership, lock_leader_row};
use super::tasks::{TaskRow, lock_task, move_task};
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

/// Maximum number of tasks that one sweep processes; the next one continues.
const MAX_TASKS_PER_SWEEP: i64 = 200;

impl Store {
    /// Computes the states of tasks of which a predecessor has ended or was replaced, or whose time has come, after
    /// raising the tasks for which many new ones wait.
    pub async fn sweep_starts(&self, leadership: Leadership) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query_scalar!(
            r#"select id as "id!" from (
                   (select distinct task as id from task_dependencies where due and task <> all($1)
                    order by task limit $2)
                   union
                   (select id from tasks where state = 'queued' and run_at <= now() and id <> all($1)
                    order by run_at limit $2)
               ) as due order by id"#,
            &self.shared.row_backoff.rows(),
            MAX_TASKS_PER_SWEEP
        )
        .fetch_all(&self.pool);
        let due = limited("finding tasks that may start", async { found.await.doing("finding tasks that may start") })
            .await?;
        let mut hints = match self.raise_bottlenecks(leadership, &due).await {
            Ok(hints) => hints,
            Err(error @ StoreError::NotLeader { .. }) => return Err(error),
            // The tasks start with their own priority.
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "bottlenecks not raised");
                vec![]
            }
        };
        hints.extend(self.compute_starts(leadership, due).await?);
        Ok(hints)
    }

    /// Computes the states of blocked tasks that wait for nothing. There are none, unless the database was changed by an
    /// earlier version of cfq or by hand; so the leader does this only now and then.
    pub async fn repair_blocked_tasks(&self, leadership: Leadership) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query_scalar!(
            r#"select id from tasks where state = 'blocked' and id <> all($1)
                 and not exists (select from task_dependencies d join tasks p on p.id = d.predecessor
                                 where d.task = tasks.id and p.state not in ('merged', 'accepted', 'reviewed'))
               order by number limit $2"#,
            &self.shared.row_backoff.rows(),
            MAX_TASKS_PER_SWEEP
        )
        .fetch_all(&self.pool);
        let blocked = limited("finding blocked tasks", async { found.await.doing("finding blocked tasks") }).await?;
        self.compute_starts(leadership, blocked).await
    }

    async fn compute_starts(&self, leadership: Leadership, tasks: Vec<uuid::Uuid>) -> Result<Vec<Hint>, StoreError> {
        let mut hints = Vec::new();
        for task in tasks {
            let computed = limited("starting a task", self.compute_start(leadership, TaskId(task))).await;
            hints.extend(self.skip_faulty_row("task", task, computed)?);
        }
        Ok(hints)
    }

    async fn compute_start(&self, leadership: Leadership, task: TaskId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, vec![]).await };
        // Before the states are read: a predecessor that ends afterwards marks its edge again.
        sqlx::query!("update task_dependencies set due = false where task = $1 and due", task.id.0)
            .execute(&mut *tx)
            .await
            .doing("starting a task")?;
        let hints = match task.state {
            TaskState::Queued | TaskState::Blocked => apply_start(&mut tx, &task).await?,
            // A paused task is computed when it is resumed; the others have started or ended.
            TaskState::Ready
            | TaskState::Running
            | TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated
            | TaskState::Merged
            | TaskState::Accepted
            | TaskState::Reviewed
            | TaskState::Failed
            | TaskState::Cancelled => vec![],
        };
        cfq_link::failpoint::hit("scheduler.start.before_commit");
        tx.commit().await.doing("starting a task")?;
        cfq_link::failpoint::hit("scheduler.start.after_commit");
        Ok(hints)
    }
}

/// The state in which a locked task waits, and the reason for users.
pub(super) async fn start_of(connection: &mut PgConnection, task: TaskId) -> Result<(StartState, String), StoreError> {
    let run_at = sqlx::query!(
        r#"select extract(epoch from run_at)::bigint as run_at_s, coalesce(run_at <= now(), true) as "is_past!"
           from tasks where id = $1"#,
        task.0
    )
    .fetch_one(&mut *connection)
    .await
    .doing("starting a task")?;
    let start = start_state(&predecessors(connection, task).await?, run_at.is_past);
    let reason = waiting_reason(&start, run_at.run_at_s);
    Ok((start, reason))
}

/// Gives a locked task that waits the state that follows from its predecessors.
async fn apply_start(connection: &mut PgConnection, task: &TaskRow) -> Result<Vec<Hint>, StoreError> {
    let (start, reason) = start_of(&mut *connection, task.id).await?;
    if start.state() == task.state {
        sqlx::query!(
            "update tasks set reason = $2, updated_at = now() where id = $1 and reason <> $2",
            task.id.0,
            pg_text(&reason)
        )
        .execute(connection)
        .await
        .doing("recording why a task waits")?;
        return Ok(vec![]);
    }
    let moved = move_task(connection, task, start.state(), &reason).await?;
    Ok(if moved && start.state() == TaskState::Ready { vec![Hint::TaskReady] } else { vec![] })
}
