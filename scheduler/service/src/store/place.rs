//! The leader's writes on queued and placed jobs. Each holds the leader row, so a plan of a leader that was replaced is
//! rejected; publishing follows only a commit.

use cfq_proto::blob::Carried;
use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobFailure, JobState, Prompt};
use cfq_proto::messages::{JobFence, WorkOrder};
use cfq_scheduler_core::Waiting;
use sqlx::types::Json;

use super::accept::hints;
use super::as_json::AsJson;
use super::attempts;
use super::error::{Doing, plain, read};
use super::hint::Hint;
use super::jobs::{changed, leave_node};
use super::leader::{Leadership, hold_lead};
use super::tasks::lock_task;
use super::{Store, StoreError, journal, nothing};

/// One placement as the planner wants it. `attempt` is the new one.
#[derive(Debug, Clone)]
pub struct PlaceOrder {
    pub job: JobId,
    pub attempt: i32,
    pub node: NodeId,
    pub boot: BootId,
    pub reason: String,
}

impl Store {
    /// Queued -> placed. `None` if the job, or the node's boot, is not what the planner saw. A node takes it, so what was
    /// counted while none could is over; the ladder of its own failures is not.
    pub async fn place(&self, lead: Leadership, order: &PlaceOrder) -> Result<Option<WorkOrder>, StoreError> {
        let Some(task) = self.task_of(order.job).await? else { return Ok(None) };
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        lock_task(&mut tx, task).await?;
        let lease = LeaseId::fresh();
        let reason = plain(&order.reason);
        let placed = sqlx::query!(
            r#"update jobs set state = 'placed', attempt = $2, lease = $3, node = $4, node_boot = $5, placed_at = now(),
                      placement = $6, updated_at = now(), no_node_ms = 0,
                      first_failure_at = case when setbacks::text = '{}' then null else first_failure_at end
               where id = $1 and state = 'queued' and attempt = $2 - 1
                 and exists (select from nodes where nodes.id = $4 and nodes.boot = $5)
               returning role, model, prompt as "prompt: Json<Carried<Prompt>>""#,
            order.job.0,
            order.attempt,
            lease.0,
            order.node.as_str(),
            order.boot.0,
            reason
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("placing a job")?;
        let Some(row) = placed else { return nothing(tx, None).await };
        sqlx::query!(
            "insert into attempts (job, attempt, lease, node, node_boot, placement) values ($1, $2, $3, $4, $5, $6)",
            order.job.0,
            order.attempt,
            lease.0,
            order.node.as_str(),
            order.boot.0,
            reason
        )
        .execute(&mut *tx)
        .await
        .doing("recording an attempt")?;
        journal::pass_on(&mut tx, order.job, order.attempt).await?;
        let written = journal::begun_with(&mut tx, order.job, order.attempt).await?;
        changed(&mut tx, task, order.job, &reason).await?;
        cfq_link::failpoint::hit("scheduler.place.before_commit");
        tx.commit().await.doing("committing a placement")?;
        cfq_link::failpoint::hit("scheduler.place.after_commit");
        Ok(Some(WorkOrder {
            fence: JobFence { job: order.job, attempt: order.attempt, lease },
            task,
            role: read("role", &row.role)?,
            model: read("model", &row.model)?,
            prompt: row.prompt.0,
            written,
        }))
    }

    /// The order of an attempt that is still only placed, to publish it again.
    pub async fn placed_order(&self, fence: JobFence) -> Result<Option<WorkOrder>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("reading a placed job")?;
        let row = sqlx::query!(
            r#"select task, role, model, prompt as "prompt: Json<Carried<Prompt>>" from jobs
               where id = $1 and attempt = $2 and lease = $3 and state = 'placed'"#,
            fence.job.0,
            fence.attempt,
            fence.lease.0
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("reading a placed job")?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(WorkOrder {
            fence,
            task: TaskId(row.task),
            role: read("role", &row.role)?,
            model: read("model", &row.model)?,
            prompt: row.prompt.0,
            written: journal::begun_with(&mut connection, fence.job, fence.attempt).await?,
        }))
    }

    /// Placed -> queued: nobody accepted it, so nothing is counted.
    pub async fn unplace(&self, lead: Leadership, fence: JobFence, why: &str) -> Result<bool, StoreError> {
        let Some(task) = self.task_of(fence.job).await? else { return Ok(false) };
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        lock_task(&mut tx, task).await?;
        let current = sqlx::query!(
            "select id from jobs where id = $1 and attempt = $2 and lease = $3 and state = 'placed' for update",
            fence.job.0,
            fence.attempt,
            fence.lease.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a placed job")?;
        if current.is_none() {
            return nothing(tx, false).await;
        }
        attempts::end_current(&mut tx, fence.job, "unplaced", why).await?;
        leave_node(&mut tx, fence.job, JobState::Queued).await?;
        changed(&mut tx, task, fence.job, why).await?;
        tx.commit().await.doing("taking a placement back")?;
        Ok(true)
    }

    /// Queued -> failed, for what the planner alone can see.
    pub async fn fail_queued(
        &self,
        lead: Leadership,
        job: JobId,
        attempt: i32,
        failure: &JobFailure,
    ) -> Result<Option<Vec<Hint>>, StoreError> {
        let Some(task) = self.task_of(job).await? else { return Ok(None) };
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, None).await };
        let done = sqlx::query!(
            r#"update jobs set state = 'failed', failure = $3, updated_at = now()
               where id = $1 and attempt = $2 and state = 'queued'"#,
            job.0,
            attempt,
            AsJson(failure) as _
        )
        .execute(&mut *tx)
        .await
        .doing("failing a job")?;
        if done.rows_affected() == 0 {
            return nothing(tx, None).await;
        }
        changed(&mut tx, task.id, job, &failure.to_string()).await?;
        tx.commit().await.doing("failing a job")?;
        Ok(Some(hints(&task, job)))
    }

    /// Every node that has the model says it cannot serve it: from now on the retry ceiling counts.
    pub async fn note_unavailable(
        &self,
        lead: Leadership,
        job: JobId,
        attempt: i32,
        reason: &str,
    ) -> Result<bool, StoreError> {
        let Some(task) = self.task_of(job).await? else { return Ok(false) };
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        lock_task(&mut tx, task).await?;
        let failure = JobFailure::Unavailable { reason: reason.to_owned() };
        let done = sqlx::query!(
            r#"update jobs set failure = $3, first_failure_at = now(), placement = $4, updated_at = now()
               where id = $1 and attempt = $2 and state = 'queued' and first_failure_at is null"#,
            job.0,
            attempt,
            AsJson(&failure) as _,
            plain(&format!("waits: {reason}"))
        )
        .execute(&mut *tx)
        .await
        .doing("noting that a model is unavailable")?;
        if done.rows_affected() == 0 {
            return nothing(tx, false).await;
        }
        changed(&mut tx, task, job, reason).await?;
        tx.commit().await.doing("noting that a model is unavailable")?;
        Ok(true)
    }

    /// Why a queued job waits, for people, and for how long no node had its model, for the next leader.
    pub async fn explain(
        &self,
        lead: Leadership,
        job: JobId,
        attempt: i32,
        waiting: &Waiting,
        no_node_ms: u64,
    ) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let done = sqlx::query!(
            r#"update jobs set placement = $3, no_node_ms = $4,
                      first_failure_at = case when $5 and setbacks::text = '{}' then null else first_failure_at end
               where id = $1 and attempt = $2 and state = 'queued'"#,
            job.0,
            attempt,
            plain(&waiting.to_string()),
            i64::try_from(no_node_ms).unwrap_or(i64::MAX),
            waiting.is_served()
        )
        .execute(&mut *tx)
        .await
        .doing("explaining why a job waits")?;
        tx.commit().await.doing("explaining why a job waits")?;
        Ok(done.rows_affected() == 1)
    }

    /// A job's task never changes, so it can be read before anything is locked.
    pub(super) async fn task_of(&self, job: JobId) -> Result<Option<TaskId>, StoreError> {
        let task = sqlx::query_scalar!("select task from jobs where id = $1", job.0)
            .fetch_optional(&self.pool)
            .await
            .doing("finding a job's task")?;
        Ok(task.map(TaskId))
    }
}
