//! Retries of ended tasks. A terminal state never changes, so a retry creates a new task with the same specification and
//! `retry_of`. A task is retried once: a repeated request, whose first reply may have been lost, finds the new task.

use cfq_proto::ids::{ApiTokenId, TaskId, TaskKey, TaskNumber};
use cfq_proto::task::{Priority, TaskSpec, TaskState};
use cfq_proto::task_ref::TaskRef;
use cfq_scheduler_core::start_state;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::acknowledge::acknowledge_failure;
use super::agent_settings::parse_agents;
use super::batch::insert_task;
use super::dependencies::{insert_edges, lock_predecessors, lock_retries, take_over_edges};
use super::error::Doing;
use super::submit::NewTask;
use super::tasks::{TaskRow, lock_task};
use super::transaction::Run;
use super::{Store, StoreError, now_ms, roll_back};

/// Result of a retry.
#[derive(Debug, Clone, PartialEq)]
pub enum RetryOutcome {
    /// The new task; `None` if the retry was only tried.
    Done { number: TaskNumber, state: TaskState, new: Option<(TaskId, TaskNumber)> },
    /// The task `by` retries this task already.
    Already { number: TaskNumber, state: TaskState, by: TaskNumber },
    /// A task in this state cannot be retried.
    Refused { number: TaskNumber, state: TaskState },
    /// There is no such task.
    Unknown,
}

impl Store {
    /// Creates a task with the specification and priority of an ended one. A deadline that has passed does not apply to
    /// it. `token` is that of the request.
    pub async fn retry(&self, task: TaskId, token: ApiTokenId, run: Run) -> Result<RetryOutcome, StoreError> {
        let mut tx = self.begin().await?;
        lock_retries(&mut tx).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, RetryOutcome::Unknown).await };
        let (number, state) = (task.number, task.state);
        match state {
            TaskState::Failed | TaskState::Cancelled | TaskState::Accepted => {}
            TaskState::Queued
            | TaskState::Blocked
            | TaskState::Ready
            | TaskState::Running
            | TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated
            | TaskState::Merged
            | TaskState::Reviewed => return roll_back(tx, RetryOutcome::Refused { number, state }).await,
        }
        let retry = sqlx::query_scalar!("select number from tasks where retry_of = $1 limit 1", task.id.0)
            .fetch_optional(&mut *tx)
            .await
            .doing("finding the retry of a task")?;
        if let Some(by) = retry.map(TaskNumber) {
            return roll_back(tx, RetryOutcome::Already { number, state, by }).await;
        }
        if run == Run::Dry {
            return roll_back(tx, RetryOutcome::Done { number, state, new: None }).await;
        }
        let new = new_task(&mut tx, &task, token).await?;
        let before = unfinished_predecessors(&mut tx, task.id).await?;
        let known = lock_predecessors(&mut tx, &before).await?;
        let (ids, states): (Vec<_>, Vec<_>) = before.iter().filter_map(|key| known.find(*key)).unzip();
        if ids.len() < before.len() {
            // Deleted meanwhile; the next try reads the rest.
            return roll_back(tx, RetryOutcome::Unknown).await;
        }
        let start = start_state(&states, true);
        let Some(new_number) = insert_task(&mut tx, &new, &start, Some(task.id), None).await? else {
            return roll_back(tx, RetryOutcome::Unknown).await;
        };
        insert_edges(&mut tx, new.id, &ids).await?;
        // The priority is that of the old task, which may have been raised before.
        sqlx::query!(
            "update tasks set is_bottleneck = old.is_bottleneck from tasks old where tasks.id = $1 and old.id = $2",
            new.id.0,
            task.id.0
        )
        .execute(&mut *tx)
        .await
        .doing("writing a task")?;
        acknowledge_failure(&mut tx, task.id).await?;
        // Tasks that waited for an accepted result have it.
        if state != TaskState::Accepted {
            take_over_edges(&mut tx, task.id, new.id).await?;
        }
        tx.report(new.id);
        cfq_link::failpoint::hit("scheduler.retry.before_commit");
        tx.finish(run, "retrying a task").await?;
        cfq_link::failpoint::hit("scheduler.retry.after_commit");
        Ok(RetryOutcome::Done { number, state, new: Some((new.id, new_number)) })
    }
}

/// A task with the specification and priority of an ended one. A deadline that has passed does not apply to it, and
/// neither does the earliest start.
async fn new_task(connection: &mut PgConnection, task: &TaskRow, token: ApiTokenId) -> Result<NewTask, StoreError> {
    let old = sqlx::query!(
        r#"select spec as "spec: Json<TaskSpec>", priority, body_hash, max_iterations, agents_without_model from tasks where id = $1"#,
        task.id.0
    )
    .fetch_one(&mut *connection)
    .await
    .doing("reading a task")?;
    let mut spec = old.spec.0;
    spec.priority = Priority::try_from(old.priority)
        .map_err(|_| StoreError::Unreadable { what: "priority", text: old.priority.to_string() })?;
    let now_s = now_ms(connection).await? / 1000;
    spec.deadline = spec.deadline.filter(|deadline| *deadline > now_s);
    (spec.run_at, spec.name, spec.retry_of) = (None, None, Some(TaskRef::Key(TaskKey::Id(task.id))));
    spec.after.clear();
    Ok(NewTask {
        id: TaskId::fresh(),
        token,
        title: task.title.clone(),
        threshold: task.threshold,
        max_iterations: u32::try_from(old.max_iterations).unwrap_or(u32::MAX),
        spec,
        agents_without_model: parse_agents(&old.agents_without_model)?,
        key: None,
        body_hash: old.body_hash,
    })
}

/// Predecessors that have not ended as merged or accepted, or their newest retries. The retry takes the place of the
/// task, so that it waits for them too.
async fn unfinished_predecessors(connection: &mut PgConnection, task: TaskId) -> Result<Vec<TaskKey>, StoreError> {
    let ids = sqlx::query_scalar!(
        r#"with recursive newest (id) as (
               select p.id from task_dependencies d join tasks p on p.id = d.predecessor
               where d.task = $1 and p.state not in ('merged', 'accepted', 'reviewed')
               union
               select r.id from newest n join tasks r on r.retry_of = n.id
           )
           select n.id as "id!" from newest n join tasks t on t.id = n.id
           where not exists (select from tasks r where r.retry_of = n.id) order by t.number"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("reading the predecessors of a task")?;
    Ok(ids.into_iter().map(|id| TaskKey::Id(TaskId(id))).collect())
}
