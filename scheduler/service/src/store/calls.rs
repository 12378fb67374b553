//! Model calls of clients of the OpenAI-compatible API: one job each, under a task of the state `call`, which no list of
//! tasks reads.
//!
//! A call exists as long as its client waits. The scheduler to which the client is connected extends `call_expires`; when
//! the client has the result, or has disconnected, it deletes the call with everything that belongs to it, and so does the
//! leader when the time has passed. A late report about a deleted call finds no row and is refused as stale.
//!
//! Writing, placing and deleting a call do not wait for the disk. If Postgres crashes, a call that was just written is
//! lost, and its client receives an error; a call that was just placed is placed again, because no node has accepted it; a
//! call whose deletion was lost is deleted when it expires. All other transactions of a call wait, because a node or a user
//! relies on them: the acceptance by the node also brings what was before it to disk.
//!
//! An expiry that is later than any extension could have set was written before the database's clock was set back, and
//! counts as passed, as that of a lease does (`sweep.rs`).

use cfq_proto::blob::Payload;
use cfq_proto::ids::{ApiTokenId, JobId, NodeId, TaskId, TaskNumber};
use cfq_proto::job::{Completion, JobFailure, JobRole, JobState, Prompt};
use cfq_proto::model::ModelId;
use cfq_proto::prefix;
use cfq_proto::task::Priority;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::{AsJson, parse};
use super::error::Doing;
use super::hints::{Hint, LeaderHint};
use super::jobs::cancel_jobs;
use super::leader::{Leadership, lock_leader_row};
use super::retention::delete_unreferenced;
use super::tasks::{TaskRow, lock_task};
use super::time_limit::limited;
use super::{Store, StoreError, payload, roll_back};

/// Maximum number of expired calls that one sweep ends.
const MAX_CALLS_PER_SWEEP: i64 = 200;

/// A call to write.
#[derive(Debug, Clone)]
pub struct NewClientCall {
    pub id: TaskId,
    /// Token of the client's request.
    pub token: ApiTokenId,
    pub model: ModelId,
    pub priority: Priority,
    pub prompt: Prompt,
}

/// A call's job, as its client's scheduler sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientCallView {
    pub job: JobId,
    pub state: JobState,
    pub attempt: i32,
    pub node: Option<NodeId>,
    /// Why the job waits, or where it runs.
    pub placement: String,
    /// The last failure, also while the job waits for a retry.
    pub failure: Option<JobFailure>,
    /// The generated text; present only in state `Done`.
    pub completion: Option<Completion>,
}

impl Store {
    /// Writes a call and its job. The job is placed like any other.
    pub async fn submit_call(&self, call: NewClientCall) -> Result<(JobId, Vec<Hint>), StoreError> {
        let (job, id) = (JobId::fresh(), call.id);
        let mut tx = self.begin().await?;
        insert(&mut tx, job, call, self.call_ttl_ms()).await?;
        tx.commit().await.doing("writing a call")?;
        self.shared.job_tasks.add(job, id);
        Ok((job, vec![Hint::Leader(LeaderHint::Job(job))]))
    }

    /// The state of a call; `None` if it was deleted.
    pub async fn call(&self, call: TaskId) -> Result<Option<ClientCallView>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let row = sqlx::query!(
            r#"select id, state, attempt, node, placement, failure as "failure: Json<JobFailure>",
                      completion as "completion: Json<Payload<Completion>>"
               from jobs where task = $1 and role = 'client'"#,
            call.0
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("reading a call")?;
        let Some(row) = row else { return Ok(None) };
        let completion = match row.completion {
            Some(Json(completion)) => Some(payload::load(&mut connection, completion).await?),
            None => None,
        };
        Ok(Some(ClientCallView {
            job: JobId(row.id),
            state: parse("job state", &row.state)?,
            attempt: row.attempt,
            node: row.node.as_deref().map(|node| parse("node", node)).transpose()?,
            placement: row.placement,
            failure: row.failure.map(|failure| failure.0),
            completion,
        }))
    }

    /// Records that the clients of these calls still wait.
    pub async fn extend_calls(&self, calls: &[TaskId]) -> Result<(), StoreError> {
        let calls: Vec<uuid::Uuid> = calls.iter().map(|call| call.0).collect();
        sqlx::query!(
            r#"update tasks set call_expires = now() + $2::float8 * interval '1 millisecond'
               where id in (select id from tasks where id = any($1) and state = 'call'
                            order by id for no key update skip locked)"#,
            &calls,
            self.call_ttl_ms()
        )
        .execute(&self.pool)
        .await
        .doing("extending calls")?;
        Ok(())
    }

    /// Deletes a call. The hints cancel its attempt on the node.
    pub async fn end_call(&self, call: TaskId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        let Some(call) = lock_task(&mut tx, call).await?.filter(|task| task.is_call) else {
            return roll_back(tx, vec![]).await;
        };
        let hints = delete(&mut tx, &call, "the client has the result, or has disconnected").await?;
        tx.commit().await.doing("ending a call")?;
        Ok(hints)
    }

    /// Deletes the expired calls: the scheduler to which their clients were connected was lost. Returns the hints and the
    /// number of these calls.
    pub async fn sweep_calls(&self, leadership: Leadership, read_ms: i64) -> Result<(Vec<Hint>, usize), StoreError> {
        let found = sqlx::query_scalar!(
            r#"select id from tasks
               where state = 'call' and (call_expires < to_timestamp($1::float8 / 1000)
                                         or call_expires > now() + $2::float8 * interval '1 millisecond')
               order by id limit $3"#,
            read_ms as f64,
            self.longest_call_ms(),
            MAX_CALLS_PER_SWEEP
        )
        .fetch_all(&self.pool);
        let expired = limited("finding expired calls", async { found.await.doing("finding expired calls") }).await?;
        let (mut hints, mut ended) = (Vec::new(), 0);
        for call in expired {
            let swept =
                limited("ending an expired call", self.end_expired_call(leadership, TaskId(call), read_ms)).await;
            let of_call = self.skip_faulty_row("call", call, swept)?;
            ended += usize::from(!of_call.is_empty());
            hints.extend(of_call);
        }
        Ok((hints, ended))
    }

    async fn end_expired_call(
        &self,
        leadership: Leadership,
        call: TaskId,
        read_ms: i64,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(row) = lock_task(&mut tx, call).await? else { return roll_back(tx, vec![]).await };
        // The client's scheduler may have extended the time since the query.
        let expired = sqlx::query_scalar!(
            r#"select call_expires < to_timestamp($2::float8 / 1000)
                      or call_expires > now() + $3::float8 * interval '1 millisecond' as "expired!"
               from tasks where id = $1 and state = 'call'"#,
            call.0,
            read_ms as f64,
            self.longest_call_ms()
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a call")?;
        if expired != Some(true) {
            return roll_back(tx, vec![]).await;
        }
        let hints = delete(&mut tx, &row, "the scheduler to which the client was connected was lost").await?;
        tx.commit().await.doing("ending an expired call")?;
        Ok(hints)
    }

    /// Time after which a call expires unless its scheduler extends it, in ms. Schedulers extend it several times in this
    /// time.
    fn call_ttl_ms(&self) -> f64 {
        CALL_TTLS * self.lease_ttl_ms()
    }

    /// Upper bound of the time until a call expires, in ms; the factor of two covers calls of a scheduler with another
    /// configuration.
    fn longest_call_ms(&self) -> f64 {
        2.0 * self.call_ttl_ms()
    }

    /// The call with this number, as in `c5`; `None` if it has ended.
    pub async fn find_call(&self, number: TaskNumber) -> Result<Option<TaskId>, StoreError> {
        let found = sqlx::query_scalar!("select id from tasks where number = $1 and state = 'call'", number.0)
            .fetch_optional(&self.pool)
            .await
            .doing("finding a call")?;
        Ok(found.map(TaskId))
    }

    /// Cancels the job of a call for a user; the client receives an error. False if the job has ended.
    pub async fn cancel_call(&self, call: TaskId) -> Result<(bool, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let Some(call) = lock_task(&mut tx, call).await?.filter(|task| task.is_call) else {
            return roll_back(tx, (false, vec![])).await;
        };
        let hints = cancel_jobs(&mut tx, &call, "cancelled by a user").await?;
        tx.commit().await.doing("cancelling a call")?;
        Ok((!hints.is_empty(), hints))
    }
}

/// Time after which a call expires unless its scheduler extends it, in lease TTLs.
const CALL_TTLS: f64 = 3.0;

/// Writes a call, which expires after `ttl_ms`, and its job. The transaction does not wait for the disk.
pub(super) async fn insert(
    connection: &mut PgConnection,
    job: JobId,
    call: NewClientCall,
    ttl_ms: f64,
) -> Result<(), StoreError> {
    let NewClientCall { id, token, model, priority, prompt } = call;
    let max_tokens = prompt.sampling.max_tokens;
    let bytes: usize = prompt.messages.iter().map(|message| message.content.len()).sum();
    let chain = prefix::of_prompt(model.as_str(), &prompt);
    sqlx::query!(
        r#"insert into tasks (id, number, state, call_expires, body_hash, spec, title, priority, threshold, max_iterations,
                              api_token)
           overriding system value
           values ($1, -nextval('call_numbers'), 'call', now() + $2::float8 * interval '1 millisecond', '', '{}', '', $3, 0, 1, $4)
           returning set_config('synchronous_commit', 'off', true)"#,
        id.0,
        ttl_ms,
        priority.as_i16(),
        token.0
    )
    .fetch_one(&mut *connection)
    .await
    .doing("writing a call")?;
    let prompt = payload::store(connection, id, prompt).await?;
    sqlx::query!(
        r#"insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state)
           values ($1, $2, 0, $3, 0, $4, $5, $6, $7, $8, $9, 'queued')"#,
        job.0,
        id.0,
        JobRole::Client.as_str(),
        model.as_str(),
        priority.as_i16(),
        AsJson(&prompt) as _,
        i64::try_from(bytes).unwrap_or(i64::MAX),
        AsJson(&chain) as _,
        i64::from(max_tokens)
    )
    .execute(connection)
    .await
    .doing("writing a call's job")?;
    Ok(())
}

/// Deletes a locked call and its job. The transaction does not wait for the disk.
pub(super) async fn delete(
    connection: &mut PgConnection,
    call: &TaskRow,
    reason: &str,
) -> Result<Vec<Hint>, StoreError> {
    let mut hints = cancel_jobs(connection, call, reason).await?;
    let blobs = sqlx::query_scalar!("select hash from blob_refs where task = $1", call.id.0)
        .fetch_all(&mut *connection)
        .await
        .doing("finding the blobs of a call")?;
    let jobs = sqlx::query!(
        r#"with of_call as (select id from jobs where task = $1),
                tried as (delete from attempts where job in (select id from of_call)),
                stored as (delete from blob_refs where task = $1),
                called as (delete from jobs where task = $1 returning id),
                owner as (delete from tasks where id = $1)
           select id, set_config('synchronous_commit', 'off', true) as asynchronous from called"#,
        call.id.0
    )
    .fetch_all(&mut *connection)
    .await
    .doing("deleting a call")?;
    if !blobs.is_empty() {
        delete_unreferenced(connection, &blobs).await?;
    }
    for job in jobs.into_iter().map(|job| Hint::Leader(LeaderHint::Job(JobId(job.id)))) {
        if !hints.contains(&job) {
            hints.push(job);
        }
    }
    Ok(hints)
}
