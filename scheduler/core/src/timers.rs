//! Times at which a job or a node has to be looked at although no event concerns it.

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::{JobId, NodeId};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    Job(JobId),
    Node(NodeId),
}

/// At most one time for each job and node, in ms.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Timers {
    due: BTreeSet<(i64, Timer)>,
    time_of: BTreeMap<Timer, i64>,
}

impl Timers {
    /// Sets, replaces or removes a timer.
    pub fn set(&mut self, timer: Timer, at_ms: Option<i64>) {
        if let Some(before) = self.time_of.remove(&timer) {
            self.due.remove(&(before, timer.clone()));
        }
        if let Some(at_ms) = at_ms {
            self.due.insert((at_ms, timer.clone()));
            self.time_of.insert(timer, at_ms);
        }
    }

    /// Removes and returns the first timer that is due.
    pub fn pop_due(&mut self, now_ms: i64) -> Option<Timer> {
        let (at_ms, _) = self.due.first()?;
        if *at_ms > now_ms {
            return None;
        }
        let (_, timer) = self.due.pop_first()?;
        self.time_of.remove(&timer);
        Some(timer)
    }
}
