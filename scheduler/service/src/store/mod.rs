//! The data in Postgres, the source of truth. Each function that writes is one transaction or one statement, which
//! takes effect only if its fence is still current (compare-and-set). Notifications to send after the commit are
//! returned as [`Hint`]s; they may be lost.

mod accept;
mod acknowledge;
mod activity;
mod agent_settings;
mod api_tokens;
mod artifacts;
mod attempts;
mod batch;
mod blobs;
mod bottlenecks;
mod calls;
mod cancel;
mod clock_jumps;
mod columns;
mod dead_letters;
mod deadlines;
mod defects;
mod dependencies;
mod earlier_boot;
mod effects;
mod error;
mod events;
mod explain;
mod failures;
mod first_token;
mod gauges;
mod global_feed;
mod heartbeats;
mod hints;
mod job_list;
mod job_requests;
mod job_tasks;
mod jobs;
mod journal;
mod labels;
mod leader;
mod list;
mod list_by_repository;
mod live;
mod lost_attempts;
mod machines;
mod main_branch;
mod migrate;
mod nodes;
mod open_tasks;
mod pause;
mod payload;
mod place;
mod pools;
mod preemption;
mod priority;
mod project;
mod prs;
mod reclaim;
mod resolve;
mod result;
mod retention;
mod retry;
mod row_backoff;
mod runners;
mod schedules;
mod starts;
mod status;
mod step_rejection;
mod steps;
mod submit;
mod sweep;
mod task_lease;
mod tasks;
mod time_limit;
mod token_queues;
mod transaction;
mod views;

#[cfg(test)]
pub(crate) mod tests;

use cfq_proto::timing::Timing;
use sqlx::{PgConnection, PgPool};

pub use acknowledge::AcknowledgeOutcome;
pub use agent_settings::AgentOverrides;
pub use api_tokens::{MAX_TOKENS, StoredToken, TokenAdded, TokenHash, TokenReplaced};
pub use blobs::{BlobLease, PutOutcome};
pub use calls::{ClientCallView, NewClientCall};
pub use cancel::{Cancelled, TooLateReason};
pub use dead_letters::Requeued;
pub use defects::DefectOutcome;
pub use earlier_boot::IdInUse;
pub use error::StoreError;
pub use gauges::Gauges;
pub use global_feed::{FeedCursor, FeedEpoch, FeedPage, FeedPosition};
pub use hints::{Hint, LeaderHint};
pub use leader::Leadership;
pub use list::TaskFilter;
pub use live::{LiveJob, RowVersion};
pub use machines::{JoinRefusal, JoiningMachine};
pub use pause::{PauseOutcome, ResumeOutcome};
pub use place::PlaceOrder;
pub use pools::StorePools;
pub use priority::PriorityOutcome;
pub use resolve::{EndedQuestion, Resolution};
pub use result::EndedAttempt;
pub use retention::Expiry;
pub use retry::RetryOutcome;
pub use schedules::NewSchedule;
pub use submit::{NewTask, Submitted};
pub use sweep::UnwrittenHolders;
pub use time_limit::{limited, limited_election};
pub use transaction::{Committed, CommittedTasks, Run};

use crate::config::{DatabaseConfig, SchedulerLimits};
use error::Doing;
use job_tasks::JobTasks;
use row_backoff::RowBackoff;
use submit::SubmitQueue;
use token_queues::LimitedGrants;
use transaction::Tx;

/// Access to the database through one connection pool. Clones share the pool, the set of skipped rows and the submits
/// that wait to be written.
#[derive(Debug, Clone)]
pub struct Store {
    pool: PgPool,
    timing: Timing,
    limits: SchedulerLimits,
    shared: Shared,
    submits: SubmitQueue,
    database: DatabaseConfig,
}

/// What the stores of a process share although they have pools of their own.
#[derive(Debug, Clone, Default)]
struct Shared {
    row_backoff: RowBackoff,
    committed: CommittedTasks,
    job_tasks: JobTasks,
    limited_grants: LimitedGrants,
}

impl Store {
    /// Creates the pool without opening a connection, so that it also succeeds while the database is down.
    pub fn new(config: &DatabaseConfig, timing: Timing, limits: SchedulerLimits) -> Result<Self, StoreError> {
        Self::with_lock_timeout(config, timing, limits, pools::REQUEST_LOCK_TIMEOUT_MS, Shared::default())
    }

    fn with_lock_timeout(
        config: &DatabaseConfig,
        timing: Timing,
        limits: SchedulerLimits,
        lock_timeout_ms: u32,
        shared: Shared,
    ) -> Result<Self, StoreError> {
        let pool = pools::lazy_pool(config, limits.database_connections, lock_timeout_ms, &timing)?;
        let (submits, database) = (SubmitQueue::default(), config.clone());
        Ok(Self { pool, timing, limits, shared, submits, database })
    }

    /// Current time of the database's clock, in ms since 1970.
    pub async fn clock_ms(&self) -> Result<i64, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        now_ms(&mut connection).await
    }

    /// The tasks and calls that the transactions of this process change, in the order of the commits.
    pub fn committed_tasks(&self) -> tokio::sync::broadcast::Receiver<Committed> {
        self.shared.committed.subscribe()
    }

    /// Closes all connections of the pool.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// The timing that this store was configured with.
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Rows that are skipped for now because they cannot be processed.
    pub fn row_backoff(&self) -> &RowBackoff {
        &self.shared.row_backoff
    }

    async fn begin(&self) -> Result<Tx, StoreError> {
        let transaction = self.pool.begin().await.doing("beginning a transaction")?;
        Ok(Tx::new(transaction, self.shared.committed.clone()))
    }

    fn lease_ttl_ms(&self) -> f64 {
        self.timing.lease_ttl_ms as f64
    }

    /// Upper bound of the remaining time of a valid lease, in ms: two TTLs. A heartbeat extends a lease to at most one
    /// TTL from now; the factor of two covers leases from a scheduler that was configured with a longer TTL.
    fn longest_lease_ms(&self) -> f64 {
        2.0 * self.lease_ttl_ms()
    }
}

/// Rolls back a transaction that wrote nothing and returns `reply`. A dropped transaction would keep its locks until
/// its connection is used again.
async fn roll_back<T>(tx: Tx, reply: T) -> Result<T, StoreError> {
    tx.rollback().await.doing("ending a transaction")?;
    Ok(reply)
}

/// Current time of the database's clock, in ms since 1970.
pub(crate) async fn now_ms(connection: &mut PgConnection) -> Result<i64, StoreError> {
    sqlx::query_scalar!(r#"select (extract(epoch from clock_timestamp()) * 1000)::bigint as "ms!""#)
        .fetch_one(connection)
        .await
        .doing("reading the database's clock")
}
