//! A node takes an order, or refuses it.

use cfq_proto::ids::NodeId;
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
        tx.commit().await.doing("committing an acceptance")?;
        Ok((FenceReply::Committed, hints(&task, ask.fence)))
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
                let before = attempts::outcome(&mut tx, &ask.fence).await?;
                let reply =
                    if before.as_deref() == Some("refused") { FenceReply::Committed } else { FenceReply::Stale };
                return nothing(tx, (reply, vec![])).await;
            }
        }
        let why = match &ask.refusal {
            Refusal::NotNow { need, have, ledger_version } => {
                self.leave_out(&mut tx, node, ask, *need, *ledger_version).await?;
                format!("{node} has no room now: needs {need}, has {have} (ledger {ledger_version})")
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
        tx.commit().await.doing("committing a refusal")?;
        let mut told = hints(&task, ask.fence);
        told.push(Hint::Leader(LeaderHint::Node(node.clone())));
        Ok((FenceReply::Committed, told))
    }

    async fn leave_out(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        ask: &Refuse,
        need: u64,
        ledger_version: u64,
    ) -> Result<(), StoreError> {
        sqlx::query!(
            "update nodes set left_out_version = $3, left_out_at = now() where id = $1 and boot = $2",
            node.as_str(),
            ask.boot.0,
            i64::try_from(ledger_version).unwrap_or(i64::MAX)
        )
        .execute(&mut *connection)
        .await
        .doing("leaving a node out")?;
        // The node counted exactly; the number is kept.
        sqlx::query!(
            "update jobs set known_need = $2 where id = $1",
            ask.fence.job.0,
            i64::try_from(need).unwrap_or(i64::MAX)
        )
        .execute(connection)
        .await
        .doing("keeping a node's count")?;
        Ok(())
    }
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

pub(super) fn hints(task: &TaskRow, fence: JobFence) -> Vec<Hint> {
    let runner = task.runner.clone().filter(|_| task.lease.is_some());
    let changed = runner.map(|runner| Hint::JobChanged { runner, task: task.id, job: fence.job });
    std::iter::once(Hint::Leader(LeaderHint::Job(fence.job))).chain(changed).collect()
}
