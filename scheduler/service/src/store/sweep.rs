//! Sweep of expired leases: their jobs and tasks are requeued. Each row is processed in its own leader transaction,
//! which checks the lease and its expiry again, so a heartbeat, a completion or a cancel that committed first wins.
//! Rows are independent: a faulty row does not stop the sweep of the others, and a locked row is left for the next sweep.
//!
//! A lease whose expiry time is later than any heartbeat could have set was written before the database's clock was set
//! back, and counts as expired. A live holder renews it within the grace period that follows such a clock step; without
//! this rule, a lease that has no holder any more would stay valid for as long as the clock was set back.

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_scheduler_core::UnreportedEnd;

use super::columns::parse;
use super::earlier_boot::BootEnd;
use super::error::Doing;
use super::hints::Hint;
use super::leader::{Leadership, lock_leader_row};
use super::reclaim::{RunnerLoss, reclaim};
use super::tasks::lock_task;
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

/// Ids of nodes and runners whose heartbeats could not be written a moment ago, although they arrived.
#[derive(Debug, Clone, Default)]
pub struct UnwrittenHolders {
    pub nodes: Vec<String>,
    pub runners: Vec<String>,
}

impl Store {
    /// Ends expired job and task leases, except those of `unwritten` holders. Returns the hints, the number of ended job
    /// leases and the number of ended task leases.
    ///
    /// `read_ms` is a recent reading of the database's clock: a lease that expires after it is not ended. So if this
    /// process is stopped meanwhile, holders can still extend their leases when it continues.
    pub async fn sweep(
        &self,
        leadership: Leadership,
        read_ms: i64,
        unwritten: &UnwrittenHolders,
    ) -> Result<(Vec<Hint>, usize, usize), StoreError> {
        let found = sqlx::query!(
            r#"select jobs.id, jobs.task, jobs.lease as "lease!" from jobs join tasks on tasks.id = jobs.task
               where jobs.state = 'running' and jobs.node <> all($3)
                 and (jobs.lease_expires < to_timestamp($2::float8 / 1000)
                   or jobs.lease_expires > now() + $1::float8 * interval '1 millisecond')
               for no key update skip locked"#,
            self.longest_lease_ms(),
            read_ms as f64,
            &unwritten.nodes
        )
        .fetch_all(&self.pool);
        let jobs =
            limited("finding expired job leases", async { found.await.doing("finding expired job leases") }).await?;
        let found = sqlx::query!(
            r#"select id, lease as "lease!" from tasks
               where lease is not null and runner <> all($3)
                 and (lease_expires < to_timestamp($2::float8 / 1000)
                      or lease_expires > now() + $1::float8 * interval '1 millisecond')
               for no key update skip locked"#,
            self.longest_lease_ms(),
            read_ms as f64,
            &unwritten.runners
        )
        .fetch_all(&self.pool);
        let tasks =
            limited("finding expired task leases", async { found.await.doing("finding expired task leases") }).await?;
        let (mut hints, mut jobs_lost, mut tasks_lost) = (Vec::new(), 0, 0);
        for job in jobs {
            let (task, id, lease) = (TaskId(job.task), JobId(job.id), LeaseId(job.lease));
            let ended = self.end_job_lease(leadership, task, id, lease, read_ms);
            let swept = limited("ending an expired lease", ended).await;
            let job_hints = self.skip_faulty_row("job", job.id, swept)?;
            jobs_lost += usize::from(!job_hints.is_empty());
            hints.extend(job_hints);
        }
        for task in tasks {
            let ended = self.end_task_lease(leadership, TaskId(task.id), LeaseId(task.lease), read_ms);
            let swept = limited("ending an expired lease", ended).await;
            let task_hints = self.skip_faulty_row("task", task.id, swept)?;
            tasks_lost += usize::from(!task_hints.is_empty());
            hints.extend(task_hints);
        }
        Ok((hints, jobs_lost, tasks_lost))
    }

    /// Returns the hints of one processed row. If an error concerns only this row, it is logged and there are no hints,
    /// so that the caller continues with the next row. Any other error is returned.
    pub(super) fn skip_faulty_row(
        &self,
        what: &'static str,
        row: uuid::Uuid,
        result: Result<Vec<Hint>, StoreError>,
    ) -> Result<Vec<Hint>, StoreError> {
        match result {
            Err(error) if error.is_row_local() && error.may_retry() => {
                let cause = std::error::Error::source(&error);
                tracing::warn!(what, %row, %error, ?cause, "row is locked; skipped for now");
                Ok(vec![])
            }
            Err(error) if error.is_row_local() => {
                self.shared.row_backoff.defer(what, row, &error);
                Ok(vec![])
            }
            result => result,
        }
    }

    async fn end_job_lease(
        &self,
        leadership: Leadership,
        task: TaskId,
        job: JobId,
        lease: LeaseId,
        read_ms: i64,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, vec![]).await };
        let expired = sqlx::query!(
            r#"select node as "node!", node_boot as "boot!" from jobs where id = $1 and lease = $2 and state = 'running'
                 and (lease_expires < to_timestamp($4::float8 / 1000)
                      or lease_expires > now() + $3::float8 * interval '1 millisecond') for update"#,
            job.0,
            lease.0,
            self.longest_lease_ms(),
            read_ms as f64
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let Some(holder) = expired else { return roll_back(tx, vec![]).await };
        let node: NodeId = parse("node", &holder.node)?;
        let end = self.end_of_expired_lease(&mut tx, &node, BootId(holder.boot)).await?;
        let reason = self.expiry_reason(&node, end);
        let hints = self.end_lost_attempt(&mut tx, &task, job, end, &reason).await?;
        cfq_link::failpoint::hit("scheduler.sweep.before_commit");
        tx.commit().await.doing("ending an expired lease")?;
        cfq_link::failpoint::hit("scheduler.sweep.after_commit");
        Ok(hints)
    }

    /// Why a job's lease expired, shown to users.
    fn expiry_reason(&self, node: &NodeId, end: UnreportedEnd) -> String {
        match end {
            UnreportedEnd::Stalled | UnreportedEnd::NotAccepted => {
                let seconds = self.timing.job_step_timeout_ms / 1000;
                format!("{node} sends heartbeats, but completed no step of the job in {seconds} s")
            }
            UnreportedEnd::NodeLost => format!("{node} was lost: its heartbeats stopped"),
            UnreportedEnd::Infrastructure => {
                format!("{node} was stopped, or its machine was restarted, before it released the job")
            }
        }
    }

    async fn end_task_lease(
        &self,
        leadership: Leadership,
        task: TaskId,
        lease: LeaseId,
        read_ms: i64,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await?.filter(|t| t.lease == Some(lease)) else {
            return roll_back(tx, vec![]).await;
        };
        let expired = sqlx::query!(
            r#"select stalled, lease_request is not null as "unconfirmed!",
                      exists (select from runners where runners.id = tasks.runner
                                and (runners.boot = tasks.runner_boot
                                     and restart_seen_at > now() - $3::float8 * interval '1 millisecond'
                                  or runners.earlier_boot = tasks.runner_boot and earlier_boot_end = $5)) as "restarted!"
               from tasks where id = $1 and lease = $2
                 and (lease_expires < to_timestamp($4::float8 / 1000)
                      or lease_expires > now() + $3::float8 * interval '1 millisecond')"#,
            task.id.0,
            lease.0,
            self.longest_lease_ms(),
            read_ms as f64,
            BootEnd::MachineRestarted.as_str()
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let loss = match expired {
            None => return roll_back(tx, vec![]).await,
            Some(row) if row.stalled => RunnerLoss::Stalled { ms: self.timing.task_step_timeout_ms },
            Some(row) if row.unconfirmed => RunnerLoss::NotReceived,
            Some(row) if row.restarted => RunnerLoss::MachineRestarted,
            Some(_) => RunnerLoss::LeaseExpired,
        };
        let hints = reclaim(&mut tx, &task, &loss, self.limits.max_task_losses).await?;
        cfq_link::failpoint::hit("scheduler.sweep.before_commit");
        tx.commit().await.doing("ending an expired lease")?;
        cfq_link::failpoint::hit("scheduler.sweep.after_commit");
        Ok(hints)
    }
}
