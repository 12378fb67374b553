//! Recording of the first token of an attempt. A first token shows that the model answers, so it resets the job's
//! backoff. The first token of a task also starts the task's working time (L2).

use cfq_proto::ids::TaskId;
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::error::Doing;
use super::tasks::lock_for_progress;
use super::{Store, StoreError, roll_back};

impl Store {
    /// Records the first token of an attempt, as seen in a node's token frames. False if the attempt is not the current
    /// one, or its first token was recorded before.
    pub async fn record_first_token(&self, fence: &JobFence) -> Result<bool, StoreError> {
        let Some(task) = self.task_of(fence.job).await? else { return Ok(false) };
        let mut tx = self.begin().await?;
        if lock_for_progress(&mut tx, task).await?.is_none() || !record(&mut tx, task, fence, None).await? {
            return roll_back(tx, false).await;
        }
        tx.commit().await.doing("recording a first token")?;
        Ok(true)
    }
}

/// Records the first token of a running attempt of a locked task. The time recorded is now, or `after_ms` after the
/// acceptance if the node reported that time with the result. Also forgets the job's earlier failures, and with them
/// the backoff and the time that the retry ceiling limits.
pub(super) async fn record(
    connection: &mut PgConnection,
    task: TaskId,
    fence: &JobFence,
    after_ms: Option<u64>,
) -> Result<bool, StoreError> {
    let recorded = sqlx::query_scalar!(
        r#"with first as (
               update attempts a set first_token_at = least(clock_timestamp(),
                   coalesce(j.accepted_at + $4::float8 * interval '1 millisecond', clock_timestamp()))
               from jobs j
               where a.job = $1 and a.attempt = $2 and a.lease = $3 and a.first_token_at is null
                 and j.id = a.job and j.lease = a.lease and j.state = 'running'
               returning a.first_token_at as at
           ), answered as (
               update jobs set node_failures = '{}', first_failure_at = null, failure = null from first
               where id = $1 and first_failure_at is not null and not has_fallback
           ), begun as (
               update tasks set first_token_at = first.at from first where id = $5 and first_token_at is null
           )
           select true as "recorded!" from first"#,
        fence.job.0,
        fence.attempt,
        fence.lease.0,
        after_ms.map(|ms| ms as f64),
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("recording a first token")?;
    Ok(recorded.is_some())
}
