//! Connection pools. Requests, heartbeats and the leader use the same database through three separate pools: many
//! feeds, blobs or steps at once can use up the connections for requests, but do not delay heartbeats and the leader.
//! With a single pool, live holders would lose their leases under load.

use std::time::Duration;

use cfq_proto::timing::Timing;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};

use super::{Store, StoreError};
use crate::config::{DatabaseConfig, SchedulerLimits};

/// Time limit of one SQL statement, in ms. Normal statements take milliseconds; a stuck statement must not keep locks
/// on rows that heartbeats and the leader need.
const STATEMENT_TIMEOUT_MS: &str = "5000";
/// Time limit for waiting for a lock, in ms.
const LOCK_TIMEOUT_MS: &str = "3000";
/// Time limit for an idle connection inside a transaction, in ms.
const IDLE_TRANSACTION_TIMEOUT_MS: &str = "10000";
/// Time limit for waiting for a free connection of a pool.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of connections for heartbeats. A heartbeat runs a few SQL statements that take milliseconds; several
/// connections are needed because a heartbeat may wait for a row lock.
const HEARTBEAT_CONNECTIONS: u32 = 4;
/// Number of connections for the leader: one renews the leader row, one is for planning and sweeping, one is spare.
const LEADER_CONNECTIONS: u32 = 3;

/// One [`Store`] per pool, all on the same database.
#[derive(Debug, Clone)]
pub struct StorePools {
    pub requests: Store,
    pub heartbeats: Store,
    pub leader: Store,
}

impl StorePools {
    /// Creates the pools; no connection is opened yet.
    pub fn new(config: &DatabaseConfig, timing: &Timing, limits: &SchedulerLimits) -> Result<Self, StoreError> {
        let store = |connections: u32| {
            let limits = SchedulerLimits { database_connections: connections, ..limits.clone() };
            Store::new(config, timing.clone(), limits)
        };
        Ok(Self {
            requests: store(limits.database_connections)?,
            heartbeats: store(HEARTBEAT_CONNECTIONS)?,
            leader: store(LEADER_CONNECTIONS)?,
        })
    }

    /// Closes all connections.
    pub async fn close(&self) {
        tokio::join!(self.requests.close(), self.heartbeats.close(), self.leader.close());
    }
}

/// A pool that opens its connections on first use.
pub(super) fn lazy_pool(config: &DatabaseConfig, connections: u32) -> Result<PgPool, StoreError> {
    let mut options = PgConnectOptions::new_without_pgpass()
        .host(&config.host)
        .port(config.port)
        .username(&config.user)
        .database(&config.database)
        .ssl_mode(PgSslMode::Disable)
        .application_name("cfq-scheduler")
        .options([
            ("statement_timeout", STATEMENT_TIMEOUT_MS),
            ("lock_timeout", LOCK_TIMEOUT_MS),
            ("idle_in_transaction_session_timeout", IDLE_TRANSACTION_TIMEOUT_MS),
            ("default_transaction_isolation", "read committed"),
        ]);
    if let Some(path) = &config.password_file {
        let text =
            std::fs::read_to_string(path).map_err(|source| StoreError::Password { path: path.clone(), source })?;
        options = options.password(text.trim_end_matches(['\r', '\n']));
    }
    Ok(PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(true)
        .connect_lazy_with(options))
}
