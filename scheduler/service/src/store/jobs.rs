//! Job rows. Runners submit, read and cancel jobs; other modules of the store use this module to release and end them.

use cfq_proto::blob::Payload;
use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, RunnerId, TaskId};
use cfq_proto::job::{Completion, JobFailure, JobState, JobView};
use cfq_proto::messages::{FenceReply, JobCancel, JobGet, JobReply, JobSubmit, UnavailableReason};
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::attempts::{self, AttemptOutcome};
use super::columns::{AsJson, parse};
use super::error::Doing;
use super::events::append;
use super::hints::{Hint, LeaderHint, for_cancelled_job};
use super::tasks::lock_task;
use super::{Store, StoreError, blobs, roll_back};

impl Store {
    /// Creates a job, or returns the existing one with the same (task, seq, role, n).
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
        let call = &request.request;
        if let Payload::Blob(blob) = &call.prompt
            && !blobs::has(&mut tx, &blob.hash, task.id).await?
        {
            let reason = UnavailableReason::MissingBlob { hash: blob.hash.clone() };
            return roll_back(tx, (JobReply::Unavailable { reason }, vec![])).await;
        }
        let id = JobId::fresh();
        let created = sqlx::query!(
            r#"insert into jobs (id, task, seq, role, n, model, priority, deadline, prompt, prompt_bytes, prefix, max_tokens, state)
               select $1, $2, $3, $4, $5, $6, priority, deadline, $7, $8, $9, $10, 'queued' from tasks where id = $2
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
            i64::from(call.max_tokens)
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
                role: call.role,
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
        let view = view(&mut tx, JobId(job)).await?;
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
            Some(_) => JobReply::Job { job: view(&mut connection, request.job).await? },
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
        cancel(&mut tx, task.id, request.job, "cancelled by its runner").await?;
        tx.commit().await.doing("cancelling a job")?;
        let hints = for_cancelled_job(request.job, row.attempt, row.lease, row.node.as_deref())?;
        Ok((FenceReply::Committed, hints))
    }
}

/// Reads a job in the form that its runner receives.
pub(super) async fn view(connection: &mut PgConnection, job: JobId) -> Result<JobView, StoreError> {
    let r = sqlx::query!(
        r#"select j.task, j.seq, j.role, j.n, j.state, j.attempt, j.model, j.node, j.priority,
                  (j.running_ms + case when j.state = 'running' and t.first_token_at is not null
                       then extract(epoch from clock_timestamp() - greatest(j.accepted_at, t.first_token_at)) * 1000
                       else 0 end)::bigint as "running_ms!",
                  j.completion as "completion: Json<Payload<Completion>>", j.failure as "failure: Json<JobFailure>"
           from jobs j join tasks t on t.id = j.task where j.id = $1"#,
        job.0
    )
    .fetch_one(connection)
    .await
    .doing("reading a job")?;
    Ok(JobView {
        id: job,
        task: TaskId(r.task),
        seq: r.seq,
        role: parse("role", &r.role)?,
        n: r.n,
        state: parse("job state", &r.state)?,
        attempt: r.attempt,
        model: parse::<ModelId>("model", &r.model)?,
        node: r.node.as_deref().map(|n| parse("node", n)).transpose()?,
        priority: Priority::try_from(r.priority)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: r.priority.to_string() })?,
        running_ms: r.running_ms.max(0) as u64,
        completion: r.completion.map(|c| c.0),
        failure: r.failure.map(|f| f.0),
    })
}

/// Cancels the live jobs of a locked task, because the jobs' results are not needed any more.
pub(super) async fn cancel_jobs(
    connection: &mut PgConnection,
    task: TaskId,
    reason: &str,
) -> Result<Vec<Hint>, StoreError> {
    let live = sqlx::query!(
        r#"select id, attempt, lease, node from jobs
           where task = $1 and state in ('queued', 'placed', 'running') order by id for update"#,
        task.0
    )
    .fetch_all(&mut *connection)
    .await
    .doing("finding a task's jobs")?;
    let mut hints = Vec::new();
    for job in live {
        let id = JobId(job.id);
        cancel(connection, task, id, reason).await?;
        hints.extend(for_cancelled_job(id, job.attempt, job.lease, job.node.as_deref())?);
    }
    Ok(hints)
}

/// Ends a live job of a locked task as cancelled, and appends the event.
pub(super) async fn cancel(
    connection: &mut PgConnection,
    task: TaskId,
    job: JobId,
    reason: &str,
) -> Result<(), StoreError> {
    attempts::end_current(connection, job, AttemptOutcome::Cancelled, reason).await?;
    leave_node(connection, job, JobState::Cancelled).await?;
    append_job_changed(connection, task, job, reason).await
}

/// Ends a job's placement: adds the working time of this placement to the job's total, and sets the job's new state.
/// Working time starts with the task's first token; time that nodes spent on the task before that token is not counted.
pub(super) async fn leave_node(connection: &mut PgConnection, job: JobId, to: JobState) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update jobs j set state = $2, lease = null, lease_expires = null, node_boot = null, placed_at = null,
                  running_ms = running_ms + case when j.state = 'running' and t.first_token_at is not null
                      then (extract(epoch from now() - least(now(), greatest(j.accepted_at, t.first_token_at))) * 1000)::bigint
                      else 0 end,
                  accepted_at = null, placement = case when $2 = 'queued' then '' else placement end, node = case when $2 in ('done', 'failed') then node end, updated_at = now()
           from tasks t where j.id = $1 and t.id = j.task"#,
        job.0,
        to.as_str()
    )
    .execute(connection)
    .await
    .doing("ending a job's placement")?;
    Ok(())
}

/// Ends a job as a dead letter, because it would otherwise be retried without end. The job's failure lists the outcomes
/// of its attempts.
pub(super) async fn mark_dead(connection: &mut PgConnection, job: JobId, what: &str) -> Result<(), StoreError> {
    leave_node(connection, job, JobState::Dead).await?;
    let evidence = attempts::history(connection, job).await?;
    let failure = JobFailure::Engine { reason: format!("{what}: {evidence}") };
    sqlx::query!("update jobs set failure = $2 where id = $1", job.0, AsJson(&failure) as _)
        .execute(connection)
        .await
        .doing("recording a dead job's failure")?;
    Ok(())
}

/// Appends an event with the job's current state. If the job is not pending any more, its task waits for it no longer.
pub(super) async fn append_job_changed(
    connection: &mut PgConnection,
    task: TaskId,
    job: JobId,
    reason: &str,
) -> Result<(), StoreError> {
    let r = sqlx::query!(
        r#"with resumed as (
               update tasks set waits_for = null from jobs
               where tasks.id = $2 and tasks.waits_for = $1 and jobs.id = $1 and jobs.state not in ('queued', 'placed')
           )
           select role, model, attempt, state, node, failure as "failure: Json<JobFailure>",
                  usage as "usage: Json<cfq_proto::job::Usage>"
           from jobs where id = $1"#,
        job.0,
        task.0
    )
    .fetch_one(&mut *connection)
    .await
    .doing("reading a job")?;
    let body = EventBody::JobChanged {
        job,
        role: parse("role", &r.role)?,
        model: parse("model", &r.model)?,
        attempt: r.attempt,
        state: parse("job state", &r.state)?,
        node: r.node.as_deref().map(|n| parse("node", n)).transpose()?,
        reason: reason.to_owned(),
        failure: r.failure.map(|f| f.0),
        usage: r.usage.map(|u| u.0),
    };
    append(connection, task, &body).await
}
