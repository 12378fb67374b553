//! Outcomes of attempts, as their nodes report them. A node that receives no reply repeats the report. A repeated
//! report changes nothing; a report of an attempt that is no longer current gets the reply `Stale`.

use cfq_proto::blob::Payload;
use cfq_proto::ids::{NodeId, TaskId};
use cfq_proto::job::{Completion, JobState, Outcome, Usage};
use cfq_proto::messages::{FenceReply, JobResult, UnavailableReason};
use cfq_proto::model::ModelId;
use sqlx::PgConnection;

use super::accept::{lock_current_job, reply_to_repeat};
use super::attempts::{self, AttemptOutcome};
use super::columns::{AsJson, parse};
use super::error::Doing;
use super::hints::{Hint, for_changed_job};
use super::jobs::{append_job_changed, leave_node};
use super::tasks::lock_task;
use super::{Store, StoreError, blobs, first_token, payload, roll_back};

/// What a report of an attempt's end changed.
#[derive(Debug)]
pub struct RecordedResult {
    pub reply: FenceReply,
    pub hints: Vec<Hint>,
    /// The outcome that this report wrote; `None` if it changed nothing.
    pub ended: Option<EndedAttempt>,
}

/// An attempt that a report ended.
#[derive(Debug)]
pub enum EndedAttempt {
    Done { model: ModelId, usage: Usage },
    Failed,
    Released,
}

impl RecordedResult {
    fn unchanged(reply: FenceReply) -> Self {
        Self { reply, hints: vec![], ended: None }
    }
}

impl Store {
    /// Ends an attempt with the reported outcome.
    pub async fn record_result(&self, node: &NodeId, request: &JobResult) -> Result<RecordedResult, StoreError> {
        let Some(task) = self.task_of(request.fence.job).await? else {
            return Ok(RecordedResult::unchanged(FenceReply::Stale));
        };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else {
            return roll_back(tx, RecordedResult::unchanged(FenceReply::Stale)).await;
        };
        let outcome = match &request.outcome {
            Outcome::Done { .. } => AttemptOutcome::Done,
            Outcome::Failed { .. } => AttemptOutcome::Failed,
            Outcome::Released { .. } => AttemptOutcome::Released,
        };
        match lock_current_job(&mut tx, node, request.boot.0, &request.fence).await? {
            Some(JobState::Running) => {}
            // A node that stops before it has accepted a placed job reports the job as released, too.
            Some(JobState::Placed) if outcome == AttemptOutcome::Released => {}
            Some(
                JobState::Placed
                | JobState::Queued
                | JobState::Done
                | JobState::Failed
                | JobState::Dead
                | JobState::Cancelled,
            )
            | None => {
                let reply = reply_to_repeat(&mut tx, &request.fence, outcome).await?;
                return roll_back(tx, RecordedResult::unchanged(reply)).await;
            }
        }
        let (reason, ended) = match &request.outcome {
            Outcome::Done { completion } => {
                let usage = match usage(&mut tx, task.id, completion).await? {
                    Ok(usage) => usage,
                    Err(reason) => {
                        let reply = FenceReply::Unavailable { reason };
                        return roll_back(tx, RecordedResult::unchanged(reply)).await;
                    }
                };
                // The token frame with the first token may have been lost; the usage also contains the time of the
                // first token.
                first_token::record(&mut tx, task.id, &request.fence, Some(usage.first_token_ms)).await?;
                attempts::end_current(&mut tx, request.fence.job, outcome, "").await?;
                leave_node(&mut tx, request.fence.job, JobState::Done).await?;
                let model = sqlx::query_scalar!(
                    r#"update jobs set completion = $2, usage = $3, failure = null where id = $1 returning model"#,
                    request.fence.job.0,
                    AsJson(completion) as _,
                    AsJson(usage) as _
                )
                .fetch_one(&mut *tx)
                .await
                .doing("writing a completion")?;
                (String::new(), EndedAttempt::Done { model: parse("model", &model)?, usage })
            }
            Outcome::Failed { failure } => {
                attempts::end_current(&mut tx, request.fence.job, outcome, &failure.to_string()).await?;
                (self.count_failure(&mut tx, node, request, failure).await?, EndedAttempt::Failed)
            }
            Outcome::Released { reason } => {
                attempts::end_current(&mut tx, request.fence.job, outcome, &reason.to_string()).await?;
                leave_node(&mut tx, request.fence.job, JobState::Queued).await?;
                (format!("released by {node}: {reason}"), EndedAttempt::Released)
            }
        };
        append_job_changed(&mut tx, &task, request.fence.job, &reason).await?;
        cfq_link::failpoint::hit("scheduler.result.before_commit");
        tx.commit().await.doing("committing a result")?;
        cfq_link::failpoint::hit("scheduler.result.after_commit");
        let hints = for_changed_job(&task, request.fence.job);
        Ok(RecordedResult { reply: FenceReply::Committed, hints, ended: Some(ended) })
    }
}

/// The usage in a completion; `Err` if its blob is not stored for this task.
async fn usage(
    connection: &mut PgConnection,
    task: TaskId,
    completion: &Payload<Completion>,
) -> Result<Result<Usage, UnavailableReason>, StoreError> {
    match completion {
        Payload::Inline(completion) => Ok(Ok(completion.usage)),
        Payload::Blob(blob) => {
            if !blobs::has(connection, &blob.hash, task).await? {
                return Ok(Err(UnavailableReason::MissingBlob { hash: blob.hash.clone() }));
            }
            let completion: Completion = payload::load_blob(connection, blob).await?;
            Ok(Ok(completion.usage))
        }
    }
}
