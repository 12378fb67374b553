//! Connection pools. Requests, heartbeats, the leader and its election use the same database through separate pools:
//! many feeds, blobs or steps at once can use up the connections for requests, but do not delay heartbeats and the
//! leader. With a single pool, live holders would lose their leases under load.

use std::time::Duration;

use cfq_proto::timing::Timing;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{Connection, PgPool};

use super::{Shared, Store, StoreError};
use crate::config::{DatabaseConfig, SchedulerLimits};

/// Time limit of one SQL statement, in ms. Normal statements take milliseconds; a stuck statement must not keep locks
/// on rows that heartbeats and the leader need.
const STATEMENT_TIMEOUT_MS: &str = "5000";
/// Time for which a connection may be idle before it is tested with a message to Postgres and back. Connections that
/// are used more often are not tested, because each test delays a request.
const TEST_AFTER_IDLE: Duration = Duration::from_millis(100);
/// Time limit for waiting for a free connection of a pool.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of connections for heartbeats. A heartbeat runs a few SQL statements that take milliseconds; several
/// connections are needed because a heartbeat may wait for a row lock.
const HEARTBEAT_CONNECTIONS: u32 = 4;
/// Number of connections for the leader: for planning, sweeping and the consumers of nodes, and one spare.
const LEADER_CONNECTIONS: u32 = 4;
/// Number of connections for the election: one renews or acquires the leader row, one ends transactions that block it.
const ELECTION_CONNECTIONS: u32 = 2;

/// Time limit for testing a connection that returns to its pool. A connection whose other end vanished is closed after
/// this time; otherwise it would occupy its place in the pool forever.
const RELEASE_TEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for waiting for a lock, in ms, in requests.
pub(super) const REQUEST_LOCK_TIMEOUT_MS: u32 = 3_000;
/// Time limit for waiting for a lock, in ms, in the leader's work on many rows: one locked row must not delay the
/// others.
const LEADER_LOCK_TIMEOUT_MS: u32 = 100;
/// Minimum time limit for an idle connection inside a transaction.
const MIN_IDLE_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for an idle connection inside a transaction. A scheduler that is stopped in the middle of a transaction
/// keeps its locks for this long. It is shorter than a lease, so that the leases of locked rows can still be extended
/// afterwards.
fn idle_transaction_timeout(timing: &Timing) -> Duration {
    (timing.lease_ttl() / 4).max(MIN_IDLE_TRANSACTION_TIMEOUT)
}

/// One [`Store`] per pool, all on the same database.
#[derive(Debug, Clone)]
pub struct StorePools {
    pub requests: Store,
    pub heartbeats: Store,
    pub leader: Store,
    pub election: Store,
}

impl StorePools {
    /// Creates the pools; no connection is opened yet.
    pub fn new(config: &DatabaseConfig, timing: &Timing, limits: &SchedulerLimits) -> Result<Self, StoreError> {
        let shared = Shared::default();
        let store = |connections: u32, lock_timeout_ms: u32| {
            let limits = SchedulerLimits { database_connections: connections, ..limits.clone() };
            Store::with_lock_timeout(config, timing.clone(), limits, lock_timeout_ms, shared.clone())
        };
        Ok(Self {
            requests: store(limits.database_connections, REQUEST_LOCK_TIMEOUT_MS)?,
            heartbeats: store(HEARTBEAT_CONNECTIONS, REQUEST_LOCK_TIMEOUT_MS)?,
            leader: store(LEADER_CONNECTIONS, LEADER_LOCK_TIMEOUT_MS)?,
            election: store(ELECTION_CONNECTIONS, LEADER_LOCK_TIMEOUT_MS)?,
        })
    }

    /// Closes all connections.
    pub async fn close(&self) {
        tokio::join!(self.requests.close(), self.heartbeats.close(), self.leader.close(), self.election.close());
    }
}

/// A pool that opens its connections on first use.
pub(super) fn lazy_pool(
    config: &DatabaseConfig,
    connections: u32,
    lock_timeout_ms: u32,
    timing: &Timing,
) -> Result<PgPool, StoreError> {
    let options = connect_options(config)?.options([
        ("statement_timeout", STATEMENT_TIMEOUT_MS),
        ("lock_timeout", lock_timeout_ms.to_string().as_str()),
        ("idle_in_transaction_session_timeout", idle_transaction_timeout(timing).as_millis().to_string().as_str()),
    ]);
    Ok(PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for >= TEST_AFTER_IDLE {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .after_release(|connection, _| {
            Box::pin(async move {
                let tested = tokio::time::timeout(RELEASE_TEST_TIMEOUT, connection.ping()).await;
                tested.unwrap_or_else(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())).map(|()| true)
            })
        })
        .connect_lazy_with(options))
}

/// A pool of one connection for migrations. It has no time limit for statements, because a migration may rewrite large
/// tables. It waits for locks only for a short time: other schedulers would wait behind it.
pub(super) fn migration_pool(config: &DatabaseConfig) -> Result<PgPool, StoreError> {
    let options = connect_options(config)?
        .options([("statement_timeout", "0"), ("lock_timeout", REQUEST_LOCK_TIMEOUT_MS.to_string().as_str())]);
    Ok(PgPoolOptions::new().max_connections(1).acquire_timeout(ACQUIRE_TIMEOUT).connect_lazy_with(options))
}

fn connect_options(config: &DatabaseConfig) -> Result<PgConnectOptions, StoreError> {
    let mut options = PgConnectOptions::new_without_pgpass()
        .host(&config.host)
        .port(config.port)
        .username(&config.user)
        .database(&config.database)
        .ssl_mode(PgSslMode::Disable)
        .application_name("cfq-scheduler")
        .options([("default_transaction_isolation", "read committed")]);
    if let Some(path) = &config.password_file {
        let text =
            std::fs::read_to_string(path).map_err(|source| StoreError::Password { path: path.clone(), source })?;
        options = options.password(text.trim_end_matches(['\r', '\n']));
    }
    Ok(options)
}
