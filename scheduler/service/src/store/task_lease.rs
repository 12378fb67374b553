//! A runner takes a ready task, keeps it, hands it back.

use cfq_proto::blob::Carried;
use cfq_proto::event::EventBody;
use cfq_proto::ids::{BootId, JobId, LeaseId, RunnerId, TaskId, TaskNumber};
use cfq_proto::looping::{Step, StepRecord};
use cfq_proto::messages::{FenceReply, Grant, LeaseReply, Release, TaskFence};
use cfq_proto::task::{TaskSpec, TaskState};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::error::Doing;
use super::events::append;
use super::hint::Hint;
use super::tasks::{lock_task, move_task};
use super::{Store, StoreError, carried, nothing};

impl Store {
    /// Grants the ready task that goes first. The order is the planner's (`cfq_scheduler_core::rank`): a class, one better
    /// for every ten minutes of age, then the deadline, then the age; older than forty minutes goes before all.
    pub async fn grant(&self, runner: &RunnerId, boot: BootId) -> Result<LeaseReply, StoreError> {
        loop {
            let mut picked = None;
            match (self.grant_next(runner, boot, &mut picked).await, picked) {
                // One task at fault would otherwise be every runner's next, for ever.
                (Err(error), Some(task)) if error.spares_others() && !error.may_retry() => {
                    self.aside.put("task", task, &error);
                }
                (answer, _) => return answer,
            }
        }
    }

    async fn grant_next(
        &self,
        runner: &RunnerId,
        boot: BootId,
        picked: &mut Option<uuid::Uuid>,
    ) -> Result<LeaseReply, StoreError> {
        let mut tx = self.begin().await?;
        let known = sqlx::query_scalar!(
            r#"select true as "known!" from runners where id = $1 and boot = $2"#,
            runner.as_str(),
            boot.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a runner")?;
        if known.is_none() {
            return nothing(
                tx,
                LeaseReply::Unavailable { reason: "this start of the runner has not said hello".into() },
            )
            .await;
        }
        let ready = sqlx::query!(
            r#"select id, number, attempt, extract(epoch from created_at)::bigint as "created_at!"
               from tasks where state = 'ready' and id <> all($3)
                 and not exists (select from jobs where jobs.id = tasks.waits_for and jobs.state in ('queued', 'placed'))
               order by case when now() - created_at >= $1::float8 * interval '1 millisecond' then -1
                        else greatest(priority - floor(extract(epoch from now() - created_at) * 1000 / $2::float8), 0) end,
                        case when now() - created_at >= $1::float8 * interval '1 millisecond' then null else deadline end
                        nulls last, created_at, number
               limit 1 for update skip locked"#,
            cfq_scheduler_core::OVERDUE_MS as f64,
            cfq_scheduler_core::AGE_STEP_MS as f64,
            &self.aside.rows()
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("picking a ready task")?;
        let Some(row) = ready else { return nothing(tx, LeaseReply::None).await };
        *picked = Some(row.id);
        let spec = sqlx::query_scalar!(r#"select spec as "spec: Json<TaskSpec>" from tasks where id = $1"#, row.id)
            .fetch_one(&mut *tx)
            .await
            .doing("reading a task")?;
        let fence = TaskFence { task: TaskId(row.id), attempt: row.attempt + 1, lease: LeaseId::fresh() };
        sqlx::query!(
            r#"update tasks set state = 'running', attempt = $2, lease = $3, runner = $4, runner_boot = $5, updated_at = now(),
                      reason = '', waits_for = null, stuck = false,
                      lease_expires = clock_timestamp() + $6::float8 * interval '1 millisecond'
               where id = $1"#,
            row.id,
            fence.attempt,
            fence.lease.0,
            runner.as_str(),
            boot.0,
            self.lease_ttl_ms()
        )
        .execute(&mut *tx)
        .await
        .doing("granting a task")?;
        let state = EventBody::TaskStateChanged {
            from: TaskState::Ready,
            to: TaskState::Running,
            reason: format!("taken by {runner}"),
        };
        append(&mut tx, fence.task, &state).await?;
        let taken = EventBody::RunnerChanged {
            runner: runner.to_string(),
            attempt: fence.attempt,
            what: "took the task".into(),
        };
        append(&mut tx, fence.task, &taken).await?;
        let grant = Grant {
            fence,
            number: TaskNumber(row.number),
            spec: spec.0,
            created_at: row.created_at,
            steps: steps(&mut tx, fence.task).await?,
        };
        let grant: Carried<Grant> = carried::carry(&mut tx, fence.task, grant).await?;
        cfq_link::failpoint::hit("scheduler.grant.before_commit");
        tx.commit().await.doing("committing a grant")?;
        cfq_link::failpoint::hit("scheduler.grant.after_commit");
        Ok(LeaseReply::Granted { lease: fence.lease, grant })
    }

    /// Running -> ready, nothing counted. Repeating it is answered alike as long as nobody took the task since.
    pub async fn release(&self, runner: &RunnerId, ask: &Release) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, ask.fence.task).await? else {
            return nothing(tx, (FenceReply::Stale, vec![])).await;
        };
        if !task.is_held_by(runner, &ask.fence) {
            let again = task.state == TaskState::Ready
                && task.attempt == ask.fence.attempt
                && task.runner.as_ref() == Some(runner);
            return nothing(tx, (if again { FenceReply::Committed } else { FenceReply::Stale }, vec![])).await;
        }
        let waits = match ask.waits_for {
            Some(job) => waits_for(&mut tx, task.id, job).await?,
            None => None,
        };
        let back = waits.unwrap_or_else(|| format!("handed back by {runner}"));
        if !move_task(&mut tx, &task, TaskState::Ready, &back).await? {
            return nothing(tx, (FenceReply::Stale, vec![])).await;
        }
        tx.commit().await.doing("taking a task back")?;
        Ok((FenceReply::Committed, vec![Hint::WorkWaits]))
    }
}

/// Notes the job that a task waits for, and says why it has no place. `None` if it has one by now.
async fn waits_for(connection: &mut PgConnection, task: TaskId, job: JobId) -> Result<Option<String>, StoreError> {
    let placement = sqlx::query_scalar!(
        r#"update tasks set waits_for = jobs.id from jobs
           where tasks.id = $1 and jobs.task = tasks.id and jobs.id = $2 and jobs.state in ('queued', 'placed')
           returning jobs.placement"#,
        task.0,
        job.0
    )
    .fetch_optional(connection)
    .await
    .doing("noting what a task waits for")?;
    Ok(placement.map(|why| if why.is_empty() { "waits for room on a node".to_owned() } else { why }))
}

/// All committed steps, in order.
pub(super) async fn steps(connection: &mut PgConnection, task: TaskId) -> Result<Vec<StepRecord>, StoreError> {
    let rows = sqlx::query!(
        r#"select seq, step as "step: Json<Step>", active_ms, extract(epoch from at)::bigint as "at!"
           from steps where task = $1 order by seq"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("reading a task's steps")?;
    Ok(rows
        .into_iter()
        .map(|r| StepRecord { seq: r.seq, step: r.step.0, active_ms: r.active_ms.max(0) as u64, at: r.at })
        .collect())
}
