//! How an attempt ended, told by its node. Kept until the node hears `Committed`; told twice it changes nothing, told late
//! it is stale.

use cfq_proto::blob::Carried;
use cfq_proto::ids::NodeId;
use cfq_proto::job::{Completion, JobState, Outcome, Usage};
use cfq_proto::messages::{FenceReply, JobReport};
use sqlx::PgConnection;

use super::accept::{held, hints, repeated};
use super::as_json::AsJson;
use super::attempts;
use super::error::Doing;
use super::hint::Hint;
use super::jobs::{changed, leave_node};
use super::tasks::lock_task;
use super::{Store, StoreError, first_token, nothing};

impl Store {
    pub async fn report(&self, node: &NodeId, ask: &JobReport) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let Some(task) = self.task_of(ask.fence.job).await? else { return Ok((FenceReply::Stale, vec![])) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, (FenceReply::Stale, vec![])).await };
        let told = match &ask.outcome {
            Outcome::Done { .. } => "done",
            Outcome::Failed { .. } => "failed",
            Outcome::Released { .. } => "released",
        };
        match held(&mut tx, node, ask.boot.0, &ask.fence).await? {
            Some(JobState::Running) => {}
            // A node that was told to stop before it accepted says so too.
            Some(JobState::Placed) if told == "released" => {}
            Some(
                JobState::Placed
                | JobState::Queued
                | JobState::Done
                | JobState::Failed
                | JobState::Dead
                | JobState::Cancelled,
            )
            | None => {
                let reply = repeated(&mut tx, &ask.fence, told).await?;
                return nothing(tx, (reply, vec![])).await;
            }
        }
        let why = match &ask.outcome {
            Outcome::Done { completion } => {
                let Some(usage) = usage(&mut tx, task.id, completion).await? else {
                    return nothing(
                        tx,
                        (FenceReply::Unavailable { reason: "the completion's blob is not here".into() }, vec![]),
                    )
                    .await;
                };
                // The frame that showed the first token may be lost; the node's own figure says the same.
                first_token::note(&mut tx, task.id, &ask.fence, Some(usage.first_token_ms)).await?;
                attempts::end_current(&mut tx, ask.fence.job, told, "").await?;
                leave_node(&mut tx, ask.fence.job, JobState::Done).await?;
                sqlx::query!(
                    r#"update jobs set completion = $2, usage = $3, failure = null where id = $1"#,
                    ask.fence.job.0,
                    AsJson(completion) as _,
                    AsJson(usage) as _
                )
                .execute(&mut *tx)
                .await
                .doing("keeping a completion")?;
                String::new()
            }
            Outcome::Failed { failure } => {
                attempts::end_current(&mut tx, ask.fence.job, told, &failure.to_string()).await?;
                self.failed(&mut tx, node, ask, failure).await?
            }
            Outcome::Released { reason } => {
                attempts::end_current(&mut tx, ask.fence.job, told, reason).await?;
                leave_node(&mut tx, ask.fence.job, JobState::Queued).await?;
                format!("given back by {node}: {reason}")
            }
        };
        changed(&mut tx, task.id, ask.fence.job, &why).await?;
        cfq_link::failpoint::hit("scheduler.result.before_commit");
        tx.commit().await.doing("committing a result")?;
        cfq_link::failpoint::hit("scheduler.result.after_commit");
        Ok((FenceReply::Committed, hints(&task, ask.fence.job)))
    }
}

/// The figures of a completion; `None` if its blob has not arrived.
async fn usage(
    connection: &mut PgConnection,
    task: cfq_proto::ids::TaskId,
    completion: &Carried<Completion>,
) -> Result<Option<Usage>, StoreError> {
    match completion {
        Carried::Inline(completion) => Ok(Some(completion.usage)),
        Carried::Blob(blob) => {
            if !super::blobs::refer(connection, &blob.hash, task).await? {
                return Ok(None);
            }
            let completion: Completion = super::carried::load(connection, blob).await?;
            Ok(Some(completion.usage))
        }
    }
}
