//! Task leases. A ready task is granted to a runner. The runner may release the task, or abandon it if it cannot
//! continue the task's loop.

use std::time::Duration;

use cfq_proto::blob::Payload;
use cfq_proto::event::{EventBody, RunnerChange};
use cfq_proto::ids::{JobId, LeaseId, RunnerId, TaskId, TaskNumber};
use cfq_proto::loop_step::Artifact;
use cfq_proto::messages::{
    Abandon, FenceReply, Grant, LeaseReply, LeaseRequest, Release, TaskFence, UnavailableReason,
};
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_scheduler_core::PendingReason;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::error::Doing;
use super::events::append;
use super::hints::Hint;
use super::reclaim::{RunnerLoss, reclaim};
use super::steps::committed_steps;
use super::tasks::lock_task;
use super::token_queues::{OnLocked, Pick, pick_ready_task};
use super::{Store, StoreError, agent_settings, artifacts, pause, payload, roll_back};

/// Maximum length of the stored reason for abandoning a task, in characters. It is limited because the text comes from
/// another machine.
const MAX_REASON_CHARS: usize = 2_000;
/// Interval at which a request tries again while another scheduler grants a task of the token that is next.
const WAIT_FOR_TOKENS: Duration = Duration::from_millis(20);
/// Maximum number of these tries; the last one chooses another token.
const MAX_TRIES_FOR_TOKENS: u32 = 10;

impl Store {
    /// Grants a ready task to a runner: the first one of the token with the fewest running tasks
    /// ([`cfq_scheduler_core::next_api_token`]). A repeated request gets the same grant again, as long as the runner has sent no
    /// heartbeat with its lease. The order of a token's tasks is that of `tasks.order_key`, which is set when a task is
    /// created and is computed like the planner's (`cfq_scheduler_core::order_key`).
    pub async fn grant(&self, runner: &RunnerId, request: &LeaseRequest) -> Result<LeaseReply, StoreError> {
        // While tokens have limits, the requests to this process take turns, without a connection. Other schedulers are
        // kept out by a lock in the database, for which a request tries several times.
        let _turn = self.shared.limited_grants.turn().await;
        let mut tries = 1;
        loop {
            let mut picked = None;
            let on_locked = if tries < MAX_TRIES_FOR_TOKENS { OnLocked::Return } else { OnLocked::Skip };
            match (self.grant_next(runner, request, on_locked, &mut picked).await, picked) {
                // Skip the faulty task for a while; otherwise every request would pick it again.
                (Err(error), Some(task)) if error.is_row_local() && !error.may_retry() => {
                    self.shared.row_backoff.defer("task", task, &error);
                }
                (Ok(None), _) if tries < MAX_TRIES_FOR_TOKENS => {
                    tries += 1;
                    tokio::time::sleep(WAIT_FOR_TOKENS).await;
                }
                (reply, _) => return reply.map(|reply| reply.unwrap_or(LeaseReply::None)),
            }
        }
    }

    /// Grants a task; `None` if another request grants a task of the token that is next just now.
    async fn grant_next(
        &self,
        runner: &RunnerId,
        request: &LeaseRequest,
        on_locked: OnLocked,
        picked: &mut Option<uuid::Uuid>,
    ) -> Result<Option<LeaseReply>, StoreError> {
        let mut tx = self.begin().await?;
        let known = sqlx::query_scalar!(
            r#"select true as "known!" from runners where id = $1 and boot = $2"#,
            runner.as_str(),
            request.boot.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a runner")?;
        if known.is_none() {
            let reason = UnavailableReason::NotRegistered;
            return roll_back(tx, Some(LeaseReply::Unavailable { reason })).await;
        }
        if let Some(repeated) = repeat_grant(&mut tx, runner, request, self.lease_ttl_ms()).await? {
            tx.commit().await.doing("repeating a grant")?;
            return Ok(Some(repeated));
        }
        let (row, last_granted_us) = match pick_ready_task(&mut tx, self.shared.row_backoff.rows(), on_locked).await? {
            Pick::Task { task, last_granted_us, has_limits } => {
                self.shared.limited_grants.set(has_limits);
                (task, last_granted_us)
            }
            Pick::None => return roll_back(tx, Some(LeaseReply::None)).await,
            Pick::Locked => {
                self.shared.limited_grants.set(true);
                return roll_back(tx, None).await;
            }
        };
        *picked = Some(row.id);
        tx.report(TaskId(row.id));
        let task = sqlx::query!(
            r#"select spec as "spec: Json<TaskSpec>", agents_without_model from tasks where id = $1"#,
            row.id
        )
        .fetch_one(&mut *tx)
        .await
        .doing("reading a task")?;
        let spec = agent_settings::apply_at_grant(&mut tx, task.spec.0, &task.agents_without_model).await?;
        let fence = TaskFence { task: TaskId(row.id), attempt: row.attempt + 1, lease: LeaseId::fresh() };
        sqlx::query!(
            r#"update tasks set state = 'running', attempt = $2, lease = $3, runner = $4, runner_boot = $5, updated_at = now(),
                      reason = '', waits_for = null, stalled = false, preempted_by = null, agents_changed = false, lease_request = $7,
                      granted_at = greatest(clock_timestamp(),
                                            timestamptz 'epoch' + ($8::bigint + 1) * interval '1 microsecond'),
                      lease_expires = clock_timestamp() + $6::float8 * interval '1 millisecond'
               where id = $1"#,
            row.id,
            fence.attempt,
            fence.lease.0,
            runner.as_str(),
            request.boot.0,
            self.lease_ttl_ms(),
            request.request.map(|id| id.0),
            last_granted_us
        )
        .execute(&mut *tx)
        .await
        .doing("granting a task")?;
        let state = EventBody::TaskStateChanged {
            from: TaskState::Ready,
            to: TaskState::Running,
            reason: format!("granted to {runner}"),
        };
        append(&mut tx, fence.task, &state).await?;
        let granted = EventBody::RunnerChanged {
            runner: runner.to_string(),
            attempt: fence.attempt,
            change: RunnerChange::Granted,
        };
        append(&mut tx, fence.task, &granted).await?;
        let grant = Grant {
            fence,
            number: TaskNumber(row.number),
            reviewed: reviewed_artifacts(&mut tx, &spec).await?,
            spec: for_runner(spec),
            created_at: row.created_at,
            steps: committed_steps(&mut tx, fence.task).await?,
        };
        let grant: Payload<Grant> = payload::store(&mut tx, fence.task, grant).await?;
        cfq_link::failpoint::hit("scheduler.grant.before_commit");
        tx.commit().await.doing("committing a grant")?;
        cfq_link::failpoint::hit("scheduler.grant.after_commit");
        Ok(Some(LeaseReply::Granted { lease: fence.lease, grant }))
    }

    /// Lets ready tasks be granted whose job is not pending any more. Every change of a job does this for its task, except
    /// in versions of cfq before the column was used in this way, so the leader does it now and then.
    pub async fn resume_tasks_without_pending_job(&self) -> Result<(), StoreError> {
        sqlx::query!(
            r#"update tasks set waits_for = null
               where id in (select t.id from tasks t join jobs j on j.id = t.waits_for
                            where t.state = 'ready' and j.state not in ('queued', 'placed')
                            for no key update of t skip locked)"#
        )
        .execute(&self.pool)
        .await
        .doing("finding tasks that wait for no job")?;
        Ok(())
    }

    /// Moves a running task back to ready when its runner releases it, or to paused if that was requested. This does not count as a loss. A repeated
    /// request gets the same reply until the task is granted again.
    pub async fn release(&self, runner: &RunnerId, request: &Release) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, request.fence.task).await? else {
            return roll_back(tx, (FenceReply::Stale, vec![])).await;
        };
        if !task.is_held_by(runner, &request.fence) {
            let is_repeat = matches!(task.state, TaskState::Ready | TaskState::Paused)
                && task.attempt == request.fence.attempt
                && task.runner.as_ref() == Some(runner);
            return roll_back(tx, (if is_repeat { FenceReply::Committed } else { FenceReply::Stale }, vec![])).await;
        }
        let pending = match request.waits_for {
            Some(job) => wait_for_job(&mut tx, task.id, job).await?,
            None => None,
        };
        let reason = pending.unwrap_or_else(|| format!("released by {runner}"));
        let hints = pause::make_ready(&mut tx, &task, &reason).await?;
        tx.commit().await.doing("releasing a task")?;
        Ok((FenceReply::Committed, hints))
    }

    /// Takes a task back from a runner that cannot continue it, because the runner cannot read a step or a step is
    /// illegal. This counts as a loss, because another runner, or another version, may be able to continue. The reason
    /// is stored, so that a task that no runner can continue fails with this reason and not only with a count.
    pub async fn abandon(&self, runner: &RunnerId, request: &Abandon) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, request.fence.task).await?;
        let Some(task) = task.filter(|t| t.is_held_by(runner, &request.fence)) else {
            return roll_back(tx, (FenceReply::Stale, vec![])).await;
        };
        let loss = RunnerLoss::Abandoned { reason: request.reason.chars().take(MAX_REASON_CHARS).collect() };
        let hints = reclaim(&mut tx, &task, &loss, self.limits.max_task_losses).await?;
        tx.commit().await.doing("abandoning a task")?;
        Ok((FenceReply::Committed, hints))
    }
}

/// Returns the grant that answered an earlier request with the same id, and extends its lease; `None` if there is none.
/// Until the transaction ends, another request with this id waits, so that two of them never get two tasks.
async fn repeat_grant(
    connection: &mut PgConnection,
    runner: &RunnerId,
    request: &LeaseRequest,
    lease_ttl_ms: f64,
) -> Result<Option<LeaseReply>, StoreError> {
    let Some(id) = request.request else { return Ok(None) };
    sqlx::query!("select pg_advisory_xact_lock(hashtextextended($1, 0))", id.to_string())
        .execute(&mut *connection)
        .await
        .doing("repeating a grant")?;
    let granted = sqlx::query!(
        r#"update tasks set lease_expires = clock_timestamp() + $4::float8 * interval '1 millisecond'
           where lease is not null and lease_request = $1 and runner = $2 and runner_boot = $3
           returning id, number, attempt, lease as "lease!", spec as "spec: Json<TaskSpec>", agents_without_model,
                     extract(epoch from created_at)::bigint as "created_at!""#,
        id.0,
        runner.as_str(),
        request.boot.0,
        lease_ttl_ms
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("repeating a grant")?;
    let Some(row) = granted else { return Ok(None) };
    let fence = TaskFence { task: TaskId(row.id), attempt: row.attempt, lease: LeaseId(row.lease) };
    let spec = agent_settings::apply(connection, row.spec.0, &row.agents_without_model).await?;
    let grant = Grant {
        fence,
        number: TaskNumber(row.number),
        reviewed: reviewed_artifacts(connection, &spec).await?,
        spec: for_runner(spec),
        created_at: row.created_at,
        steps: committed_steps(connection, fence.task).await?,
    };
    let grant = payload::store(connection, fence.task, grant).await?;
    Ok(Some(LeaseReply::Granted { lease: fence.lease, grant }))
}

/// The artifact that the task reviews, after those on which it is based; none if it reviews commits of the repository, or
/// if the artifact was deleted with its task.
async fn reviewed_artifacts(connection: &mut PgConnection, spec: &TaskSpec) -> Result<Vec<Artifact>, StoreError> {
    let Some(artifact) = spec.review.as_ref().and_then(|review| review.artifact) else { return Ok(Vec::new()) };
    let chain = artifacts::chain_of(connection, artifact).await?;
    Ok(chain.map_or_else(Vec::new, |chain| chain.artifacts))
}

/// The specification without the fields that only the scheduler uses. A runner of an earlier version refuses fields that
/// it does not know.
fn for_runner(spec: TaskSpec) -> TaskSpec {
    TaskSpec { labels: Vec::new(), after: Vec::new(), run_at: None, retry_of: None, name: None, ..spec }
}

/// Records the job that a task waits for, and returns why the job is pending. `None` if the job is not pending any
/// more.
async fn wait_for_job(connection: &mut PgConnection, task: TaskId, job: JobId) -> Result<Option<String>, StoreError> {
    let placement = sqlx::query_scalar!(
        r#"update tasks set waits_for = jobs.id from jobs
           where tasks.id = $1 and jobs.task = tasks.id and jobs.id = $2 and jobs.state in ('queued', 'placed')
           returning jobs.placement"#,
        task.0,
        job.0
    )
    .fetch_optional(connection)
    .await
    .doing("recording the job that a task waits for")?;
    Ok(placement.map(|reason| if reason.is_empty() { PendingReason::Capacity.to_string() } else { reason }))
}
