//! Migration of the schema at the start of a scheduler, on a connection of its own without a time limit for statements.
//!
//! A newer cfq migrates the schema while schedulers of an older version may still run: it takes the leadership from them
//! at once, and they stop when they find the newer version.

use std::time::Instant;

use sqlx::PgPool;
use sqlx::migrate::Migrator;

use super::error::Doing;
use super::{Store, StoreError, pools};

pub(super) static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

impl Store {
    /// Migrates the schema to this build's version. One scheduler at a time does it (sqlx takes an advisory lock).
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.apply(&MIGRATIONS).await
    }

    /// Applies the migrations and nothing else, so that the database can be copied as one that was never used.
    #[cfg(test)]
    pub(crate) async fn apply_migrations(&self) -> Result<(), StoreError> {
        let pool = pools::migration_pool(&self.database)?;
        let done = migrate(&pool, &MIGRATIONS).await;
        pool.close().await;
        done
    }

    pub(super) async fn apply(&self, migrations: &Migrator) -> Result<(), StoreError> {
        let pool = pools::migration_pool(&self.database)?;
        let done = async {
            migrate(&pool, migrations).await?;
            repair_transaction_ids(&pool).await?;
            self.check_epoch().await
        };
        let done = done.await;
        pool.close().await;
        done
    }

    /// Checks that no newer cfq has migrated the schema meanwhile.
    ///
    /// # Errors
    /// [`StoreError::Newer`] if one has: this build must not write any more.
    pub async fn check_schema(&self) -> Result<(), StoreError> {
        match applied_version(&self.pool).await? {
            Some(version) if version > own_version() => Err(StoreError::Newer { version }),
            Some(_) | None => Ok(()),
        }
    }
}

/// Version of the schema that this build needs.
fn own_version() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Applies the migrations one by one, and logs each of them, because one may take long on a large database. If this
/// changes a schema that is in use, the leader loses the leadership: it is an older build.
async fn migrate(pool: &PgPool, migrations: &Migrator) -> Result<(), StoreError> {
    let applied = applied_version(pool).await?;
    let pending: Vec<_> =
        migrations.iter().filter(|migration| applied.is_some_and(|v| migration.version > v)).collect();
    for (n, migration) in pending.iter().enumerate() {
        let (version, what, of) = (migration.version, &migration.description, pending.len());
        tracing::info!(version, %what, migration = n + 1, of, "migrating the database");
        let began = Instant::now();
        migrations.run_to(version, pool).await.map_err(StoreError::from_migration)?;
        tracing::info!(version, seconds = began.elapsed().as_secs_f64(), "migrated the database");
    }
    // Also checks the migrations that were applied earlier, and creates the schema of a new database.
    migrations.run(pool).await.map_err(StoreError::from_migration)?;
    if pending.is_empty() {
        return Ok(());
    }
    sqlx::query!("update leader set term = term + 1, holder = gen_random_uuid(), expires_at = '-infinity'")
        .execute(pool)
        .await
        .doing("ending the term of an older scheduler")?;
    Ok(())
}

/// Version of the last applied migration; `None` in a new database.
async fn applied_version(pool: &PgPool) -> Result<Option<i64>, StoreError> {
    let is_new: bool = sqlx::query_scalar("select to_regclass('_sqlx_migrations') is null")
        .fetch_one(pool)
        .await
        .doing("finding the schema's version")?;
    if is_new {
        return Ok(None);
    }
    // Not a checked query: the table does not belong to the schema that queries are checked against.
    sqlx::query_scalar("select max(version) from _sqlx_migrations")
        .fetch_one(pool)
        .await
        .doing("finding the schema's version")
}

/// Lowers transaction ids in the events table that are above this Postgres cluster's current transaction id. Such ids
/// come from a restored dump of another cluster, and the global feed would not show their events until this cluster has
/// reached the ids. Lowering them is safe, because a visible row belongs to a finished transaction. All events are lowered
/// if one is, so that they keep their order.
async fn repair_transaction_ids(pool: &PgPool) -> Result<(), StoreError> {
    let done = sqlx::query!(
        "update events set xid = '3' where xid <> '3' and exists
             (select from events where xid >= pg_snapshot_xmax(pg_current_snapshot()))"
    )
    .execute(pool)
    .await
    .doing("checking the event feed's transaction ids")?;
    if done.rows_affected() > 0 {
        tracing::warn!(
            events = done.rows_affected(),
            "database was restored from another cluster; transaction ids of its event feed were lowered"
        );
    }
    Ok(())
}
