//! What ran out of time goes back. Each row is one leader transaction that compares the lease it saw and its expiry again,
//! so a beat, a completion or a cancel that came first wins; and each row by itself, so that one at fault stops no other.
//!
//! A lease that expires later than any beat could have said was written before the database's clock was set back. A holder
//! that lives renews it within the grace that follows such a step; without one it would look held for as long as the step
//! was.

use cfq_proto::ids::{JobId, LeaseId, TaskId};
use cfq_proto::job::JobState;
use sqlx::PgConnection;

use super::accept::hints;
use super::error::Doing;
use super::hint::Hint;
use super::jobs::{changed, leave_node, park};
use super::leader::{Leadership, hold_lead};
use super::take_back::{Lost, take_back};
use super::tasks::{TaskRow, lock_task};
use super::{Store, StoreError, attempts, nothing};

impl Store {
    /// Ends expired job and task leases. Returns hints and how many (jobs, tasks) were lost.
    pub async fn sweep(&self, lead: Leadership) -> Result<(Vec<Hint>, usize, usize), StoreError> {
        let jobs = sqlx::query!(
            r#"select id, task, lease as "lease!", node as "node!" from jobs
               where state = 'running' and lease_expires not between now() and now() + $1::float8 * interval '1 millisecond'"#,
            self.longest_lease_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding expired job leases")?;
        let tasks = sqlx::query!(
            r#"select id, lease as "lease!" from tasks
               where lease_expires not between now() and now() + $1::float8 * interval '1 millisecond'"#,
            self.longest_lease_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding expired task leases")?;
        let (mut hints, mut jobs_lost, mut tasks_lost) = (Vec::new(), 0, 0);
        for job in jobs {
            let why = format!("its lease on {} ran out: not heard from, or no step done", job.node);
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
            r#"select id from jobs where id = $1 and lease = $2 and state = 'running'
                 and lease_expires not between now() and now() + $3::float8 * interval '1 millisecond' for update"#,
            job.0,
            lease.0,
            self.longest_lease_ms()
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        if expired.is_none() {
            return nothing(tx, vec![]).await;
        }
        let hints = lose(&mut tx, &task, job, why, self.limits.max_losses).await?;
        cfq_link::failpoint::hit("scheduler.sweep.before_commit");
        tx.commit().await.doing("ending an expired lease")?;
        cfq_link::failpoint::hit("scheduler.sweep.after_commit");
        Ok(hints)
    }

    async fn lose_task(&self, lead: Leadership, task: TaskId, lease: LeaseId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        hold_lead(&mut tx, lead).await?;
        let Some(task) = lock_task(&mut tx, task).await?.filter(|t| t.lease == Some(lease)) else {
            return nothing(tx, vec![]).await;
        };
        let expired = sqlx::query_scalar!(
            r#"select stuck from tasks where id = $1 and lease = $2
                 and lease_expires not between now() and now() + $3::float8 * interval '1 millisecond'"#,
            task.id.0,
            lease.0,
            self.longest_lease_ms()
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let why = match expired {
            None => return nothing(tx, vec![]).await,
            Some(true) => Lost::Stuck { ms: self.timing.task_step_ms },
            Some(false) => Lost::Gone("was not heard from".to_owned()),
        };
        let hints = take_back(&mut tx, &task, &why, self.limits.max_task_losses).await?;
        cfq_link::failpoint::hit("scheduler.sweep.before_commit");
        tx.commit().await.doing("ending an expired lease")?;
        cfq_link::failpoint::hit("scheduler.sweep.after_commit");
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
    if losses > max_losses {
        park(connection, job, &format!("lost its node {losses} times")).await?;
    } else {
        leave_node(connection, job, JobState::Queued).await?;
    }
    changed(connection, task.id, job, why).await?;
    Ok(hints(task, job))
}
