//! The task row under its lock: what every fenced write looks at first, and the one way a task's state changes.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, RunnerId, TaskId, TaskKey, TaskNumber};
use cfq_proto::looping::LoopState;
use cfq_proto::messages::{JobFence, TaskFence};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::{Doing, plain, read};
use super::events::append;
use super::hint::{Hint, LeaderHint};
use super::{Store, StoreError};

#[derive(Debug, Clone)]
pub(super) struct TaskRow {
    pub id: TaskId,
    pub number: TaskNumber,
    pub state: TaskState,
    pub loop_state: LoopState,
    pub title: String,
    pub attempt: i32,
    pub lease: Option<LeaseId>,
    pub runner: Option<RunnerId>,
    pub boot: Option<BootId>,
    pub losses: i32,
    pub next_seq: i32,
    pub pr: Option<i64>,
    pub active_ms: i64,
    pub threshold: f64,
}

impl TaskRow {
    /// Running under exactly this fence, held by this runner.
    pub fn is_held_by(&self, runner: &RunnerId, fence: &TaskFence) -> bool {
        self.state == TaskState::Running
            && self.attempt == fence.attempt
            && self.lease == Some(fence.lease)
            && self.runner.as_ref() == Some(runner)
    }

    pub fn fence(&self) -> Option<TaskFence> {
        self.lease.map(|lease| TaskFence { task: self.id, attempt: self.attempt, lease })
    }
}

/// The task, locked until the transaction ends.
pub(super) async fn lock_task(connection: &mut PgConnection, task: TaskId) -> Result<Option<TaskRow>, StoreError> {
    let row = sqlx::query!(
        r#"select number, state, loop_state, title, attempt, lease, runner, runner_boot, losses, next_seq, pr, active_ms,
                  threshold
           from tasks where id = $1 for update"#,
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("locking a task")?;
    let Some(r) = row else { return Ok(None) };
    Ok(Some(TaskRow {
        id: task,
        number: TaskNumber(r.number),
        state: read("task state", &r.state)?,
        loop_state: read("loop state", &r.loop_state)?,
        title: r.title,
        attempt: r.attempt,
        lease: r.lease.map(LeaseId),
        runner: r.runner.as_deref().map(|name| read("runner", name)).transpose()?,
        boot: r.runner_boot.map(BootId),
        losses: r.losses,
        next_seq: r.next_seq,
        pr: r.pr,
        active_ms: r.active_ms,
        threshold: r.threshold,
    }))
}

/// Moves a locked task, if the table of legal transitions allows it. Whatever leaves `running` leaves its lease behind.
pub(super) async fn move_task(
    connection: &mut PgConnection,
    task: &TaskRow,
    to: TaskState,
    reason: &str,
) -> Result<bool, StoreError> {
    if !cfq_scheduler_core::legal(task.state, to) {
        tracing::warn!(task = %task.number, from = %task.state, %to, "refused an illegal change of state");
        return Ok(false);
    }
    let reason = plain(reason);
    sqlx::query!(
        r#"update tasks set state = $2, reason = $3, lease = null, lease_expires = null, updated_at = now()
           where id = $1"#,
        task.id.0,
        to.as_str(),
        reason
    )
    .execute(&mut *connection)
    .await
    .doing("changing a task's state")?;
    append(connection, task.id, &EventBody::TaskStateChanged { from: task.state, to, reason }).await?;
    Ok(true)
}

/// Ends the jobs of a locked task that still wait or run: nobody will ask for them any more.
pub(super) async fn cancel_jobs(
    connection: &mut PgConnection,
    task: TaskId,
    why: &str,
) -> Result<Vec<Hint>, StoreError> {
    let live = sqlx::query!(
        r#"select id, attempt, lease, node from jobs
           where task = $1 and state in ('queued', 'placed', 'running') order by id for update"#,
        task.0
    )
    .fetch_all(&mut *connection)
    .await
    .doing("finding a task's jobs")?;
    let mut hints = Vec::new();
    for job in live {
        let id = JobId(job.id);
        super::jobs::cancel(connection, task, id, why).await?;
        hints.push(Hint::Leader(LeaderHint::Job(id)));
        if let (Some(lease), Some(node)) = (job.lease, job.node) {
            let node: NodeId = read("node", &node)?;
            hints.push(Hint::CancelJob {
                node,
                fence: JobFence { job: id, attempt: job.attempt, lease: LeaseId(lease) },
            });
        }
    }
    Ok(hints)
}

impl Store {
    pub async fn find_task(&self, key: TaskKey) -> Result<Option<TaskId>, StoreError> {
        let found = match key {
            TaskKey::Number(number) => {
                sqlx::query_scalar!("select id from tasks where number = $1", number.0).fetch_optional(&self.pool).await
            }
            TaskKey::Id(id) => {
                sqlx::query_scalar!("select id from tasks where id = $1", id.0).fetch_optional(&self.pool).await
            }
        };
        Ok(found.doing("finding a task")?.map(TaskId))
    }
}
