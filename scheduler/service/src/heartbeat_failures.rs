//! Nodes and runners whose heartbeats this scheduler could not write, for example because a disk of Postgres is full or a
//! connection is slow. They are alive, but cannot extend their leases, so the sweep ends none of them until one lease
//! TTL after the last failure.
//!
//! The failures are recorded for each holder: a fault that concerns one row must not keep the leases of others alive.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_proto::ids::{NodeId, RunnerId};

use crate::store::UnwrittenHolders;

/// Times of the last failures. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct HeartbeatFailures(Arc<Mutex<Failures>>);

#[derive(Debug, Default)]
struct Failures {
    nodes: BTreeMap<NodeId, Instant>,
    runners: BTreeMap<RunnerId, Instant>,
}

impl HeartbeatFailures {
    pub fn on_node(&self, node: &NodeId, written: bool) {
        self.update(|failures| record(&mut failures.nodes, node, written));
    }

    pub fn on_runner(&self, runner: &RunnerId, written: bool) {
        self.update(|failures| record(&mut failures.runners, runner, written));
    }

    /// Holders whose last heartbeat failed less than `time` ago. Earlier failures are dropped.
    pub fn within(&self, time: Duration) -> UnwrittenHolders {
        self.update(|failures| {
            failures.nodes.retain(|_, at| at.elapsed() < time);
            failures.runners.retain(|_, at| at.elapsed() < time);
            UnwrittenHolders {
                nodes: failures.nodes.keys().map(ToString::to_string).collect(),
                runners: failures.runners.keys().map(ToString::to_string).collect(),
            }
        })
    }

    fn update<T>(&self, update: impl FnOnce(&mut Failures) -> T) -> T {
        // Plain data: consistent even if a thread panicked while it held the lock.
        update(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn record<K: Ord + Clone>(failures: &mut BTreeMap<K, Instant>, holder: &K, written: bool) {
    match written {
        true => failures.remove(holder),
        false => failures.insert(holder.clone(), Instant::now()),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_is_listed_until_its_heartbeat_is_written_or_the_time_has_passed() {
        let failures = HeartbeatFailures::default();
        let (node, runner) = (NodeId::new("den").unwrap(), RunnerId::new("r1").unwrap());
        failures.on_node(&node, false);
        failures.on_runner(&runner, false);
        let hour = Duration::from_secs(3600);
        assert_eq!(failures.within(hour).nodes, ["den"]);
        failures.on_node(&node, true);
        let listed = failures.within(hour);
        assert_eq!((listed.nodes, listed.runners), (vec![], vec!["r1".to_owned()]));
        assert_eq!(failures.within(Duration::ZERO).runners, Vec::<String>::new());
    }
}
