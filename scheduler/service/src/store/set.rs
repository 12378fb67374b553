//! One database over three pools, so that what must not wait does not: a flood of feeds, blobs or steps may use up the
//! connections for requests, and beats and the leader still have theirs. Else live holders would lose their leases to load.

use cfq_proto::timing::Timing;

use super::{Store, StoreError};
use crate::config::{DatabaseConfig, Limits};

/// A beat is a few statements of milliseconds; several at once, because one may wait for a row.
const BEAT_CONNECTIONS: u32 = 4;
/// Renewing the lead, the plan, and one to spare.
const LEADER_CONNECTIONS: u32 = 3;

#[derive(Debug, Clone)]
pub struct StoreSet {
    pub requests: Store,
    pub beats: Store,
    pub leader: Store,
}

impl StoreSet {
    pub fn new(config: &DatabaseConfig, timing: &Timing, limits: &Limits) -> Result<Self, StoreError> {
        let store = |connections: u32| {
            let limits = Limits { database_connections: connections, ..limits.clone() };
            Store::new(config, timing.clone(), limits)
        };
        Ok(Self {
            requests: store(limits.database_connections)?,
            beats: store(BEAT_CONNECTIONS)?,
            leader: store(LEADER_CONNECTIONS)?,
        })
    }

    pub async fn close(&self) {
        tokio::join!(self.requests.close(), self.beats.close(), self.leader.close());
    }
}
