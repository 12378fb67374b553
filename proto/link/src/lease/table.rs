//! Table of the held leases with their deadlines.

use std::collections::HashMap;
use std::time::Instant;

use cfq_proto::ids::LeaseId;
use cfq_proto::messages::{HeartbeatReply, HeldLease};
use tokio::sync::watch;

use super::LeaseStatus;

struct LeaseEntry {
    /// Time at which the lease is suspended, on the clock that includes the machine's sleep (see
    /// [`super::Shared::now`]).
    deadline: Instant,
    /// Time of the last completed step, on the monotonic clock that stops while the machine is suspended.
    last_step: Instant,
    status: watch::Sender<LeaseStatus>,
}

impl LeaseEntry {
    /// Sets the status to `to` if it is `from`.
    fn transition(&self, from: LeaseStatus, to: LeaseStatus) {
        self.status.send_if_modified(|status| {
            *status == from && {
                *status = to;
                true
            }
        });
    }
}

#[derive(Default)]
pub(super) struct LeaseTable {
    entries: HashMap<LeaseId, LeaseEntry>,
}

impl LeaseTable {
    pub(super) fn insert(
        &mut self,
        lease: LeaseId,
        deadline: Instant,
        last_step: Instant,
    ) -> watch::Receiver<LeaseStatus> {
        let entry = LeaseEntry { deadline, last_step, status: watch::Sender::new(LeaseStatus::Live) };
        let status = entry.status.subscribe();
        self.entries.insert(lease, entry);
        status
    }

    pub(super) fn remove(&mut self, lease: LeaseId) {
        self.entries.remove(&lease);
    }

    pub(super) fn record_step(&mut self, lease: LeaseId, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&lease) {
            entry.last_step = now;
        }
    }

    pub(super) fn deadline(&self, lease: LeaseId) -> Option<Instant> {
        self.entries.get(&lease).map(|entry| entry.deadline)
    }

    /// Returns the leases to list in a heartbeat: all that are not lost, each with the time since its last step.
    pub(super) fn held(&self, now: Instant) -> Vec<HeldLease> {
        self.entries
            .iter()
            .filter(|(_, e)| *e.status.borrow() != LeaseStatus::Lost)
            .map(|(lease, e)| HeldLease {
                lease: *lease,
                step_age_ms: now.duration_since(e.last_step).as_millis() as u64,
            })
            .collect()
    }

    /// Applies the reply to a heartbeat; leases that it extends get the new `deadline`.
    pub(super) fn apply(&mut self, reply: &HeartbeatReply, deadline: Instant) {
        for lease in &reply.extended {
            if let Some(entry) = self.entries.get_mut(lease) {
                entry.deadline = entry.deadline.max(deadline);
                entry.transition(LeaseStatus::Suspended, LeaseStatus::Live);
            }
        }
        for lease in &reply.lost {
            if let Some(entry) = self.entries.get_mut(lease) {
                entry.status.send_replace(LeaseStatus::Lost);
            }
        }
    }

    /// Suspends leases past their deadline; returns the earliest deadline of the leases that are still live.
    pub(super) fn suspend_overdue(&mut self, now: Instant) -> Option<Instant> {
        let mut next = None;
        for entry in self.entries.values() {
            if entry.deadline <= now {
                entry.transition(LeaseStatus::Live, LeaseStatus::Suspended);
            } else if *entry.status.borrow() == LeaseStatus::Live {
                next = Some(next.map_or(entry.deadline, |n: Instant| n.min(entry.deadline)));
            }
        }
        next
    }
}
