//! A node takes an order, or refuses it.

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{Accept, FenceReply, JobFence, Refusal, Refuse};
use sqlx::PgConnection;

use super::attempts;
use super::error::{Doing, plain, read};
use super::hint::{Hint, LeaderHint};
use super::jobs::{changed, leave_node};
use super::tasks::{TaskRow, lock_task};
use super::{Store, StoreError, nothing};

impl Store {
    /// Placed -> running; the lease lives from here. Repeating it is answered alike.
    pub async fn accept(&self, node: &NodeId, ask: &Accept) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let Some(task) = self.task_of(ask.fence.job).await? else { return Ok((FenceReply::Stale, vec![])) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, (FenceReply::Stale, vec![])).await };
        match held(&mut tx, node, ask.boot.0, &ask.fence).await? {
            Some(JobState::Placed) => {}
            Some(JobState::Running) => return nothing(tx, (FenceReply::Committed, vec![])).await,
            Some(JobState::Queued | JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled)
            | None => {
                return nothing(tx, (FenceReply::Stale, vec![])).await;
            }
        }
        sqlx::query!(
            r#"update jobs set state = 'running', accepted_at = now(), updated_at = now(),
                      lease_expires = now() + $2::float8 * interval '1 millisecond'
               where id = $1"#,
            ask.fence.job.0,
            self.lease_ttl_ms()
        )
        .execute(&mut *tx)
        .await
        .doing("accepting a job")?;
        sqlx::query!(
            "update attempts set accepted_at = now() where job = $1 and attempt = $2",
            ask.fence.job.0,
            ask.fence.attempt
        )
        .execute(&mut *tx)
        .await
        .doing("recording an acceptance")?;
        changed(&mut tx, task.id, ask.fence.job, "accepted").await?;
        cfq_link::failpoint::hit("scheduler.accept.before_commit");
        tx.commit().await.doing("committing an acceptance")?;
        cfq_link::failpoint::hit("scheduler.accept.after_commit");
        Ok((FenceReply::Committed, hints(&task, ask.fence.job)))
    }

    /// Placed -> queued, nothing counted; the node, or the job, remembers why.
    pub async fn refuse(&self, node: &NodeId, ask: &Refuse) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let Some(task) = self.task_of(ask.fence.job).await? else { return Ok((FenceReply::Stale, vec![])) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, (FenceReply::Stale, vec![])).await };
        match held(&mut tx, node, ask.boot.0, &ask.fence).await? {
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
                let reply = repeated(&mut tx, &ask.fence, "refused").await?;
                return nothing(tx, (reply, vec![])).await;
            }
        }
        let why = match &ask.refusal {
            Refusal::NotNow { need, have, ledger_version } => {
                leave_out(&mut tx, node, ask, *need, *ledger_version).await?;
                match need {
                    Some(need) => {
                        format!("{node} has no room now: needs {need} tokens, has {have} (ledger {ledger_version})")
                    }
                    None => format!("{node} has no room now (ledger {ledger_version})"),
                }
            }
            Refusal::Never { reason } => {
                let reason = plain(reason);
                sqlx::query!(
                    r#"update jobs set never = (never::jsonb || jsonb_build_object($2::text, $3::text))::json where id = $1"#,
                    ask.fence.job.0,
                    node.as_str(),
                    reason
                )
                .execute(&mut *tx)
                .await
                .doing("recording a refusal")?;
                format!("{node} can never run it: {reason}")
            }
        };
        attempts::end_current(&mut tx, ask.fence.job, "refused", &why).await?;
        leave_node(&mut tx, ask.fence.job, JobState::Queued).await?;
        changed(&mut tx, task.id, ask.fence.job, &why).await?;
        cfq_link::failpoint::hit("scheduler.refuse.before_commit");
        tx.commit().await.doing("committing a refusal")?;
        cfq_link::failpoint::hit("scheduler.refuse.after_commit");
        let mut told = hints(&task, ask.fence.job);
        told.push(Hint::Leader(LeaderHint::Node(node.clone())));
        Ok((FenceReply::Committed, told))
    }
}

/// The node gets no more of this model until its ledger is a later one; what it counted exactly is kept with the job.
async fn leave_out(
    connection: &mut PgConnection,
    node: &NodeId,
    ask: &Refuse,
    need: Option<u64>,
    ledger_version: u64,
) -> Result<(), StoreError> {
    let need = need.map(|need| i64::try_from(need).unwrap_or(i64::MAX));
    let model = sqlx::query_scalar!(
        "update jobs set known_need = coalesce($2, known_need) where id = $1 returning model",
        ask.fence.job.0,
        need
    )
    .fetch_one(&mut *connection)
    .await
    .doing("keeping a node's count")?;
    sqlx::query!(
        r#"update nodes set left_out = (left_out::jsonb || jsonb_build_object($3::text,
                      jsonb_build_object('version', $4::bigint, 'at_ms', (extract(epoch from now()) * 1000)::bigint)))::json
           where id = $1 and boot = $2"#,
        node.as_str(),
        ask.boot.0,
        model,
        i64::try_from(ledger_version).unwrap_or(i64::MAX)
    )
    .execute(connection)
    .await
    .doing("leaving a node out")?;
    Ok(())
}

/// The state of the job, locked, if this fence is its current one and this boot of the node holds it.
pub(super) async fn held(
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
    state.map(|s| read("job state", &s)).transpose()
}

/// Whoever drives the task hears of its job; where nobody does, it may be what the task waits for.
pub(super) fn hints(task: &TaskRow, job: JobId) -> Vec<Hint> {
    let told = match (&task.runner, task.lease) {
        (Some(runner), Some(_)) => Hint::JobChanged { runner: runner.clone(), task: task.id, job },
        _ => Hint::WorkWaits,
    };
    vec![Hint::Leader(LeaderHint::Job(job)), told]
}

/// The answer to a report about an attempt that is not current: the same as before if this is what was committed then.
pub(super) async fn repeated(
    connection: &mut PgConnection,
    fence: &JobFence,
    told: &str,
) -> Result<FenceReply, StoreError> {
    let before = attempts::outcome(connection, fence).await?;
    Ok(if before.as_deref() == Some(told) { FenceReply::Committed } else { FenceReply::Stale })
}
