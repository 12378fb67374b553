//! What ran out of time goes back. Each row is one leader transaction that compares the lease it saw and its expiry again,
//! so a beat, a completion or a cancel that came first wins; and each row by itself, so that one at fault stops no other.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, LeaseId, TaskId};
use cfq_proto::job::JobState;
use cfq_proto::looping::LoopState;
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::error::Doing;
use super::events::append;
use super::hint::{Hint, LeaderHint};
use super::jobs::{changed, leave_node, park};
use super::leader::{Leadership, hold_lead};
use super::tasks::{TaskRow, cancel_jobs, lock_task, move_task};
use super::{Store, StoreError, attempts, effects, nothing};

impl Store {
    /// Ends expired job and task leases. Returns hints and how many (jobs, tasks) were lost.
    pub async fn sweep(&self, lead: Leadership) -> Result<(Vec<Hint>, usize, usize), StoreError> {
        let jobs = sqlx::query!(
            r#"select id, task, lease as "lease!", node as "node!" from jobs
               where state in ('placed', 'running') and lease_expires < now()"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding expired job leases")?;
        let tasks = sqlx::query!(
            r#"select id, lease as "lease!" from tasks where lease is not null and lease_expires < now()"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding expired task leases")?;
        let (mut hints, mut jobs_lost, mut tasks_lost) = (Vec::new(), 0, 0);
        for job in jobs {
            let why = format!("{} was not heard from", job.node);
            let lost = self.lose_job(lead, TaskId(job.task), JobId(job.id), LeaseId(job.lease), &why).await;
            let told = self.swept("job", job.id, lost)?;
            jobs_lost += usize::from(!told.is_empty());
            hints.extend(told);
        }
        for task in tasks {
            let lost = self.lose_task(lead, TaskId(task.id), LeaseId(task.lease)).await;
            let told = self.swept("task", task.id, lost)?;
            tasks_lost += usize::from(!told.is_empty());
            hints.extend(told);
        }
        Ok((hints, jobs_lost, tasks_lost))
    }

    /// A row that cannot be swept keeps no other from it.
    pub(super) fn swept(
        &self,
        what: &'static str,
        row: uuid::Uuid,
        lost: Result<Vec<Hint>, StoreError>,
    ) -> Result<Vec<Hint>, StoreError> {
        match lost {
            Err(error) if error.spares_others() && error.may_retry() => {
                tracing::warn!(what, %row, %error, cause = ?std::error::Error::source(&error), "a row is not free now");
                Ok(vec![])
            }
            Err(error) if error.spares_others() => {
                self.aside.put(what, row, &error);
                Ok(vec![])
            }
            lost => lost,
        }
    }

    async fn lose_job(
        &self,
        lead: Leadership,
        task: TaskId,
        job: JobId,
        lease: LeaseId,
        why: &str,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, vec![]).await };
        let expired = sqlx::query_scalar!(
            "select id from jobs where id = $1 and lease = $2 and state = 'running' and lease_expires < now() for update",
            job.0,
            lease.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        if expired.is_none() {
            return nothing(tx, vec![]).await;
        }
        let hints = lose(&mut tx, &task, job, why, self.limits.max_losses).await?;
        tx.commit().await.doing("ending an expired lease")?;
        Ok(hints)
    }

    async fn lose_task(&self, lead: Leadership, task: TaskId, lease: LeaseId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let Some(task) = lock_task(&mut tx, task).await?.filter(|t| t.lease == Some(lease)) else {
            return nothing(tx, vec![]).await;
        };
        let expired = sqlx::query_scalar!(
            "select id from tasks where id = $1 and lease = $2 and lease_expires < now()",
            task.id.0,
            lease.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        if expired.is_none() {
            return nothing(tx, vec![]).await;
        }
        let hints = take_back(&mut tx, &task, "was not heard from", self.limits.max_task_losses).await?;
        tx.commit().await.doing("ending an expired lease")?;
        Ok(hints)
    }
}

/// Counts a lost attempt of a locked, running job: back to the queue, or dead with the evidence.
pub(super) async fn lose(
    connection: &mut PgConnection,
    task: &TaskRow,
    job: JobId,
    why: &str,
    max_losses: i32,
) -> Result<Vec<Hint>, StoreError> {
    attempts::end_current(connection, job, "lost", why).await?;
    let losses = sqlx::query_scalar!("update jobs set losses = losses + 1 where id = $1 returning losses", job.0)
        .fetch_one(&mut *connection)
        .await
        .doing("counting a loss")?;
    let mut hints = vec![Hint::Leader(LeaderHint::Job(job))];
    if losses > max_losses {
        park(connection, job, &format!("lost its node {losses} times")).await?;
    } else {
        leave_node(connection, job, JobState::Queued).await?;
    }
    if let Some(runner) = task.runner.clone().filter(|_| task.lease.is_some()) {
        hints.push(Hint::JobChanged { runner, task: task.id, job });
    }
    changed(connection, task.id, job, why).await?;
    Ok(hints)
}

/// Takes a locked task from its runner: ready again, or failed if that went on too often without a step between.
pub(super) async fn take_back(
    connection: &mut PgConnection,
    task: &TaskRow,
    why: &str,
    max_losses: i32,
) -> Result<Vec<Hint>, StoreError> {
    let losses = task.losses + 1;
    sqlx::query!("update tasks set losses = $2 where id = $1", task.id.0, losses)
        .execute(&mut *connection)
        .await
        .doing("counting a loss")?;
    let runner = task.runner.as_ref().map(ToString::to_string).unwrap_or_default();
    let lost = EventBody::RunnerChanged { runner: runner.clone(), attempt: task.attempt, what: format!("lost: {why}") };
    append(connection, task.id, &lost).await?;
    let mut hints = Vec::new();
    if losses > max_losses {
        let reason = format!(
            "{losses} runners in a row were lost with this task before its next step ({runner} last, which {why}); it is not tried again"
        );
        move_task(connection, task, TaskState::Failed, &reason).await?;
        sqlx::query!("update tasks set loop_state = $2 where id = $1", task.id.0, LoopState::Failed.as_str())
            .execute(&mut *connection)
            .await
            .doing("ending a loop")?;
        hints.extend(cancel_jobs(connection, task.id, &reason).await?);
        effects::close_pr(connection, task, TaskState::Failed).await?;
    } else {
        move_task(connection, task, TaskState::Ready, &format!("{runner} {why}")).await?;
        hints.push(Hint::WorkWaits);
    }
    if let (Some(runner), Some(fence)) = (task.runner.clone(), task.fence()) {
        hints.push(Hint::CancelTask { runner, fence });
    }
    Ok(hints)
}
