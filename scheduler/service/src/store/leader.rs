//! The leader row: (generation, holder, expires_at), renewed by compare-and-set on database time. Every transaction a leader
//! makes locks it `for share` and compares the generation, so a leader that was paused and replaced writes nothing.

use sqlx::PgConnection;
use uuid::Uuid;

use super::error::Doing;
use super::{Store, StoreError};

const UNDEFINED_TABLE: &str = "42P01";

/// Proof of having been elected; worth something only as long as the row says the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leadership {
    pub generation: i64,
    pub holder: Uuid,
}

impl Store {
    /// Takes the row if its holder let it expire. One that expires later than any holder could have said was written before
    /// the clock was set back: its holder renews it at once, if there is one.
    pub async fn take_lead(&self, holder: Uuid) -> Result<Option<Leadership>, StoreError> {
        let generation = sqlx::query_scalar!(
            r#"update leader set generation = generation + 1, holder = $1,
                      expires_at = now() + $2::float8 * interval '1 millisecond'
               where expires_at not between now() and now() + 2 * $2::float8 * interval '1 millisecond'
               returning generation"#,
            holder,
            self.timing.leader_ttl_ms as f64
        )
        .fetch_optional(&self.pool)
        .await
        .doing("taking the lead")?;
        Ok(generation.map(|generation| Leadership { generation, holder }))
    }

    /// False once somebody else leads.
    pub async fn renew_lead(&self, lead: Leadership) -> Result<bool, StoreError> {
        let done = sqlx::query!(
            r#"update leader set expires_at = now() + $3::float8 * interval '1 millisecond'
               where holder = $1 and generation = $2"#,
            lead.holder,
            lead.generation,
            self.timing.leader_ttl_ms as f64
        )
        .execute(&self.pool)
        .await
        .doing("renewing the lead")?;
        Ok(done.rows_affected() == 1)
    }

    /// A stopping leader hands over without making anybody wait.
    pub async fn yield_lead(&self, lead: Leadership) -> Result<(), StoreError> {
        sqlx::query!(
            "update leader set expires_at = '-infinity' where holder = $1 and generation = $2",
            lead.holder,
            lead.generation
        )
        .execute(&self.pool)
        .await
        .doing("giving up the lead")?;
        Ok(())
    }

    /// Whether some scheduler leads now.
    pub async fn has_leader(&self) -> Result<bool, StoreError> {
        let asked =
            sqlx::query_scalar!(r#"select expires_at >= now() as "led!" from leader"#).fetch_one(&self.pool).await;
        match asked {
            // A new database, before its first migration.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => Ok(false),
            asked => asked.doing("asking who leads"),
        }
    }
}

/// First statement of every leader transaction.
pub(super) async fn hold_lead(connection: &mut PgConnection, lead: Leadership) -> Result<(), StoreError> {
    let held = sqlx::query_scalar!(
        r#"select true as "held!" from leader where holder = $1 and generation = $2 for share"#,
        lead.holder,
        lead.generation
    )
    .fetch_optional(connection)
    .await
    .doing("checking who leads")?;
    held.map(|_| ()).ok_or(StoreError::NotLeader { generation: lead.generation })
}
