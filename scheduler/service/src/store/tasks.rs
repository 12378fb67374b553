//! Task rows, read under a row lock. Every fenced write locks the row of its task first, and only [`move_task`] changes
//! a task's state.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{BootId, LeaseId, RunnerId, TaskId, TaskKey, TaskNumber};
use cfq_proto::loop_step::LoopState;
use cfq_proto::messages::TaskFence;
use cfq_proto::task::TaskState;
use cfq_scheduler_core::keeps_requested_pause;
use sqlx::PgConnection;

use super::columns::{parse, pg_text};
use super::dependencies::mark_dependents;
use super::error::Doing;
use super::events::append;
use super::transaction::{Committed, Tx};
use super::{Store, StoreError};

/// State of the rows of API clients' calls (`calls.rs`) in the table of tasks. It is not a [`TaskState`].
pub(super) const CALL: &str = "call";

/// A task's row, as it was when it was locked.
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
    /// Author and reason of a pause that takes effect after the running step.
    pub pause_requested: Option<String>,
    /// Whether the settings of an agent changed since it was granted.
    pub agents_changed: bool,
    /// Whether the row is a call of an API client (`calls.rs`) and not a task. Its `state` is then always `Running`.
    pub is_call: bool,
}

impl TaskRow {
    /// Whether this runner holds the task under exactly this fence.
    pub fn is_held_by(&self, runner: &RunnerId, fence: &TaskFence) -> bool {
        self.state == TaskState::Running
            && self.attempt == fence.attempt
            && self.lease == Some(fence.lease)
            && self.runner.as_ref() == Some(runner)
    }

    /// The fence of the current lease, if any.
    pub fn fence(&self) -> Option<TaskFence> {
        self.lease.map(|lease| TaskFence { task: self.id, attempt: self.attempt, lease })
    }
}

/// Locks the task until the transaction ends; `None` if there is no such task. The commit wakes the task's feeds, or the
/// handler of the call.
pub(super) async fn lock_task(tx: &mut Tx, task: TaskId) -> Result<Option<TaskRow>, StoreError> {
    let row = lock_for_progress(tx, task).await?;
    if row.as_ref().is_some_and(|row| row.is_call) {
        tx.report_change(Committed::Call(task));
    }
    Ok(row)
}

/// Locks the task as [`lock_task`], for a transaction that does not end a job. The handler of a call waits for its end
/// only, so it is not woken.
pub(super) async fn lock_for_progress(tx: &mut Tx, task: TaskId) -> Result<Option<TaskRow>, StoreError> {
    let row = sqlx::query!(
        r#"select number, state, loop_state, title, attempt, lease, runner, runner_boot, losses, next_seq, pr, active_ms,
                  threshold, pause_requested, agents_changed
           from tasks where id = $1 for update"#,
        task.0
    )
    .fetch_optional(&mut **tx)
    .await
    .doing("locking a task")?;
    let Some(r) = row else { return Ok(None) };
    let is_call = r.state == CALL;
    if !is_call {
        tx.report_change(Committed::Task(task));
    }
    Ok(Some(TaskRow {
        id: task,
        number: TaskNumber(r.number),
        state: if is_call { TaskState::Running } else { parse("task state", &r.state)? },
        loop_state: parse("loop state", &r.loop_state)?,
        title: r.title,
        attempt: r.attempt,
        lease: r.lease.map(LeaseId),
        runner: r.runner.as_deref().map(|name| parse("runner", name)).transpose()?,
        boot: r.runner_boot.map(BootId),
        losses: r.losses,
        next_seq: r.next_seq,
        pr: r.pr,
        active_ms: r.active_ms,
        threshold: r.threshold,
        pause_requested: r.pause_requested,
        agents_changed: r.agents_changed,
        is_call,
    }))
}

/// Changes the state of a locked task, and clears its lease and the request to pause it; false if the transition is
/// illegal. The time of the end is stored with a terminal state. While a human decides, the request is kept.
pub(super) async fn move_task(
    connection: &mut PgConnection,
    task: &TaskRow,
    to: TaskState,
    reason: &str,
) -> Result<bool, StoreError> {
    if !cfq_scheduler_core::task_transition_allowed(task.state, to) {
        tracing::warn!(task = %task.number, from = %task.state, %to, "refused an illegal state transition");
        return Ok(false);
    }
    let reason = pg_text(reason);
    sqlx::query!(
        r#"update tasks set state = $2, reason = $3, lease = null, lease_expires = null, agents_changed = false,
                  pause_requested = case when $5 then pause_requested end, updated_at = now(), ended_at = case when $4 then now() end
           where id = $1"#,
        task.id.0,
        to.as_str(),
        reason,
        to.is_terminal(),
        keeps_requested_pause(to)
    )
    .execute(&mut *connection)
    .await
    .doing("changing a task's state")?;
    if to.is_terminal() {
        mark_dependents(connection, task.id).await?;
    }
    append(connection, task.id, &EventBody::TaskStateChanged { from: task.state, to, reason }).await?;
    Ok(true)
}

impl Store {
    /// The id of a task, by its number or id; `None` if there is no such task.
    pub async fn find_task(&self, key: TaskKey) -> Result<Option<TaskId>, StoreError> {
        let found = match key {
            TaskKey::Number(number) => {
                sqlx::query_scalar!("select id from tasks where number = $1 and state <> 'call'", number.0)
                    .fetch_optional(&self.pool)
                    .await
            }
            TaskKey::Id(id) => {
                sqlx::query_scalar!("select id from tasks where id = $1 and state <> 'call'", id.0)
                    .fetch_optional(&self.pool)
                    .await
            }
        };
        Ok(found.doing("finding a task")?.map(TaskId))
    }
}
