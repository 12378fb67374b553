//! The leader's writes on queued and placed jobs. Each of them locks the leader row, so the plan of a scheduler that is
//! no longer the leader is rejected. Work orders are published only after the commit.

use cfq_proto::blob::Payload;
use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobFailure, JobRole, Prompt};
use cfq_proto::messages::{JobFence, WorkOrder};
use cfq_proto::model::ModelId;
use cfq_proto::task::TaskState;
use cfq_scheduler_core::{PendingReason, UnreportedEnd, join_by_node};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::{AsJson, parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, for_changed_job};
use super::jobs::append_job_changed;
use super::leader::{Leadership, lock_leader_row};
use super::tasks::{lock_for_progress, lock_task};
use super::{Store, StoreError, journal, roll_back};

/// One placement that the planner decided: a job's next attempt and its node.
#[derive(Debug, Clone)]
pub struct PlaceOrder {
    pub job: JobId,
    /// Number of the new attempt.
    pub attempt: i32,
    pub node: NodeId,
    pub boot: BootId,
    /// Why the planner chose this node; shown to users.
    pub reason: String,
}

/// What a node needs of a job that was placed.
pub(super) struct Placed {
    role: JobRole,
    model: ModelId,
    prompt: Payload<Prompt>,
}

/// Moves a job from queued to placed; `None` if the job or the node's boot changed since the plan was made. If it is the
/// job of a client's call, the transaction does not wait for the disk.
pub(super) async fn mark_placed(
    connection: &mut PgConnection,
    order: &PlaceOrder,
    lease: LeaseId,
    reason: &str,
) -> Result<Option<Placed>, StoreError> {
    let row = sqlx::query!(
        r#"update jobs set state = 'placed', attempt = $2, lease = $3, node = $4, node_boot = $5, placed_at = now(), preparing_at = null,
                      placement = $6, updated_at = now(), no_node_ms = 0,
                      first_failure_at = case when node_failures::text = '{}' then null else first_failure_at end
               where id = $1 and state = 'queued' and attempt = $2 - 1
                 and exists (select from nodes where nodes.id = $4 and nodes.boot = $5 and nodes.cordoned_at is null)
               returning role, model, prompt as "prompt: Json<Payload<Prompt>>",
                         case when role = 'client' then set_config('synchronous_commit', 'off', true) end as asynchronous"#,
        order.job.0,
        order.attempt,
        lease.0,
        order.node.as_str(),
        order.boot.0,
        reason
    )
    .fetch_optional(connection)
    .await
    .doing("placing a job")?;
    let Some(row) = row else { return Ok(None) };
    let (role, model) = (parse("role", &row.role)?, parse("model", &row.model)?);
    Ok(Some(Placed { role, model, prompt: row.prompt.0 }))
}

impl Store {
    /// Moves a job from queued to placed. `None` if the job or the node's boot changed since the plan was made, or
    /// if the task is paused. Resets the times counted while no node could serve the job, but not the backoff after
    /// failed attempts.
    pub async fn place(&self, leadership: Leadership, order: &PlaceOrder) -> Result<Option<WorkOrder>, StoreError> {
        let Some(task) = self.task_of(order.job).await? else { return Ok(None) };
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let task = lock_for_progress(&mut tx, task).await?.filter(|task| task.state != TaskState::Paused);
        let Some(task) = task else { return roll_back(tx, None).await };
        let lease = LeaseId::fresh();
        let reason = pg_text(&order.reason);
        let placed = mark_placed(&mut tx, order, lease, &reason).await?;
        let Some(row) = placed else { return roll_back(tx, None).await };
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
        let generated = match order.attempt {
            // No earlier attempt has generated anything.
            ..=1 => None,
            _ => {
                journal::inherit(&mut tx, order.job, order.attempt).await?;
                journal::resume_tokens(&mut tx, order.job, order.attempt).await?
            }
        };
        append_job_changed(&mut tx, &task, order.job, &reason).await?;
        cfq_link::failpoint::hit("scheduler.place.before_commit");
        tx.commit().await.doing("committing a placement")?;
        cfq_link::failpoint::hit("scheduler.place.after_commit");
        Ok(Some(WorkOrder {
            fence: JobFence { job: order.job, attempt: order.attempt, lease },
            task: task.id,
            role: row.role,
            model: row.model,
            prompt: row.prompt,
            generated,
        }))
    }

    /// The work order of an attempt that is still placed, to publish it again; `None` if it is not placed any more.
    pub async fn placed_order(&self, fence: JobFence) -> Result<Option<WorkOrder>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("reading a placed job")?;
        let row = sqlx::query!(
            r#"select task, role, model, prompt as "prompt: Json<Payload<Prompt>>" from jobs
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
            role: parse("role", &row.role)?,
            model: parse("model", &row.model)?,
            prompt: row.prompt.0,
            generated: journal::resume_tokens(&mut connection, fence.job, fence.attempt).await?,
        }))
    }

    /// Moves a job from placed back to queued, because its node did not accept it in time or was lost, or ends it as a
    /// dead letter if this happened too often. `None` if the attempt is not placed any more.
    pub async fn unplace(
        &self,
        leadership: Leadership,
        fence: JobFence,
        end: UnreportedEnd,
        reason: &str,
    ) -> Result<Option<Vec<Hint>>, StoreError> {
        let Some(task) = self.task_of(fence.job).await? else { return Ok(None) };
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, None).await };
        let current = sqlx::query!(
            r#"select node as "node!", node_boot as "boot!" from jobs
               where id = $1 and attempt = $2 and lease = $3 and state = 'placed' for update"#,
            fence.job.0,
            fence.attempt,
            fence.lease.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a placed job")?;
        let Some(holder) = current else { return roll_back(tx, None).await };
        let (node, boot) = (parse("node", &holder.node)?, BootId(holder.boot));
        let is_infrastructure = self.is_stopped_by_infrastructure(&mut tx, &node, boot).await?;
        let end = if is_infrastructure { UnreportedEnd::Infrastructure } else { end };
        let hints = self.end_lost_attempt(&mut tx, &task, fence.job, end, reason).await?;
        tx.commit().await.doing("revoking a placement")?;
        Ok(Some(hints))
    }

    /// Moves a job from queued to failed, for failures that only the planner detects. `None` if the job changed since
    /// the plan was made.
    pub async fn fail_queued(
        &self,
        leadership: Leadership,
        job: JobId,
        attempt: i32,
        failure: &JobFailure,
    ) -> Result<Option<Vec<Hint>>, StoreError> {
        let Some(task) = self.task_of(job).await? else { return Ok(None) };
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let task = lock_task(&mut tx, task).await?.filter(|task| task.state != TaskState::Paused);
        let Some(task) = task else { return roll_back(tx, None).await };
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
            return roll_back(tx, None).await;
        }
        append_job_changed(&mut tx, &task, job, &failure.to_string()).await?;
        tx.commit().await.doing("failing a job")?;
        Ok(Some(for_changed_job(&task, job)))
    }

    /// Records that none of the nodes that have the job's model can serve it, and starts the time that the retry
    /// ceiling limits. False if the job changed since the plan was made, or if that time had already started.
    pub async fn note_unavailable(
        &self,
        leadership: Leadership,
        job: JobId,
        attempt: i32,
        reason: &str,
    ) -> Result<bool, StoreError> {
        let Some(task) = self.task_of(job).await? else { return Ok(false) };
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, false).await };
        let failure = JobFailure::Unavailable { reason: reason.to_owned() };
        let done = sqlx::query!(
            r#"update jobs set failure = $3, first_failure_at = now(), placement = $4, updated_at = now()
               where id = $1 and attempt = $2 and state = 'queued' and first_failure_at is null"#,
            job.0,
            attempt,
            AsJson(&failure) as _,
            pg_text(&format!("waits: {reason}"))
        )
        .execute(&mut *tx)
        .await
        .doing("recording that a model is unavailable")?;
        if done.rows_affected() == 0 {
            return roll_back(tx, false).await;
        }
        append_job_changed(&mut tx, &task, job, reason).await?;
        tx.commit().await.doing("recording that a model is unavailable")?;
        Ok(true)
    }

    /// Records why a queued job is pending (shown to users), and for how long no node has had its model (so that the
    /// next leader continues to count). False if the job changed since the plan was made.
    pub async fn explain(
        &self,
        leadership: Leadership,
        job: JobId,
        attempt: i32,
        pending: &PendingReason,
        no_node_ms: u64,
    ) -> Result<bool, StoreError> {
        // What the nodes report now, for a job whose recorded failure is an earlier report and not that of an attempt.
        let reported = match pending {
            PendingReason::Unusable { reasons } => Some(join_by_node(reasons)),
            PendingReason::NoNodeHasModel { model } => Some(format!("no running node has the model {model}")),
            PendingReason::NoNodeUp
            | PendingReason::Loading { .. }
            | PendingReason::Backoff
            | PendingReason::Yielding { .. }
            | PendingReason::Cordoned { .. }
            | PendingReason::ExclusiveNode { .. }
            | PendingReason::ReservedNode { .. }
            | PendingReason::Capacity => None,
        };
        let reported = reported.map(|reason| AsJson(JobFailure::Unavailable { reason }));
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let done = sqlx::query!(
            r#"update jobs set placement = $3, no_node_ms = $4,
                      failure = case when failure ->> 'type' = 'unavailable' and failures = 0 then coalesce($6, failure)
                                     else failure end,
                      first_failure_at = case when $5 and node_failures::text = '{}' then null else first_failure_at end
               where id = $1 and attempt = $2 and state = 'queued'"#,
            job.0,
            attempt,
            pg_text(&pending.to_string()),
            i64::try_from(no_node_ms).unwrap_or(i64::MAX),
            pending.is_served(),
            reported as _
        )
        .execute(&mut *tx)
        .await
        .doing("recording why a job is pending")?;
        tx.commit().await.doing("recording why a job is pending")?;
        Ok(done.rows_affected() == 1)
    }

    /// The task of a job. It never changes, so it can be read before any lock is taken. The job may have been deleted since.
    pub(super) async fn task_of(&self, job: JobId) -> Result<Option<TaskId>, StoreError> {
        if let Some(task) = self.shared.job_tasks.get(job) {
            return Ok(Some(task));
        }
        let task = sqlx::query_scalar!("select task from jobs where id = $1", job.0)
            .fetch_optional(&self.pool)
            .await
            .doing("finding a job's task")?
            .map(TaskId);
        task.into_iter().for_each(|task| self.shared.job_tasks.add(job, task));
        Ok(task)
    }
}
