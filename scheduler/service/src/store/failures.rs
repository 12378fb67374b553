//! Handling of a failed attempt: the job is requeued with a backoff, or it ends (Q7, N12).
//!
//! **Retry ceiling.** It limits the time during which a job is retried without receiving any token. A first token
//! resets this time and the backoff. Time spent waiting for capacity between two tries is not counted. Because of the
//! reset, a job that always fails in the middle of its answer would be retried without end. Attempts that failed after
//! their first token are therefore counted, and above the limit (`max_interruptions`) the job becomes a dead letter,
//! whose failure lists the attempts. After a user requeued it, only later attempts count.

use cfq_proto::ids::NodeId;
use cfq_proto::job::{JobFailure, JobState};
use cfq_proto::messages::JobResult;
use cfq_scheduler_core::{BackoffPolicy, NodeFailures};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::AsJson;
use super::error::Doing;
use super::jobs::{leave_node, mark_dead};
use super::{Store, StoreError, now_ms};

impl Store {
    /// Counts the failure of an attempt that has already ended, and requeues or ends the job. Returns the reason for
    /// the job's new state.
    pub(super) async fn count_failure(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        request: &JobResult,
        failure: &JobFailure,
    ) -> Result<String, StoreError> {
        let job = request.fence.job;
        let now = now_ms(connection).await?;
        let row = sqlx::query!(
            r#"select node_failures as "node_failures: Json<NodeFailures>",
                      (extract(epoch from first_failure_at) * 1000)::bigint as first_failure_ms,
                      (extract(epoch from placed_at) * 1000)::bigint as placed_ms,
                      (select (extract(epoch from max(ended_at)) * 1000)::bigint from attempts
                       where job = jobs.id and outcome = 'failed' and attempt < jobs.attempt) as failed_before_ms,
                      (select count(*) from attempts
                       where job = jobs.id and outcome = 'failed' and first_token_at is not null
                         and attempt > jobs.requeued_after) as "failed_after_first_token!",
                      next_model is not null as "has_next_model!"
               from jobs where id = $1"#,
            job.0
        )
        .fetch_one(&mut *connection)
        .await
        .doing("reading a job's failures")?;
        let mut node_failures = row.node_failures.0;
        let retry_allowed_ms = node_failures.0.get(node).map(|s| s.until_ms).max(row.failed_before_ms);
        let waited_for_capacity_ms =
            row.placed_ms.zip(retry_allowed_ms).map_or(0, |(placed, allowed)| placed.saturating_sub(allowed).max(0));
        let first = match row.first_failure_ms {
            Some(first) if !node_failures.0.is_empty() => first.saturating_add(waited_for_capacity_ms).min(now),
            Some(_) | None => now,
        };
        let policy = BackoffPolicy { base_ms: self.timing.backoff_base_ms, cap_ms: self.timing.backoff_cap_ms };
        node_failures.record(job, node.clone(), now, policy);
        let ceiling_passed = now >= first.saturating_add_unsigned(self.timing.retry_ceiling_ms);
        // Another model may succeed whatever happened to this one.
        let moves = row.has_next_model;
        let dead =
            !moves && failure.may_retry() && row.failed_after_first_token > i64::from(self.limits.max_interruptions);
        let retry = moves || failure.may_retry() && !ceiling_passed && !dead;
        sqlx::query!(
            r#"update jobs set failures = failures + 1, failure = $2, node_failures = $3,
                      first_failure_at = to_timestamp($4::bigint::float8 / 1000)
               where id = $1"#,
            job.0,
            AsJson(failure) as _,
            AsJson(&node_failures) as _,
            first
        )
        .execute(&mut *connection)
        .await
        .doing("counting a failure")?;
        if dead {
            let what = format!("failed {} times in the middle of its answer", row.failed_after_first_token);
            mark_dead(connection, job, &what).await?;
            return Ok(format!("failed on {node}, not retried any more: {failure}"));
        }
        leave_node(connection, job, if retry { JobState::Queued } else { JobState::Failed }).await?;
        let next = if retry { ", will be retried" } else { "" };
        Ok(format!("failed on {node}{next}: {failure}"))
    }
}
