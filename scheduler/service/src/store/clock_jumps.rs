//! Jumps of the database's clock, after which work has lasted less time than the clock passed: the machine was suspended,
//! or its time was set.

use sqlx::PgConnection;

use super::error::Doing;
use super::leader::{Leadership, lock_leader_row};
use super::{Store, StoreError};

impl Store {
    /// Excludes a jump of the clock by `jump_ms` from the working time of running jobs, and from the time in which
    /// attempts failed. A job whose row is locked is left out, so that it delays no other.
    pub async fn exclude_clock_jump(&self, leadership: Leadership, jump_ms: i64) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        shift_running(&mut tx, jump_ms).await?;
        shift_failures(&mut tx, jump_ms).await?;
        tx.commit().await.doing("excluding a jump of the clock")
    }
}

/// The working time of a job counts from its acceptance or from its task's first token, whichever is later.
async fn shift_running(connection: &mut PgConnection, jump_ms: i64) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update jobs j
           set accepted_at = least(now(), greatest(j.accepted_at, t.first_token_at) + $1::float8 * interval '1 millisecond')
           from tasks t
           where t.id = j.task
             and j.id in (select id from jobs where state = 'running' order by id for update skip locked)"#,
        jump_ms as f64
    )
    .execute(connection)
    .await
    .doing("excluding a jump of the clock from working time")?;
    Ok(())
}

async fn shift_failures(connection: &mut PgConnection, jump_ms: i64) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update jobs
           set first_failure_at = least(now(), first_failure_at + $1::float8 * interval '1 millisecond'), updated_at = now()
           where id in (select id from jobs
                        where state in ('queued', 'placed', 'running') and first_failure_at is not null
                        order by id for update skip locked)"#,
        jump_ms as f64
    )
    .execute(connection)
    .await
    .doing("excluding a jump of the clock from the time of failures")?;
    Ok(())
}
