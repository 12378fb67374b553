//! Postgres, the truth. Every function here is one transaction (or one statement) that is a compare-and-set on its fence;
//! what has to be told to others afterwards comes back as [`Hint`]s, which may be lost.

mod accept;
mod artifacts;
mod as_json;
mod aside;
mod attempts;
mod beats;
mod blobs;
mod cancel;
mod carried;
mod deadlines;
mod effects;
mod error;
mod events;
mod failures;
mod first_token;
mod gauges;
mod give_up;
mod hint;
mod jobs;
mod journal;
mod leader;
mod live;
mod nodes;
mod place;
mod project;
mod resolve;
mod result;
mod runners;
mod set;
mod steps;
mod submit;
mod sweep;
mod take_back;
mod task_lease;
mod tasks;
mod views;

#[cfg(test)]
pub(crate) mod tests;

use std::time::Duration;

use cfq_proto::timing::Timing;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{PgConnection, PgPool};

pub use blobs::Put;
pub use cancel::Cancelled;
pub use error::StoreError;
pub use events::FeedCursor;
pub use gauges::Gauges;
pub use hint::{Hint, LeaderHint};
pub use leader::Leadership;
pub use place::PlaceOrder;
pub use resolve::Resolution;
pub use set::StoreSet;
pub use submit::{NewTask, Submitted};

use crate::config::{DatabaseConfig, Limits};
use aside::Aside;
use error::{Doing, unavailable};

/// How long one statement may run, and wait for a lock. A queue's statements take milliseconds; what takes longer is stuck,
/// and a stuck one must not hold a row that beats and leaders need.
const STATEMENT_TIMEOUT: &str = "5000";
const LOCK_TIMEOUT: &str = "3000";
/// A beat that waits longer is given up: the next one must not stand in line behind it.
const BEAT_TIME: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct Store {
    pool: PgPool,
    timing: Timing,
    limits: Limits,
    aside: Aside,
}

impl Store {
    /// Opens no connection yet: a database that is away is waited for by whoever asks.
    pub fn new(config: &DatabaseConfig, timing: Timing, limits: Limits) -> Result<Self, StoreError> {
        let mut options = PgConnectOptions::new_without_pgpass()
            .host(&config.host)
            .port(config.port)
            .username(&config.user)
            .database(&config.database)
            .ssl_mode(PgSslMode::Disable)
            .application_name("cfq-scheduler")
            .options([
                ("statement_timeout", STATEMENT_TIMEOUT),
                ("lock_timeout", LOCK_TIMEOUT),
                ("idle_in_transaction_session_timeout", "10000"),
                ("default_transaction_isolation", "read committed"),
            ]);
        if let Some(path) = &config.password_file {
            let text =
                std::fs::read_to_string(path).map_err(|source| StoreError::Password { path: path.clone(), source })?;
            options = options.password(text.trim_end_matches(['\r', '\n']));
        }
        let pool = PgPoolOptions::new()
            .max_connections(limits.database_connections)
            .acquire_timeout(Duration::from_secs(2))
            .test_before_acquire(true)
            .connect_lazy_with(options);
        Ok(Self { pool, timing, limits, aside: Aside::default() })
    }

    /// Brings the schema to this build's version; one scheduler does it at a time (sqlx takes an advisory lock).
    pub async fn migrate(&self) -> Result<(), StoreError> {
        sqlx::migrate!("./migrations").run(&self.pool).await.map_err(StoreError::from_migration)?;
        self.mend_transaction_ids().await
    }

    /// After a restore into another cluster, events may carry transaction ids that cluster has not reached yet; the global
    /// feed would wait for them. A visible row is of a finished transaction, so its id may be lowered.
    async fn mend_transaction_ids(&self) -> Result<(), StoreError> {
        let done = sqlx::query!("update events set xid = '3' where xid >= pg_snapshot_xmax(pg_current_snapshot())")
            .execute(&self.pool)
            .await
            .doing("checking the event feed's transaction ids")?;
        if done.rows_affected() > 0 {
            tracing::warn!(
                events = done.rows_affected(),
                "the database comes from another cluster; its feed was re-based"
            );
        }
        Ok(())
    }

    /// Milliseconds since 1970 on the database's clock.
    pub async fn clock_ms(&self) -> Result<i64, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        now_ms(&mut connection).await
    }

    /// Hears of every committed event; the payload is its task's id.
    pub async fn listen(&self) -> Result<sqlx::postgres::PgListener, StoreError> {
        let mut listener = sqlx::postgres::PgListener::connect_with(&self.pool).await.doing("listening for events")?;
        listener.listen(events::CHANNEL).await.doing("listening for events")?;
        Ok(listener)
    }

    pub async fn close(&self) {
        self.pool.close().await;
    }

    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Rows that are left alone for a while.
    pub fn aside(&self) -> &Aside {
        &self.aside
    }

    async fn begin(&self) -> Result<sqlx::Transaction<'static, sqlx::Postgres>, StoreError> {
        self.pool.begin().await.map_err(|source| unavailable("beginning a transaction", source))
    }

    fn lease_ttl_ms(&self) -> f64 {
        self.timing.lease_ttl_ms as f64
    }

    /// No beat makes a lease longer than one TTL; another is for a scheduler that is configured otherwise.
    fn longest_lease_ms(&self) -> f64 {
        2.0 * self.lease_ttl_ms()
    }
}

/// A beat's statements are repeatable, so those that were done before it was given up do no harm.
async fn in_beat_time<T>(work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(BEAT_TIME, work).await.unwrap_or(Err(StoreError::TooSlow { doing: "writing a beat" }))
}

/// Ends a transaction that has nothing to write, now: a dropped one keeps its locks until its connection is used again.
async fn nothing<T>(tx: sqlx::Transaction<'static, sqlx::Postgres>, answer: T) -> Result<T, StoreError> {
    tx.rollback().await.doing("ending a transaction")?;
    Ok(answer)
}

/// Milliseconds since 1970 on the database's clock.
pub(crate) async fn now_ms(connection: &mut PgConnection) -> Result<i64, StoreError> {
    sqlx::query_scalar!(r#"select (extract(epoch from clock_timestamp()) * 1000)::bigint as "ms!""#)
        .fetch_one(connection)
        .await
        .doing("reading the database's clock")
}
