//! Job rows: asked for by runners, ended by whoever may.

use cfq_proto::blob::Carried;
use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, LeaseId, RunnerId, TaskId};
use cfq_proto::job::{Completion, JobFailure, JobState, JobView};
use cfq_proto::messages::{FenceReply, JobAsk, JobDrop, JobFence, JobLook, JobReply};
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::as_json::AsJson;
use super::attempts;
use super::error::{Doing, read};
use super::events::append;
use super::hint::{Hint, LeaderHint};
use super::tasks::lock_task;
use super::{Store, StoreError, nothing};

impl Store {
    /// Makes the job, or finds the one that (task, seq, role, n) has already.
    pub async fn ask_job(&self, runner: &RunnerId, ask: &JobAsk) -> Result<(JobReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let held = lock_task(&mut tx, ask.fence.task).await?.filter(|t| t.is_held_by(runner, &ask.fence));
        let Some(task) = held.filter(|t| (0..=t.next_seq).contains(&ask.seq)) else {
            return nothing(tx, (JobReply::Stale, vec![])).await;
        };
        let request = &ask.request;
        if let Carried::Blob(blob) = &request.prompt
            && !super::blobs::refer(&mut tx, &blob.hash, task.id).await?
        {
            return nothing(tx, (JobReply::Unavailable { reason: format!("blob {} is not here", blob.hash) }, vec![]))
                .await;
        }
        let id = JobId::fresh();
        let made = sqlx::query!(
            r#"insert into jobs (id, task, seq, role, n, model, priority, deadline, prompt, prompt_bytes, prefix, max_tokens, state)
               select $1, $2, $3, $4, $5, $6, priority, deadline, $7, $8, $9, $10, 'queued' from tasks where id = $2
               on conflict (task, seq, role, n) do nothing"#,
            id.0,
            task.id.0,
            ask.seq,
            request.role.as_str(),
            request.n,
            request.model.as_str(),
            AsJson(&request.prompt) as _,
            i64::try_from(request.prompt_bytes).unwrap_or(i64::MAX),
            AsJson(&request.prefix) as _,
            i64::from(request.max_tokens)
        )
        .execute(&mut *tx)
        .await
        .doing("writing a job")?
        .rows_affected()
            == 1;
        let mut hints = vec![];
        if made {
            let body = EventBody::JobChanged {
                job: id,
                role: request.role,
                model: request.model.clone(),
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
        let found = sqlx::query_scalar!(
            "select id from jobs where task = $1 and seq = $2 and role = $3 and n = $4",
            task.id.0,
            ask.seq,
            request.role.as_str(),
            request.n
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a job")?;
        let view = view(&mut tx, JobId(found)).await?;
        cfq_link::failpoint::hit("scheduler.job.before_commit");
        tx.commit().await.doing("committing a job")?;
        cfq_link::failpoint::hit("scheduler.job.after_commit");
        Ok((JobReply::Job { job: view }, hints))
    }

    /// A job its runner asked for before. Nothing is locked: it is asked often, and whoever acts on the answer is fenced.
    pub async fn look_at_job(&self, runner: &RunnerId, ask: &JobLook) -> Result<JobReply, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let held = sqlx::query_scalar!(
            r#"select true as "held!" from tasks t join jobs j on j.task = t.id
               where t.id = $1 and t.state = 'running' and t.attempt = $2 and t.lease = $3 and t.runner = $4 and j.id = $5"#,
            ask.fence.task.0,
            ask.fence.attempt,
            ask.fence.lease.0,
            runner.as_str(),
            ask.job.0
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("finding a job")?;
        Ok(match held {
            Some(_) => JobReply::Job { job: view(&mut connection, ask.job).await? },
            None => JobReply::Stale,
        })
    }

    /// The runner gives up on a job.
    pub async fn drop_job(&self, runner: &RunnerId, ask: &JobDrop) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let held = lock_task(&mut tx, ask.fence.task).await?.filter(|t| t.is_held_by(runner, &ask.fence));
        let Some(task) = held else { return nothing(tx, (FenceReply::Stale, vec![])).await };
        let row = sqlx::query!(
            "select state, attempt, lease, node from jobs where id = $1 and task = $2 for update",
            ask.job.0,
            task.id.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a job")?;
        let Some(row) = row else { return nothing(tx, (FenceReply::Stale, vec![])).await };
        if read::<JobState>("job state", &row.state)?.is_over() {
            return nothing(tx, (FenceReply::Committed, vec![])).await;
        }
        cancel(&mut tx, task.id, ask.job, "given up by its runner").await?;
        tx.commit().await.doing("cancelling a job")?;
        let mut hints = vec![Hint::Leader(LeaderHint::Job(ask.job))];
        if let (Some(lease), Some(node)) = (row.lease, row.node) {
            let fence = JobFence { job: ask.job, attempt: row.attempt, lease: LeaseId(lease) };
            hints.push(Hint::CancelJob { node: read("node", &node)?, fence });
        }
        Ok((FenceReply::Committed, hints))
    }
}

/// A job as the runner that asked for it sees it.
pub(super) async fn view(connection: &mut PgConnection, job: JobId) -> Result<JobView, StoreError> {
    let r = sqlx::query!(
        r#"select j.task, j.seq, j.role, j.n, j.state, j.attempt, j.model, j.node, j.priority,
                  (j.running_ms + case when j.state = 'running' and t.first_token_at is not null
                       then extract(epoch from clock_timestamp() - greatest(j.accepted_at, t.first_token_at)) * 1000
                       else 0 end)::bigint as "running_ms!",
                  j.completion as "completion: Json<Carried<Completion>>", j.failure as "failure: Json<JobFailure>"
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
        role: read("role", &r.role)?,
        n: r.n,
        state: read("job state", &r.state)?,
        attempt: r.attempt,
        model: read::<ModelId>("model", &r.model)?,
        node: r.node.as_deref().map(|n| read("node", n)).transpose()?,
        priority: Priority::try_from(r.priority)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: r.priority.to_string() })?,
        running_ms: r.running_ms.max(0) as u64,
        completion: r.completion.map(|c| c.0),
        failure: r.failure.map(|f| f.0),
    })
}

/// Ends a live job of a locked task as cancelled.
pub(super) async fn cancel(
    connection: &mut PgConnection,
    task: TaskId,
    job: JobId,
    why: &str,
) -> Result<(), StoreError> {
    attempts::end_current(connection, job, "cancelled", why).await?;
    leave_node(connection, job, JobState::Cancelled).await?;
    changed(connection, task, job, why).await
}

/// Takes a job off its node, adding its working time there, and gives it its new state. Working time runs from the task's
/// first token (DESIGN.md): what a node did for the task before that has cost nothing.
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
    .doing("taking a job off its node")?;
    Ok(())
}

/// Ends a job that would go round for ever, with what happened to its attempts as the evidence.
pub(super) async fn park(connection: &mut PgConnection, job: JobId, what: &str) -> Result<(), StoreError> {
    leave_node(connection, job, JobState::Dead).await?;
    let evidence = attempts::history(connection, job).await?;
    let failure = JobFailure::Engine { reason: format!("{what}: {evidence}") };
    sqlx::query!("update jobs set failure = $2 where id = $1", job.0, AsJson(&failure) as _)
        .execute(connection)
        .await
        .doing("parking a dead job")?;
    Ok(())
}

/// Appends the event that says how a job stands now.
pub(super) async fn changed(
    connection: &mut PgConnection,
    task: TaskId,
    job: JobId,
    reason: &str,
) -> Result<(), StoreError> {
    let r = sqlx::query!(
        r#"select role, model, attempt, state, node, failure as "failure: Json<JobFailure>",
                  usage as "usage: Json<cfq_proto::job::Usage>"
           from jobs where id = $1"#,
        job.0
    )
    .fetch_one(&mut *connection)
    .await
    .doing("reading a job")?;
    let body = EventBody::JobChanged {
        job,
        role: read("role", &r.role)?,
        model: read("model", &r.model)?,
        attempt: r.attempt,
        state: read("job state", &r.state)?,
        node: r.node.as_deref().map(|n| read("node", n)).transpose()?,
        reason: reason.to_owned(),
        failure: r.failure.map(|f| f.0),
        usage: r.usage.map(|u| u.0),
    };
    append(connection, task, &body).await
}
