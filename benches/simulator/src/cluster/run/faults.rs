//! Faults of processes: crashes, disconnections, outages of the database, changes of the leader.

use super::super::leader::{Leader, Outgoing};
use super::{Event, World};
use crate::event_queue::{MS, Micros};

/// Maximum number of effects of a replaced leader that are tried.
const MAX_REPLACED_EFFECTS: usize = 100;

impl World<'_> {
    pub(super) fn crash(&mut self, index: usize) {
        if self.nodes[index].is_up {
            self.counts.crashes += 1;
            self.loads_before_restarts += self.nodes[index].engine.loads();
            self.nodes[index].is_up = false;
            let down = (self.rng.exponential(self.config.faults.down_s.max(0.1)) * 1e6) as Micros;
            self.events.after(down, Event::Restart(index));
        }
    }

    pub(super) fn restart(&mut self, index: usize) {
        self.nodes[index].restart(self.models.len());
        self.boot(index);
        self.schedule_fault(self.config.faults.crash_interval_s, Event::Crash(index));
    }

    pub(super) fn disconnect(&mut self, index: usize) {
        let duration = (self.rng.exponential(self.config.faults.partition_s) * 1e6) as Micros;
        self.nodes[index].disconnected_until = self.events.now() + duration;
        self.schedule_fault(self.config.faults.partition_interval_s, Event::Disconnect(index));
    }

    pub(super) fn database_down(&mut self) {
        let now = self.events.now();
        let duration = (self.rng.exponential(self.config.faults.database_down_s) * 1e6) as Micros;
        self.database_down_until = now + duration;
        // Live holders could not extend their leases, so none is ended for one TTL after the outage.
        self.grace_until = self.database_down_until + self.config.timing.lease_ttl_ms * MS;
        self.schedule_fault(self.config.faults.database_interval_s, Event::DatabaseDown);
    }

    /// The leader is paused; another one takes over once its row has expired. What the old one plans when it continues
    /// is rejected.
    pub(super) fn leader_lost(&mut self) {
        self.leader_is_paused = true;
        self.events.after(self.config.timing.leader_ttl_ms * MS, Event::NewLeader);
    }

    pub(super) fn new_leader(&mut self) {
        if !self.is_database_up() {
            self.events.after(self.config.timing.leader_ttl_ms * MS, Event::NewLeader);
            return;
        }
        let now_ms = self.events.now_ms();
        self.tables.term += 1;
        self.leader_is_paused = false;
        self.counts.leaders += 1;
        if let Some(mut old) = self.leader.take() {
            let step = old.plan(now_ms, false, &mut self.violations);
            for effect in step.effects.iter().take(MAX_REPLACED_EFFECTS) {
                self.counts.replaced += 1;
                // What it publishes without a write (an order that is still placed, a load) does no harm.
                let changed = old.apply(effect, &mut self.tables, now_ms, &mut Outgoing::new(), &mut self.violations);
                self.violations.check(!changed, || format!("a replaced leader changed a row: {effect:?}"));
            }
        }
        self.end_jobs();
        self.leader = Some(Leader::new(self.tables.term, &self.config.timing, &self.tables));
        self.tables.changed_jobs.clear();
        self.tables.changed_nodes.clear();
        self.grace_until = self.grace_until.max(self.events.now() + self.config.timing.lease_ttl_ms * MS);
        self.schedule_fault(self.config.faults.leader_interval_s, Event::LeaderLost);
    }
}
