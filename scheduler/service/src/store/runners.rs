//! Registration of runners.

use cfq_proto::ids::{BootId, LeaseId, TaskId};
use cfq_proto::messages::RunnerRegistration;

use super::columns::pg_text;
use super::error::Doing;
use super::hints::Hint;
use super::nodes::is_other_machine_boot;
use super::reclaim::{RunnerLoss, reclaim};
use super::tasks::{TaskRow, lock_task};
use super::{Store, StoreError, roll_back};

impl Store {
    /// Writes the runner's row. Tasks that earlier boots of the runner hold are released at once. `None` if a later
    /// boot of the runner is alive, as for a node (see [`Store::register_node`]).
    pub async fn register_runner(&self, registration: &RunnerRegistration) -> Result<Option<Vec<Hint>>, StoreError> {
        let before =
            sqlx::query_scalar!("select machine_boot from runners where id = $1", registration.runner.as_str())
                .fetch_optional(&self.pool)
                .await
                .doing("finding a runner")?
                .flatten();
        let written = sqlx::query!(
            r#"insert into runners (id, boot, version, machine_boot) values ($1, $2, $3, $5)
               on conflict (id) do update set boot = excluded.boot, version = excluded.version,
                   machine_boot = excluded.machine_boot, last_seen = now()
               where runners.boot <= excluded.boot
                  or runners.last_seen not between now() - $4::float8 * interval '1 millisecond'
                                               and now() + $4::float8 * interval '1 millisecond'"#,
            registration.runner.as_str(),
            registration.boot.0,
            pg_text(&registration.version),
            self.lease_ttl_ms(),
            registration.machine_boot.as_deref().map(pg_text)
        )
        .execute(&self.pool)
        .await
        .doing("writing a runner")?;
        if written.rows_affected() == 0 {
            return Ok(None);
        }
        let loss = match is_other_machine_boot(&before, &registration.machine_boot) {
            true => RunnerLoss::MachineRestarted,
            false => RunnerLoss::Restarted,
        };
        let held = sqlx::query!(
            r#"select id, lease as "lease!" from tasks where runner = $1 and runner_boot <> $2 and lease is not null"#,
            registration.runner.as_str(),
            registration.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the tasks of an earlier boot")?;
        let mut hints = Vec::new();
        for row in held {
            let released = self.release_old_task(registration.boot, &loss, TaskId(row.id), LeaseId(row.lease)).await;
            hints.extend(self.skip_faulty_row("task", row.id, released)?);
        }
        Ok(Some(hints))
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
