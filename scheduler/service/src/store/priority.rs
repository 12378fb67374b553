//! Changes of a task's priority. The order of grants is a column of the task; the order of its jobs is computed by the
//! planner from their rows. Both take effect at the next decision.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, TaskId, TaskNumber};
use cfq_proto::task::{Priority, TaskState};

use super::error::Doing;
use super::events::append;
use super::hints::{Hint, LeaderHint};
use super::tasks::lock_task;
use super::transaction::Run;
use super::{Store, StoreError, roll_back};

/// Result of a change of the priority.
#[derive(Debug, Clone, PartialEq)]
pub enum PriorityOutcome {
    Done {
        number: TaskNumber,
        state: TaskState,
        from: Priority,
        hints: Vec<Hint>,
    },
    /// The task has this priority already.
    Already {
        number: TaskNumber,
        state: TaskState,
    },
    /// The task has ended.
    Ended {
        number: TaskNumber,
        state: TaskState,
    },
    /// There is no such task.
    Unknown,
}

impl Store {
    /// Changes the priority of a task that has not ended, and of its jobs. `by` names the author, for users.
    pub async fn set_priority(
        &self,
        task: TaskId,
        priority: Priority,
        by: &str,
        run: Run,
    ) -> Result<PriorityOutcome, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, PriorityOutcome::Unknown).await };
        let (number, state) = (task.number, task.state);
        if state.is_terminal() {
            return roll_back(tx, PriorityOutcome::Ended { number, state }).await;
        }
        let from = sqlx::query_scalar!("select priority from tasks where id = $1", task.id.0)
            .fetch_one(&mut *tx)
            .await
            .doing("reading a task's priority")?;
        let from = Priority::try_from(from)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: from.to_string() })?;
        if from == priority {
            return roll_back(tx, PriorityOutcome::Already { number, state }).await;
        }
        // The same order as for a task that was submitted with this priority.
        sqlx::query!(
            r#"update tasks set priority = $2, order_key = greatest(key - interval '10 minutes',
                                                                    least(key, deadline - interval '10 minutes'))
               from (select greatest(created_at, run_at) + $2::smallint * interval '10 minutes' as key from tasks where id = $1) as keys
               where id = $1"#,
            task.id.0,
            priority.as_i16()
        )
        .execute(&mut *tx)
        .await
        .doing("changing a task's priority")?;
        let jobs = sqlx::query_scalar!(
            r#"update jobs set priority = $2, updated_at = now()
               where task = $1 and state in ('queued', 'placed', 'running', 'dead') returning id"#,
            task.id.0,
            priority.as_i16()
        )
        .fetch_all(&mut *tx)
        .await
        .doing("changing the priority of a task's jobs")?;
        let reason = format!("changed by {by}");
        append(&mut tx, task.id, &EventBody::PriorityChanged { from, to: priority, reason }).await?;
        tx.finish(run, "changing a task's priority").await?;
        let hints = jobs.into_iter().map(|job| Hint::Leader(LeaderHint::Job(JobId(job)))).collect();
        Ok(PriorityOutcome::Done { number, state, from, hints })
    }
}
