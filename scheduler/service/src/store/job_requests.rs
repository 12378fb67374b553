//! Requests of runners about jobs: submit, read, cancel.

use cfq_proto::blob::Payload;
use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, RunnerId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{FenceReply, JobCancel, JobGet, JobReply, JobSubmit, UnavailableReason};

use super::columns::{AsJson, parse};
use super::error::Doing;
use super::events::append;
use super::hints::{Hint, LeaderHint, for_cancelled_job, for_cancelled_task};
use super::tasks::lock_task;
use super::{Store, StoreError, blobs, jobs, pause, roll_back};

impl Store {
    /// Creates a job, or returns the existing one with the same (task, seq, role, n). If a pause of the task was
    /// requested, it takes effect instead. If the settings of an agent changed, the task is released instead, to be
    /// granted with them.
    pub async fn submit_job(
        &self,
        runner: &RunnerId,
        request: &JobSubmit,
    ) -> Result<(JobReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, request.fence.task).await?.filter(|t| t.is_held_by(runner, &request.fence));
        let Some(task) = task.filter(|t| (0..=t.next_seq).contains(&request.seq)) else {
            return roll_back(tx, (JobReply::Stale, vec![])).await;
        };
        if let Some(reason) = &task.pause_requested {
            let mut hints = pause::pause_task(&mut tx, &task, reason).await?;
            tx.commit().await.doing("pausing a task")?;
            hints.extend(for_cancelled_task(&task));
            return Ok((JobReply::Stale, hints));
        }
        if task.agents_changed {
            let mut hints = pause::make_ready(&mut tx, &task, "the settings of an agent were changed").await?;
            tx.commit().await.doing("releasing a task")?;
            hints.extend(for_cancelled_task(&task));
            return Ok((JobReply::Stale, hints));
        }
        let call = &request.request;
        if let Payload::Blob(blob) = &call.prompt
            && !blobs::has(&mut tx, &blob.hash, task.id).await?
        {
            let reason = UnavailableReason::MissingBlob { hash: blob.hash.clone() };
            return roll_back(tx, (JobReply::Unavailable { reason }, vec![])).await;
        }
        let id = JobId::fresh();
        let created = sqlx::query!(
            r#"insert into jobs (id, task, seq, role, n, model, priority, deadline, prompt, prompt_bytes, prefix, max_tokens,
                                 has_fallback, state)
               select $1, $2, $3, $4, $5, $6, priority, deadline, $7, $8, $9, $10, $11, 'queued' from tasks where id = $2
               on conflict (task, seq, role, n) do nothing"#,
            id.0,
            task.id.0,
            request.seq,
            call.role.as_str(),
            call.n,
            call.model.as_str(),
            AsJson(&call.prompt) as _,
            i64::try_from(call.prompt_bytes).unwrap_or(i64::MAX),
            AsJson(&call.prefix) as _,
            i64::from(call.max_tokens),
            call.has_fallback
        )
        .execute(&mut *tx)
        .await
        .doing("writing a job")?
        .rows_affected()
            == 1;
        let mut hints = vec![];
        if created {
            let body = EventBody::JobChanged {
                job: id,
                role: call.role.into(),
                model: call.model.clone(),
                attempt: 0,
                state: JobState::Queued,
                node: None,
                reason: String::new(),
                failure: None,
                usage: None,
            };
            append(&mut tx, task.id, &body).await?;
            hints.push(Hint::Leader(LeaderHint::Job(id)));
        }
        let job = sqlx::query_scalar!(
            "select id from jobs where task = $1 and seq = $2 and role = $3 and n = $4",
            task.id.0,
            request.seq,
            call.role.as_str(),
            call.n
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a job")?;
        let view = jobs::view(&mut tx, JobId(job)).await?;
        cfq_link::failpoint::hit("scheduler.job.before_commit");
        tx.commit().await.doing("committing a job")?;
        cfq_link::failpoint::hit("scheduler.job.after_commit");
        Ok((JobReply::Job { job: view }, hints))
    }

    /// Reads a job of a task that the runner holds. No row is locked: runners poll often, and every write that follows
    /// from the reply is fenced.
    pub async fn get_job(&self, runner: &RunnerId, request: &JobGet) -> Result<JobReply, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let held = sqlx::query_scalar!(
            r#"select true as "held!" from tasks t join jobs j on j.task = t.id
               where t.id = $1 and t.state = 'running' and t.attempt = $2 and t.lease = $3 and t.runner = $4 and j.id = $5"#,
            request.fence.task.0,
            request.fence.attempt,
            request.fence.lease.0,
            runner.as_str(),
            request.job.0
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("finding a job")?;
        Ok(match held {
            Some(_) => JobReply::Job { job: jobs::view(&mut connection, request.job).await? },
            None => JobReply::Stale,
        })
    }

    /// Cancels a job for the runner that submitted it.
    pub async fn cancel_job(
        &self,
        runner: &RunnerId,
        request: &JobCancel,
    ) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, request.fence.task).await?.filter(|t| t.is_held_by(runner, &request.fence));
        let Some(task) = task else { return roll_back(tx, (FenceReply::Stale, vec![])).await };
        let row = sqlx::query!(
            "select state, attempt, lease, node from jobs where id = $1 and task = $2 for update",
            request.job.0,
            task.id.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a job")?;
        let Some(row) = row else { return roll_back(tx, (FenceReply::Stale, vec![])).await };
        if parse::<JobState>("job state", &row.state)?.is_terminal() {
            return roll_back(tx, (FenceReply::Committed, vec![])).await;
        }
        jobs::cancel(&mut tx, &task, request.job, "cancelled by its runner").await?;
        tx.commit().await.doing("cancelling a job")?;
        let hints = for_cancelled_job(request.job, row.attempt, row.lease, row.node.as_deref())?;
        Ok((FenceReply::Committed, hints))
    }
}
