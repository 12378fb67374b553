//! What the sweeper observed, for the decisions of a term.

use std::time::Instant;

use cfq_proto::ids::{LeaseId, NodeId};
use cfq_scheduler_core::{UnplaceReason, UnreportedEnd};

use super::Term;

impl Term<'_> {
    /// Excludes the jumps of the clock since the last call from the times in the cache.
    /// To be called before rows are read: in the database, the jumps are excluded already.
    pub(super) fn exclude_clock_jumps(&mut self) {
        let Some(observed) = *self.observed.borrow() else { return };
        if observed.jumps_ms > self.known_jumps_ms {
            self.state.on_clock_jump(observed.jumps_ms - self.known_jumps_ms, observed.clock.now_ms());
            self.known_jumps_ms = observed.jumps_ms;
        }
    }

    /// Time of the database, in ms; `None` until the first sweep.
    pub(super) fn now_ms(&self) -> Option<i64> {
        self.observed.borrow().map(|observed| observed.clock.now_ms())
    }

    /// What the end of a placement says about its job: nothing if the order was not stored in the work stream, if
    /// Postgres or NATS was unavailable a moment ago, or if a heartbeat of the node could not be written.
    pub(super) fn end_of_placement(&self, node: &NodeId, lease: LeaseId, reason: UnplaceReason) -> UnreportedEnd {
        let is_grace = self.observed.borrow().is_none_or(|observed| observed.grace.is_active(Instant::now()));
        let unwritten = self.leader.heartbeat_failures.within(self.leader.store.timing().lease_ttl());
        let is_unwritten = unwritten.nodes.iter().any(|id| id == node.as_str());
        if is_grace || is_unwritten || !self.publisher.is_stored(lease) {
            return UnreportedEnd::Infrastructure;
        }
        match reason {
            UnplaceReason::NodeLost => UnreportedEnd::NodeLost,
            UnplaceReason::NodeUnresponsive => UnreportedEnd::NotAccepted,
        }
    }
}
