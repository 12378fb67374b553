//! Connection pools. One database is used through three pools, so that a flood of feeds, blobs or steps, which may use
//! up the connections for requests, does not delay heartbeats and the leader. Otherwise live holders would lose their
//! leases under load.

use std::time::Duration;

use cfq_proto::timing::Timing;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};

use super::{Store, StoreError};
use crate::config::{DatabaseConfig, SchedulerLimits};

/// Longest run time of one statement, in ms. The queue's statements take milliseconds; a statement that is stuck must
/// not hold a row that heartbeats and the leader need.
const STATEMENT_TIMEOUT_MS: &str = "5000";
/// Longest wait for a lock, in ms.
const LOCK_TIMEOUT_MS: &str = "3000";
/// Longest idle time inside a transaction, in ms.
const IDLE_TRANSACTION_TIMEOUT_MS: &str = "10000";
/// Longest wait for a free connection of the pool.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);
/// A heartbeat is a few statements of milliseconds; several run at once, because one may wait for a row.
const HEARTBEAT_CONNECTIONS: u32 = 4;
/// One for renewing the lead, one for the plan, and a spare.
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
