//! Acknowledged failures: `cfq status` counts the failed tasks that are neither acknowledged nor retried.

use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::tasks::lock_task;
use super::{Store, StoreError, roll_back};

/// Result of an acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcknowledgeOutcome {
    Done {
        number: TaskNumber,
        /// False if the failure was acknowledged before.
        is_new: bool,
    },
    /// The task has not failed.
    Refused {
        number: TaskNumber,
        state: TaskState,
    },
    Unknown,
}

impl Store {
    /// Notes that a user knows of a task's failure.
    pub async fn acknowledge(&self, task: TaskId) -> Result<AcknowledgeOutcome, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else {
            return roll_back(tx, AcknowledgeOutcome::Unknown).await;
        };
        let (number, state) = (task.number, task.state);
        if state != TaskState::Failed {
            return roll_back(tx, AcknowledgeOutcome::Refused { number, state }).await;
        }
        let is_new = acknowledge_failure(&mut tx, task.id).await?;
        tx.commit().await.doing("acknowledging a failure")?;
        Ok(AcknowledgeOutcome::Done { number, is_new })
    }

    /// Number of failed tasks that are neither acknowledged nor retried.
    pub(super) async fn count_unacknowledged_failures(&self) -> Result<i64, StoreError> {
        sqlx::query_scalar!(
            r#"select count(*) as "count!" from tasks where state = 'failed' and acknowledged_at is null"#
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting failed tasks")
    }
}

/// Acknowledges the failure of a locked task. False if the task has not failed, or was acknowledged before.
pub(super) async fn acknowledge_failure(connection: &mut PgConnection, task: TaskId) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "update tasks set acknowledged_at = now() where id = $1 and state = 'failed' and acknowledged_at is null",
        task.0
    )
    .execute(connection)
    .await
    .doing("acknowledging a failure")?;
    Ok(done.rows_affected() > 0)
}
