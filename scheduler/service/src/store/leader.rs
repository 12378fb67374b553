//! The leader row (term, holder, expires_at): the lease that makes a scheduler the leader. It is renewed by
//! compare-and-set, and expires by the database's clock. Every transaction of a leader locks the row `for key share` and
//! compares the term, so a leader that was paused and replaced writes nothing. `term` has a unique index, so a change of
//! the term waits for these transactions, and a renewal, which changes only the expiry, does not.

use sqlx::PgConnection;
use uuid::Uuid;

use super::error::Doing;
use super::{Store, StoreError};

/// SQLSTATE of Postgres for a table that does not exist.
const UNDEFINED_TABLE: &str = "42P01";
/// Number of tries of a takeover that finds the leader row locked. A former leader that does not know yet that its row
/// has expired may lock the row again.
const MAX_TAKEOVER_TRIES: u32 = 3;

/// Fence of an elected leader; valid only while the leader row has the same values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leadership {
    pub term: i64,
    pub holder: Uuid,
}

impl Store {
    /// Acquires the leader row if it has expired, or if its holder is cut off from NATS and this scheduler is not
    /// (`has_nats`); `None` if another scheduler holds it. An expiry time later than any
    /// holder could have set was written before the database's clock was set back, and counts as expired; a live holder
    /// overwrites it with its next renewal.
    ///
    /// If a transaction of the former leader is still open, because its process or machine hangs, that transaction is
    /// ended: it could not be committed any more anyway, and the takeover would wait for it.
    ///
    /// # Errors
    /// [`StoreError::Newer`] if a newer cfq has migrated the schema.
    pub async fn acquire_leadership(&self, holder: Uuid, has_nats: bool) -> Result<Option<Leadership>, StoreError> {
        self.check_schema().await?;
        for _ in 0..MAX_TAKEOVER_TRIES {
            match self.try_acquire_leadership(holder, has_nats).await {
                Err(error) if error.is_lock_timeout() => {
                    let ended = self.end_transactions_of_expired_leader().await?;
                    tracing::warn!(ended, "transactions of the former leader hung and were ended");
                }
                result => return result,
            }
        }
        self.try_acquire_leadership(holder, has_nats).await
    }

    /// Ends the connections that lock the leader row, if it has expired. Returns their number.
    async fn end_transactions_of_expired_leader(&self) -> Result<usize, StoreError> {
        // `select ... for key share` locks the table in mode RowShareLock; an update locks it in another mode.
        let ended = sqlx::query_scalar!(
            r#"select pg_terminate_backend(pid) from pg_locks
               where relation = 'leader'::regclass and mode = 'RowShareLock' and granted and pid <> pg_backend_pid()
                 and database = (select oid from pg_database where datname = current_database())
                 and exists (select from leader
                             where expires_at not between now() and now() + 2 * $1::float8 * interval '1 millisecond')"#,
            self.timing.leader_ttl_ms as f64
        )
        .fetch_all(&self.pool)
        .await
        .doing("ending the transactions of the former leader")?;
        Ok(ended.len())
    }

    async fn try_acquire_leadership(&self, holder: Uuid, has_nats: bool) -> Result<Option<Leadership>, StoreError> {
        let term = sqlx::query_scalar!(
            r#"update leader set term = term + 1, holder = $1, has_nats = $3,
                      expires_at = now() + $2::float8 * interval '1 millisecond'
               where expires_at not between now() and now() + 2 * $2::float8 * interval '1 millisecond'
                  or ($3 and not has_nats)
               returning term"#,
            holder,
            self.timing.leader_ttl_ms as f64,
            has_nats
        )
        .fetch_optional(&self.pool)
        .await
        .doing("acquiring the leader row")?;
        Ok(term.map(|term| Leadership { term, holder }))
    }

    /// Renews the leader row, and records whether the leader receives messages from NATS; false if another scheduler
    /// holds the row now.
    pub async fn renew_leadership(&self, leadership: Leadership, has_nats: bool) -> Result<bool, StoreError> {
        let done = sqlx::query!(
            r#"update leader set expires_at = now() + $3::float8 * interval '1 millisecond', has_nats = $4
               where holder = $1 and term = $2"#,
            leadership.holder,
            leadership.term,
            self.timing.leader_ttl_ms as f64,
            has_nats
        )
        .execute(&self.pool)
        .await
        .doing("renewing the leader row")?;
        Ok(done.rows_affected() == 1)
    }

    /// Releases the leader row of a stopping scheduler, so that the next leader need not wait until it expires.
    pub async fn release_leadership(&self, leadership: Leadership) -> Result<(), StoreError> {
        sqlx::query!(
            "update leader set expires_at = '-infinity' where holder = $1 and term = $2",
            leadership.holder,
            leadership.term
        )
        .execute(&self.pool)
        .await
        .doing("releasing the leader row")?;
        Ok(())
    }

    /// Whether any scheduler leads now.
    pub async fn has_leader(&self) -> Result<bool, StoreError> {
        let result =
            sqlx::query_scalar!(r#"select expires_at >= now() as "led!" from leader"#).fetch_one(&self.pool).await;
        match result {
            // A new database, before its first migration.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => Ok(false),
            result => result.doing("checking for a leader"),
        }
    }
}

/// Locks the leader row and checks that the holder of `leadership` is still the leader. This is the first statement of
/// every transaction of a leader.
///
/// # Errors
/// [`StoreError::NotLeader`] if another scheduler leads.
pub(super) async fn lock_leader_row(connection: &mut PgConnection, leadership: Leadership) -> Result<(), StoreError> {
    let held = sqlx::query_scalar!(
        r#"select true as "held!" from leader where holder = $1 and term = $2 for key share"#,
        leadership.holder,
        leadership.term
    )
    .fetch_optional(connection)
    .await
    .doing("checking the leader row")?;
    held.map(|_| ()).ok_or(StoreError::NotLeader { term: leadership.term })
}
