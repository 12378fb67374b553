//! Registration of runners.

use cfq_proto::ids::{BootId, LeaseId, RunnerId, TaskId};
use cfq_proto::messages::RunnerRegistration;

use super::columns::pg_text;
use super::earlier_boot::{BootEnd, EarlierBoot, IdInUse, NewBoot};
use super::error::Doing;
use super::hints::Hint;
use super::reclaim::{RunnerLoss, reclaim};
use super::tasks::{TaskRow, lock_task};
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

impl Store {
    /// Writes the runner's row, unless the process of another boot may be alive. Then the tasks that earlier boots of
    /// the runner hold are released; a repetition of the registration and the sweep release those that are left.
    pub async fn register_runner(
        &self,
        registration: &RunnerRegistration,
    ) -> Result<Result<Vec<Hint>, IdInUse>, StoreError> {
        if let Err(in_use) = self.write_runner(registration).await? {
            return Ok(Err(in_use));
        }
        Ok(Ok(self.release_tasks_of_earlier_boots(Some(&registration.runner)).await?))
    }

    /// Writes the runner's row, and how the boot before ended.
    async fn write_runner(&self, registration: &RunnerRegistration) -> Result<Result<(), IdInUse>, StoreError> {
        let RunnerRegistration { runner, boot, version, machine_boot, credentials_lock, slots } = registration;
        let slots = slots.map(|slots| i32::try_from(slots).unwrap_or(i32::MAX));
        let machine_boot = machine_boot.as_deref().map(pg_text);
        let credentials_lock = credentials_lock.as_deref().map(pg_text);
        let mut tx = self.begin().await?;
        let inserted = sqlx::query!(
            r#"insert into runners (id, boot, version, machine_boot, credentials_lock, slots)
               values ($1, $2, $3, $4, $5, $6) on conflict (id) do nothing"#,
            runner.as_str(),
            boot.0,
            pg_text(version),
            machine_boot,
            credentials_lock,
            slots
        )
        .execute(&mut *tx)
        .await
        .doing("writing a runner")?;
        if inserted.rows_affected() == 1 {
            tx.commit().await.doing("writing a runner")?;
            return Ok(Ok(()));
        }
        // A time too far in the future was written before the database's clock was set back.
        let before = sqlx::query!(
            r#"select boot, machine_boot, credentials_lock,
                      exists (select from tasks where runner = runners.id and runner_boot = runners.boot
                                and lease is not null) as "holds_work!",
                      greatest(0, extract(epoch from greatest(
                          case when last_seen < now() + $2::float8 * interval '1 millisecond'
                               then last_seen + $2::float8 * interval '1 millisecond' end,
                          (select max(lease_expires) from tasks
                           where runner = runners.id and runner_boot = runners.boot and lease is not null
                             and lease_expires < now() + $3::float8 * interval '1 millisecond')
                      ) - clock_timestamp()) * 1000)::bigint as "lease_ms!"
               from runners where id = $1 for update"#,
            runner.as_str(),
            self.lease_ttl_ms(),
            self.longest_lease_ms()
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a runner")?;
        let before = EarlierBoot {
            boot: BootId(before.boot),
            machine_boot: before.machine_boot,
            credentials_lock: before.credentials_lock,
            is_draining: false,
            holds_work: before.holds_work,
            lease_ms: before.lease_ms,
        };
        let new = NewBoot {
            boot: *boot,
            machine_boot: machine_boot.as_deref(),
            credentials_lock: credentials_lock.as_deref(),
        };
        if let Err(in_use) = before.check(new) {
            if before.is_other_machine_boot(new) {
                sqlx::query!("update runners set restart_seen_at = now() where id = $1", runner.as_str())
                    .execute(&mut *tx)
                    .await
                    .doing("writing a runner")?;
            }
            tx.commit().await.doing("writing a runner")?;
            return Ok(Err(in_use));
        }
        sqlx::query!(
            r#"update runners set boot = $2, version = $3, machine_boot = $4, credentials_lock = $5, last_seen = now(),
                      restart_seen_at = null, slots = $7,
                      earlier_boot = case when boot = $2 then earlier_boot else boot end,
                      earlier_boot_end = case when boot = $2 then earlier_boot_end else $6 end
               where id = $1"#,
            runner.as_str(),
            boot.0,
            pg_text(version),
            machine_boot,
            credentials_lock,
            before.end(new).as_str(),
            slots
        )
        .execute(&mut *tx)
        .await
        .doing("writing a runner")?;
        tx.commit().await.doing("writing a runner")?;
        Ok(Ok(()))
    }

    /// Releases the tasks that earlier boots of this runner, or of all runners, hold. A task whose row is locked or
    /// faulty is left for the next call.
    pub async fn release_tasks_of_earlier_boots(&self, runner: Option<&RunnerId>) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query!(
            r#"select tasks.id, tasks.lease as "lease!", runners.boot,
                      case when tasks.runner_boot = runners.earlier_boot then runners.earlier_boot_end end as boot_end
               from tasks join runners on runners.id = tasks.runner
               where tasks.lease is not null and tasks.runner_boot <> runners.boot
                 and ($1::text is null or runners.id = $1) and tasks.id <> all($2)"#,
            runner.map(RunnerId::as_str),
            &self.shared.row_backoff.rows()
        )
        .fetch_all(&self.pool);
        let doing = "finding the tasks of an earlier boot";
        let rows = limited(doing, async { found.await.doing(doing) }).await?;
        let mut hints = Vec::new();
        for row in rows {
            let loss = match BootEnd::from_stored(row.boot_end.as_deref()) {
                BootEnd::MachineRestarted => RunnerLoss::MachineRestarted,
                BootEnd::Drained | BootEnd::Unexpected => RunnerLoss::Restarted,
            };
            let (task, lease) = (TaskId(row.id), LeaseId(row.lease));
            let released = self.release_old_task(BootId(row.boot), &loss, task, lease);
            let released = limited("releasing the tasks of an earlier boot", released).await;
            hints.extend(self.skip_faulty_row("task", row.id, released)?);
        }
        Ok(hints)
    }

    async fn release_old_task(
        &self,
        boot: BootId,
        loss: &RunnerLoss,
        task: TaskId,
        lease: LeaseId,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        let of_earlier_boot = |t: &TaskRow| t.lease == Some(lease) && t.boot != Some(boot);
        let Some(task) = lock_task(&mut tx, task).await?.filter(of_earlier_boot) else {
            return roll_back(tx, vec![]).await;
        };
        let hints = reclaim(&mut tx, &task, loss, self.limits.max_task_losses).await?;
        tx.commit().await.doing("releasing the tasks of an earlier boot")?;
        Ok(hints)
    }
}
