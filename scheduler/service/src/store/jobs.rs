//! Job rows: their view for runners, and their release and end, which other modules of the store use.

use cfq_proto::blob::Payload;
use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, JobFailure, JobState, JobView};
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::StoreError;
use super::agent_settings;
use super::attempts::{self, AttemptOutcome};
use super::columns::{AsJson, parse};
use super::error::Doing;
use super::events::append;
use super::hints::{Hint, for_cancelled_job};
use super::tasks::TaskRow;

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
    task: &TaskRow,
    reason: &str,
) -> Result<Vec<Hint>, StoreError> {
    let live = sqlx::query!(
        r#"select id, attempt, lease, node from jobs
           where task = $1 and state in ('queued', 'placed', 'running') order by id for update"#,
        task.id.0
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
    task: &TaskRow,
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
    .execute(&mut *connection)
    .await
    .doing("ending a job's placement")?;
    match to {
        JobState::Queued => agent_settings::adopt(connection, &[job.0]).await,
        _ => Ok(()),
    }
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

/// Appends an event with the job's current state. If the job is no longer pending, its task stops waiting for it. A call
/// of an API client has no events, and waits for nothing.
pub(super) async fn append_job_changed(
    connection: &mut PgConnection,
    task: &TaskRow,
    job: JobId,
    reason: &str,
) -> Result<(), StoreError> {
    if task.is_call {
        return Ok(());
    }
    let r = sqlx::query!(
        r#"with resumed as (
               update tasks set waits_for = null from jobs
               where tasks.id = $2 and tasks.waits_for = $1 and jobs.id = $1 and jobs.state not in ('queued', 'placed')
           )
           select role, model, attempt, state, node, failure as "failure: Json<JobFailure>",
                  usage as "usage: Json<cfq_proto::job::Usage>"
           from jobs where id = $1"#,
        job.0,
        task.id.0
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
    append(connection, task.id, &body).await
}
