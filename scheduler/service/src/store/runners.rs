//! Runners say hello and beat.

use cfq_proto::ids::{BootId, LeaseId, RunnerId, TaskId};
use cfq_proto::messages::{Beat, BeatReply, RunnerHello};

use super::beats::Listed;
use super::error::{Doing, plain};
use super::hint::Hint;
use super::take_back::{Lost, take_back};
use super::tasks::lock_task;
use super::{Store, StoreError, in_beat_time, nothing};

impl Store {
    /// Writes the runner's row. A new boot hands back at once what the old one held. `None` if a later boot is up, as for a
    /// node.
    pub async fn runner_hello(&self, hello: &RunnerHello) -> Result<Option<Vec<Hint>>, StoreError> {
        let written = sqlx::query!(
            r#"insert into runners (id, boot, version) values ($1, $2, $3)
               on conflict (id) do update set boot = excluded.boot, version = excluded.version, last_seen = now()
               where runners.boot <= excluded.boot
                  or runners.last_seen not between now() - $4::float8 * interval '1 millisecond'
                                               and now() + $4::float8 * interval '1 millisecond'"#,
            hello.runner.as_str(),
            hello.boot.0,
            plain(&hello.version),
            self.lease_ttl_ms()
        )
        .execute(&self.pool)
        .await
        .doing("writing a runner")?;
        if written.rows_affected() == 0 {
            return Ok(None);
        }
        let held = sqlx::query!(
            r#"select id, lease as "lease!" from tasks where runner = $1 and runner_boot <> $2 and lease is not null"#,
            hello.runner.as_str(),
            hello.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the tasks of an earlier start")?;
        let mut hints = Vec::new();
        for row in held {
            let lost = self.release_old_task(hello.boot, TaskId(row.id), LeaseId(row.lease)).await;
            hints.extend(self.swept("task", row.id, lost)?);
        }
        Ok(Some(hints))
    }

    async fn release_old_task(&self, boot: BootId, task: TaskId, lease: LeaseId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        let old = |t: &super::tasks::TaskRow| t.lease == Some(lease) && t.boot != Some(boot);
        let Some(task) = lock_task(&mut tx, task).await?.filter(old) else { return nothing(tx, vec![]).await };
        let why = Lost::Gone("started anew".to_owned());
        let hints = take_back(&mut tx, &task, &why, self.limits.max_task_losses).await?;
        tx.commit().await.doing("releasing the tasks of an earlier start")?;
        Ok(hints)
    }

    /// Extends exactly the listed leases whose work moves.
    pub async fn runner_beat(&self, runner: &RunnerId, beat: &Beat) -> Result<BeatReply, StoreError> {
        in_beat_time(self.extend_runner(runner, beat)).await
    }

    async fn extend_runner(&self, runner: &RunnerId, beat: &Beat) -> Result<BeatReply, StoreError> {
        let known = sqlx::query!(
            "update runners set last_seen = now() where id = $1 and boot = $2",
            runner.as_str(),
            beat.boot.0
        )
        .execute(&self.pool)
        .await
        .doing("writing a beat")?
        .rows_affected()
            == 1;
        let listed = Listed::of(beat, self.timing.task_step_ms);
        if listed.all.is_empty() {
            return Ok(listed.answer(known, vec![], &[]));
        }
        let extended = sqlx::query_scalar!(
            r#"update tasks set stuck = false, lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from tasks where lease = any($1) and runner = $2 and runner_boot = $3
                            order by id for update)
               returning lease as "lease!""#,
            &listed.moving,
            runner.as_str(),
            beat.boot.0,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("extending task leases")?;
        if extended.len() < listed.all.len() {
            let stuck: Vec<_> = listed.all.iter().filter(|l| !listed.moving.contains(l)).copied().collect();
            sqlx::query!(
                "update tasks set stuck = true where lease = any($1) and runner = $2 and runner_boot = $3 and not stuck",
                &stuck,
                runner.as_str(),
                beat.boot.0
            )
            .execute(&self.pool)
            .await
            .doing("noting a task that does not move")?;
        }
        let live = sqlx::query_scalar!(
            r#"select lease as "lease!" from tasks where lease = any($1) and runner = $2 and runner_boot = $3"#,
            &listed.all,
            runner.as_str(),
            beat.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking task leases")?;
        Ok(listed.answer(known, extended, &live))
    }
}
