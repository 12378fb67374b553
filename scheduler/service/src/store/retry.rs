//! Retries of ended tasks. A terminal state never changes, so a retry creates a new task with the same specification and
//! `retry_of`. A task is retried once: a repeated request, whose first reply may have been lost, finds the new task.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::{Priority, TaskSpec, TaskState};
use sqlx::types::Json;

use super::columns::AsJson;
use super::error::Doing;
use super::events::append;
use super::tasks::lock_task;
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
    /// it.
    pub async fn retry(&self, task: TaskId, run: Run) -> Result<RetryOutcome, StoreError> {
        let mut tx = self.begin().await?;
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
            | TaskState::Merged => return roll_back(tx, RetryOutcome::Refused { number, state }).await,
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
        let old =
            sqlx::query!(r#"select spec as "spec: Json<TaskSpec>", priority from tasks where id = $1"#, task.id.0)
                .fetch_one(&mut *tx)
                .await
                .doing("reading a task")?;
        let mut spec = old.spec.0;
        spec.priority = Priority::try_from(old.priority)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: old.priority.to_string() })?;
        let now_s = now_ms(&mut tx).await? / 1000;
        spec.deadline = spec.deadline.filter(|deadline| *deadline > now_s);
        let id = TaskId::fresh();
        let new = sqlx::query_scalar!(
            r#"insert into tasks (id, body_hash, spec, title, priority, deadline, state, threshold, max_iterations, order_key,
                                  retry_of)
               select $2, body_hash, $3, title, priority, due, 'ready', threshold, max_iterations,
                      greatest(key - interval '10 minutes', least(key, due - interval '10 minutes')), id
               from (select *, now() + priority * interval '10 minutes' as key, to_timestamp($4::bigint::float8) as due
                     from tasks) as old
               where id = $1 returning number"#,
            task.id.0,
            id.0,
            AsJson(&spec) as _,
            spec.deadline
        )
        .fetch_one(&mut *tx)
        .await
        .doing("writing a task")?;
        append(&mut tx, id, &EventBody::TaskSubmitted).await?;
        tx.report(id);
        cfq_link::failpoint::hit("scheduler.retry.before_commit");
        tx.finish(run, "retrying a task").await?;
        cfq_link::failpoint::hit("scheduler.retry.after_commit");
        Ok(RetryOutcome::Done { number, state, new: Some((id, TaskNumber(new))) })
    }
}
