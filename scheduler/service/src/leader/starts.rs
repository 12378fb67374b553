//! Starts tasks whose predecessors have ended or whose time has come, and fires schedules, at the interval of the sweep.
//! The sweep of leases does not wait for this, and an error in one part does not stop the others.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use crate::store::{Hint, Leadership, StoreError};

/// Interval at which blocked tasks that wait for nothing are looked for. There are none unless something went wrong.
const REPAIR_INTERVAL: Duration = Duration::from_secs(30);

/// Runs until another scheduler leads.
pub async fn run(leader: Leader, leadership: Leadership) {
    let store = &leader.store;
    let mut checks = interval(store.timing().sweep());
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut repaired: Option<Instant> = None;
    loop {
        checks.tick().await;
        let mut leads = finish(&leader, "starting tasks", store.sweep_starts(leadership).await).await;
        leads &= finish(&leader, "firing schedules", store.fire_schedules(leadership).await).await;
        if repaired.is_none_or(|at| at.elapsed() >= REPAIR_INTERVAL) {
            repaired = Some(Instant::now());
            leads &= finish(&leader, "repairing blocked tasks", store.repair_blocked_tasks(leadership).await).await;
        }
        if !leads {
            return;
        }
    }
}

/// Sends the hints. False if another scheduler leads.
async fn finish(leader: &Leader, doing: &'static str, done: Result<Vec<Hint>, StoreError>) -> bool {
    match done {
        Ok(hints) => leader.link.send_hints(hints).await,
        Err(StoreError::NotLeader { term }) => {
            tracing::warn!(term, doing, "rejected, another scheduler leads");
            return false;
        }
        Err(error) => tracing::warn!(%error, cause = ?std::error::Error::source(&error), doing, "failed, retrying"),
    }
    true
}
