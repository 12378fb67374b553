//! The first token of an attempt: the endpoint answers, and from the first one of a task its working time runs (L2).

use cfq_proto::ids::TaskId;
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::error::Doing;
use super::tasks::lock_task;
use super::{Store, StoreError, nothing};

impl Store {
    /// A node showed the first token of an attempt. False if it is not the current one any more.
    pub async fn first_token(&self, fence: &JobFence) -> Result<bool, StoreError> {
        let Some(task) = self.task_of(fence.job).await? else { return Ok(false) };
        let mut tx = self.begin().await?;
        if lock_task(&mut tx, task).await?.is_none() || !note(&mut tx, task, fence, None).await? {
            return nothing(tx, false).await;
        }
        tx.commit().await.doing("noting a first token")?;
        Ok(true)
    }
}

/// Writes it for a running attempt of a locked task: now, or `after_ms` of work as its node tells afterwards. The ladder
/// and the ceiling of earlier failures end here.
pub(super) async fn note(
    connection: &mut PgConnection,
    task: TaskId,
    fence: &JobFence,
    after_ms: Option<u64>,
) -> Result<bool, StoreError> {
    let noted = sqlx::query_scalar!(
        r#"with first as (
               update attempts a set first_token_at = least(clock_timestamp(),
                   coalesce(j.accepted_at + $4::float8 * interval '1 millisecond', clock_timestamp()))
               from jobs j
               where a.job = $1 and a.attempt = $2 and a.lease = $3 and a.first_token_at is null
                 and j.id = a.job and j.lease = a.lease and j.state = 'running'
               returning a.first_token_at as at
           ), answered as (
               update jobs set setbacks = '{}', first_failure_at = null, failure = null from first
               where id = $1 and first_failure_at is not null
           ), begun as (
               update tasks set first_token_at = first.at from first where id = $5 and first_token_at is null
           )
           select true as "noted!" from first"#,
        fence.job.0,
        fence.attempt,
        fence.lease.0,
        after_ms.map(|ms| ms as f64),
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("noting a first token")?;
    Ok(noted.is_some())
}
