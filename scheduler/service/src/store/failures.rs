//! A failed attempt: back to the queue with a wait, or the end (Q7, N12).
//!
//! **What the ceiling counts.** One stretch in which the job was tried and nobody answered. A first token ends the stretch:
//! whatever breaks afterwards is a new trouble, with the whole ladder before it. A wait for room between two tries is not
//! trying and is left out, as everywhere. What never stops breaking in the middle of its answer would go on for ever by that
//! rule, so such attempts are counted, and beyond the limit the job is parked with the evidence.

use cfq_proto::ids::NodeId;
use cfq_proto::job::{JobFailure, JobState};
use cfq_proto::messages::JobReport;
use cfq_scheduler_core::{Ladder, Setbacks};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::as_json::AsJson;
use super::error::Doing;
use super::jobs::{leave_node, park};
use super::{Store, StoreError, now_ms};

impl Store {
    /// Counts the failure of an attempt that is ended already, and says in words what follows.
    pub(super) async fn failed(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        ask: &JobReport,
        failure: &JobFailure,
    ) -> Result<String, StoreError> {
        let job = ask.fence.job;
        let now = now_ms(connection).await?;
        let row = sqlx::query!(
            r#"select setbacks as "setbacks: Json<Setbacks>",
                      (extract(epoch from first_failure_at) * 1000)::bigint as first_failure_ms,
                      (extract(epoch from placed_at) * 1000)::bigint as placed_ms,
                      (select (extract(epoch from max(ended_at)) * 1000)::bigint from attempts
                       where job = jobs.id and outcome = 'failed' and attempt < jobs.attempt) as failed_before_ms,
                      (select count(*) from attempts
                       where job = jobs.id and outcome = 'failed' and first_token_at is not null) as "broken_off!"
               from jobs where id = $1"#,
            job.0
        )
        .fetch_one(&mut *connection)
        .await
        .doing("reading a job's failures")?;
        let mut setbacks = row.setbacks.0;
        let could_be_tried_ms = setbacks.0.get(node).map(|s| s.until_ms).max(row.failed_before_ms);
        let waited_for_room =
            row.placed_ms.zip(could_be_tried_ms).map_or(0, |(placed, could)| placed.saturating_sub(could).max(0));
        let first = match row.first_failure_ms {
            Some(first) if !setbacks.0.is_empty() => first.saturating_add(waited_for_room).min(now),
            Some(_) | None => now,
        };
        let ladder = Ladder { base_ms: self.timing.backoff_base_ms, cap_ms: self.timing.backoff_cap_ms };
        setbacks.record(job, node.clone(), now, ladder);
        let beyond = now >= first.saturating_add_unsigned(self.timing.retry_ceiling_ms);
        let parked = failure.may_retry() && row.broken_off > i64::from(self.limits.max_break_offs);
        let again = failure.may_retry() && !beyond && !parked;
        sqlx::query!(
            r#"update jobs set failures = failures + 1, failure = $2, setbacks = $3,
                      first_failure_at = to_timestamp($4::bigint::float8 / 1000)
               where id = $1"#,
            job.0,
            AsJson(failure) as _,
            AsJson(&setbacks) as _,
            first
        )
        .execute(&mut *connection)
        .await
        .doing("counting a failure")?;
        if parked {
            park(connection, job, &format!("broke off {} times in the middle of its answer", row.broken_off)).await?;
            return Ok(format!("failed on {node}, parked: {failure}"));
        }
        leave_node(connection, job, if again { JobState::Queued } else { JobState::Failed }).await?;
        let then = if again { ", to be tried again" } else { "" };
        Ok(format!("failed on {node}{then}: {failure}"))
    }
}
