//! Submission of a task. The submission is acknowledged after the task's row and first event are committed. Submissions
//! with the same idempotency key create only one task.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::{TaskSpec, TaskState};

use super::columns::{AsJson, parse};
use super::error::Doing;
use super::events::append;
use super::{Store, StoreError};

/// A validated task with every default filled in.
#[derive(Debug, Clone)]
pub struct NewTask {
    pub id: TaskId,
    pub spec: TaskSpec,
    pub title: String,
    pub threshold: f64,
    pub max_iterations: u32,
    /// Idempotency key of the submission, if the client sent one.
    pub key: Option<String>,
    /// Hash of the client's request body: the same key with another body is an error.
    pub body_hash: String,
}

/// Result of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    Created {
        id: TaskId,
        number: TaskNumber,
    },
    /// An earlier submission with the same idempotency key created this task.
    Existing {
        id: TaskId,
        number: TaskNumber,
        state: TaskState,
    },
    /// An earlier submission with the same idempotency key had another request body.
    KeyReused {
        number: TaskNumber,
    },
    /// The deadline of the new task has passed already; nothing was written.
    TooLate,
}

impl Store {
    /// Creates a task, or finds the task that an earlier submission with the same idempotency key created.
    pub async fn submit(&self, new: &NewTask) -> Result<Submitted, StoreError> {
        let mut tx = self.begin().await?;
        let number = sqlx::query_scalar!(
            r#"insert into tasks (id, idempotency_key, body_hash, spec, title, priority, deadline, state, threshold, max_iterations)
               select $1, $2, $3, $4, $5, $6, to_timestamp($7::bigint::float8), 'ready', $8, $9
               where coalesce(to_timestamp($7::bigint::float8) > now(), true)
               on conflict (idempotency_key) do nothing returning number"#,
            new.id.0,
            new.key,
            new.body_hash,
            AsJson(&new.spec) as _,
            new.title,
            new.spec.priority.as_i16(),
            new.spec.deadline,
            new.threshold,
            i32::try_from(new.max_iterations).unwrap_or(i32::MAX)
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("writing a task")?;
        let Some(number) = number else {
            drop(tx);
            return self.find_by_key(new).await;
        };
        append(&mut tx, new.id, &EventBody::TaskSubmitted).await?;
        cfq_link::failpoint::hit("scheduler.submit.before_commit");
        tx.commit().await.doing("committing a task")?;
        cfq_link::failpoint::hit("scheduler.submit.after_commit");
        Ok(Submitted::Created { id: new.id, number: TaskNumber(number) })
    }

    /// Finds the task that an earlier submission with the idempotency key of `new` created. [`Submitted::TooLate`] if
    /// there is none. Writes nothing.
    pub async fn find_by_key(&self, new: &NewTask) -> Result<Submitted, StoreError> {
        let row = sqlx::query!(
            "select id, number, state, body_hash from tasks where idempotency_key = $1",
            new.key.as_deref()
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the task of an idempotency key")?;
        // No row means that the key has no task yet and that the deadline of the new task has passed. An existing task
        // is returned even after its deadline.
        let Some(row) = row else { return Ok(Submitted::TooLate) };
        let number = TaskNumber(row.number);
        if row.body_hash != new.body_hash {
            return Ok(Submitted::KeyReused { number });
        }
        Ok(Submitted::Existing { id: TaskId(row.id), number, state: parse("task state", &row.state)? })
    }
}
