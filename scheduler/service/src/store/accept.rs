//! Preparation, acceptance or refusal of a work order by its node.

use cfq_proto::ids::{NodeId, TaskId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{Accept, FenceReply, JobFence, Preparing, Refusal, Refuse};
use sqlx::PgConnection;

use super::attempts::{self, AttemptOutcome};
use super::columns::{parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, LeaderHint, for_changed_job};
use super::jobs::{append_job_changed, leave_node};
use super::tasks::{lock_for_progress, lock_task};
use super::{Store, StoreError, roll_back};

impl Store {
    /// Records that the node is preparing the prompt of a placed job, so that its time to accept the job starts again.
    /// Reports that follow each other closely are recorded once.
    pub async fn preparing(&self, node: &NodeId, request: &Preparing) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let recorded = sqlx::query_scalar!(
            r#"with current as (
                   select id, placed_at, preparing_at from jobs
                   where id = $1 and attempt = $2 and lease = $3 and node = $4 and node_boot = $5 and state = 'placed'
               ), recorded as (
                   update jobs set preparing_at = now(), updated_at = now() from current
                   where jobs.id = current.id and jobs.lease = $3 and jobs.state = 'placed'
                     and (current.preparing_at is null
                          or current.preparing_at < now() - $6::float8 * interval '1 millisecond')
                   returning jobs.id
               )
               select exists (select from recorded) as "recorded!" from current"#,
            request.fence.job.0,
            request.fence.attempt,
            request.fence.lease.0,
            node.as_str(),
            request.boot.0,
            self.timing.accept_timeout_ms as f64 / 6.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("recording that a node prepares a job")?;
        Ok(match recorded {
            Some(true) => (FenceReply::Committed, vec![Hint::Leader(LeaderHint::Job(request.fence.job))]),
            Some(false) => (FenceReply::Committed, vec![]),
            None => (FenceReply::Stale, vec![]),
        })
    }

    /// Whether this attempt runs, and its job is one of this task.
    pub async fn is_running(&self, task: TaskId, fence: &JobFence) -> Result<bool, StoreError> {
        let running = sqlx::query_scalar!(
            r#"select exists (
                   select from jobs where id = $1 and attempt = $2 and lease = $3 and task = $4 and state = 'running'
               ) as "running!""#,
            fence.job.0,
            fence.attempt,
            fence.lease.0,
            task.0
        );
        running.fetch_one(&self.pool).await.doing("checking whether a job runs")
    }

    /// Moves an accepted job from placed to running. From then on its lease can expire. A repeated request gets the
    /// same reply.
    pub async fn accept(&self, node: &NodeId, request: &Accept) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let Some(task) = self.task_of(request.fence.job).await? else { return Ok((FenceReply::Stale, vec![])) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_for_progress(&mut tx, task).await? else {
            return roll_back(tx, (FenceReply::Stale, vec![])).await;
        };
        match lock_current_job(&mut tx, node, request.boot.0, &request.fence).await? {
            Some(JobState::Placed) => {}
            Some(JobState::Running) => return roll_back(tx, (FenceReply::Committed, vec![])).await,
            Some(JobState::Queued | JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled)
            | None => {
                return roll_back(tx, (FenceReply::Stale, vec![])).await;
            }
        }
        sqlx::query!(
            r#"update jobs set state = 'running', accepted_at = now(), updated_at = now(),
                      lease_expires = now() + $2::float8 * interval '1 millisecond'
               where id = $1"#,
            request.fence.job.0,
            self.lease_ttl_ms()
        )
        .execute(&mut *tx)
        .await
        .doing("accepting a job")?;
        sqlx::query!(
            "update attempts set accepted_at = now() where job = $1 and attempt = $2",
            request.fence.job.0,
            request.fence.attempt
        )
        .execute(&mut *tx)
        .await
        .doing("recording an acceptance")?;
        append_job_changed(&mut tx, &task, request.fence.job, "accepted").await?;
        cfq_link::failpoint::hit("scheduler.accept.before_commit");
        tx.commit().await.doing("committing an acceptance")?;
        cfq_link::failpoint::hit("scheduler.accept.after_commit");
        Ok((FenceReply::Committed, for_changed_job(&task, request.fence.job)))
    }

    /// Moves a refused job from placed back to queued. A refusal counts neither as a failure nor as a loss. `NotNow`
    /// excludes the node from jobs of this model for now; `Never` is recorded with the job, as the reason why this node
    /// cannot run it.
    pub async fn refuse(&self, node: &NodeId, request: &Refuse) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let Some(task) = self.task_of(request.fence.job).await? else { return Ok((FenceReply::Stale, vec![])) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else {
            return roll_back(tx, (FenceReply::Stale, vec![])).await;
        };
        match lock_current_job(&mut tx, node, request.boot.0, &request.fence).await? {
            Some(JobState::Placed) => {}
            Some(
                JobState::Queued
                | JobState::Running
                | JobState::Done
                | JobState::Failed
                | JobState::Dead
                | JobState::Cancelled,
            )
            | None => {
                let reply = reply_to_repeat(&mut tx, &request.fence, AttemptOutcome::Refused).await?;
                return roll_back(tx, (reply, vec![])).await;
            }
        }
        let reason = match &request.refusal {
            Refusal::NotNow { need, have, ledger_version } => {
                exclude_node(&mut tx, node, request, *need, *ledger_version).await?;
                match need {
                    Some(need) => {
                        format!(
                            "{node} has no capacity now: the job needs {need} tokens, and {have} are free (version \
                             {ledger_version} of the node's state)"
                        )
                    }
                    None => format!("{node} has no capacity now (version {ledger_version} of the node's state)"),
                }
            }
            Refusal::Never { reason } => {
                let reason = pg_text(reason);
                sqlx::query!(
                    r#"update jobs set refused_by = (refused_by::jsonb || jsonb_build_object($2::text, $3::text))::json
                       where id = $1"#,
                    request.fence.job.0,
                    node.as_str(),
                    reason
                )
                .execute(&mut *tx)
                .await
                .doing("recording a refusal")?;
                format!("{node} cannot run the job: {reason}")
            }
        };
        attempts::end_current(&mut tx, request.fence.job, AttemptOutcome::Refused, &reason).await?;
        leave_node(&mut tx, request.fence.job, JobState::Queued).await?;
        append_job_changed(&mut tx, &task, request.fence.job, &reason).await?;
        cfq_link::failpoint::hit("scheduler.refuse.before_commit");
        tx.commit().await.doing("committing a refusal")?;
        cfq_link::failpoint::hit("scheduler.refuse.after_commit");
        let mut hints = for_changed_job(&task, request.fence.job);
        hints.push(Hint::Leader(LeaderHint::Node(node.clone())));
        Ok((FenceReply::Committed, hints))
    }
}

/// Excludes the node from this model's jobs until the node reports a later version of its ledger (its models and free
/// capacity). If the node counted the tokens that the job needs, the number is stored in the job's row.
async fn exclude_node(
    connection: &mut PgConnection,
    node: &NodeId,
    request: &Refuse,
    need: Option<u64>,
    ledger_version: u64,
) -> Result<(), StoreError> {
    let need = need.map(|need| i64::try_from(need).unwrap_or(i64::MAX));
    let model = sqlx::query_scalar!(
        "update jobs set counted_tokens = coalesce($2, counted_tokens) where id = $1 returning model",
        request.fence.job.0,
        need
    )
    .fetch_one(&mut *connection)
    .await
    .doing("recording a node's token count")?;
    sqlx::query!(
        r#"update nodes set exclusions = (exclusions::jsonb || jsonb_build_object($3::text,
                      jsonb_build_object('version', $4::bigint, 'at_ms', (extract(epoch from now()) * 1000)::bigint)))::json
           where id = $1 and boot = $2"#,
        node.as_str(),
        request.boot.0,
        model,
        i64::try_from(ledger_version).unwrap_or(i64::MAX)
    )
    .execute(connection)
    .await
    .doing("excluding a node")?;
    Ok(())
}

/// Locks the job and returns its state; `None` unless the fence is its current one and this boot of the node holds it.
pub(super) async fn lock_current_job(
    connection: &mut PgConnection,
    node: &NodeId,
    boot: uuid::Uuid,
    fence: &JobFence,
) -> Result<Option<JobState>, StoreError> {
    let state = sqlx::query_scalar!(
        "select state from jobs where id = $1 and attempt = $2 and lease = $3 and node = $4 and node_boot = $5 for update",
        fence.job.0,
        fence.attempt,
        fence.lease.0,
        node.as_str(),
        boot
    )
    .fetch_optional(connection)
    .await
    .doing("checking a job's fence")?;
    state.map(|s| parse("job state", &s)).transpose()
}

/// The reply to a report about an attempt that is not current: `Committed` if the same outcome was committed before,
/// else `Stale`.
pub(super) async fn reply_to_repeat(
    connection: &mut PgConnection,
    fence: &JobFence,
    outcome: AttemptOutcome,
) -> Result<FenceReply, StoreError> {
    let committed = attempts::outcome(connection, fence).await?;
    Ok(if committed == Some(outcome) { FenceReply::Committed } else { FenceReply::Stale })
}
