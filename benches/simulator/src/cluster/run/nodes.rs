//! The nodes' side: work orders, heartbeats, timers.

use super::super::messages::{AttemptResult, Fence, ToNode, ToScheduler};
use super::super::node::{Held, Phase};
use super::{Event, World};
use crate::event_queue::{MS, Micros};

/// Wait after a change of the ledger before the heartbeat that reports it.
const HEARTBEAT_COALESCE_DELAY_MS: u64 = 5;

impl World<'_> {
    /// Registers a process that was started, and begins its heartbeats.
    pub(super) fn boot(&mut self, index: usize) {
        self.send_register(index);
        let boot = self.nodes[index].boot;
        // Spread over the interval, as those of nodes that were started at different times.
        let offset = self.rng.below(self.config.timing.heartbeat_ms * MS);
        self.events.after(offset, Event::Heartbeat { node: index, boot });
    }

    fn send_register(&mut self, index: usize) {
        let ledger = self.nodes[index].ledger(&self.models, self.calls);
        self.send_to_scheduler(index, ToScheduler::Register { ledger });
    }

    fn is_running(&self, node: usize, boot: u32) -> bool {
        self.nodes[node].is_up && self.nodes[node].boot == boot
    }

    pub(super) fn heartbeat(&mut self, index: usize, boot: u32) {
        if !self.is_running(index, boot) {
            return;
        }
        let interval = (self.config.timing.heartbeat_ms * MS) as f64 / self.nodes[index].clock_rate;
        self.events.after(interval as Micros, Event::Heartbeat { node: index, boot });
        self.stop_expired(index);
        self.send_heartbeat(index);
    }

    /// Reports a change of the ledger soon.
    fn heartbeat_soon(&mut self, index: usize) {
        if !self.nodes[index].heartbeat_is_due {
            self.nodes[index].heartbeat_is_due = true;
            let boot = self.nodes[index].boot;
            self.events.after(HEARTBEAT_COALESCE_DELAY_MS * MS, Event::LedgerChanged { node: index, boot });
        }
    }

    pub(super) fn ledger_changed(&mut self, index: usize, boot: u32) {
        if self.is_running(index, boot) {
            self.nodes[index].heartbeat_is_due = false;
            self.send_heartbeat(index);
        }
    }

    fn send_heartbeat(&mut self, index: usize) {
        let now = self.events.now();
        let node = &mut self.nodes[index];
        if !node.is_registered {
            self.send_register(index);
            return;
        }
        node.heartbeats += 1;
        let number = node.heartbeats;
        let too_old = now.saturating_sub(self.config.timing.lease_ttl_ms * MS);
        node.unanswered.retain(|_, sent| *sent >= too_old);
        node.unanswered.insert(number, now);
        let held = node.held.values().map(|held| held.fence).collect();
        let ledger = node.ledger(&self.models, self.calls);
        self.send_to_scheduler(index, ToScheduler::Heartbeat { number, ledger, held });
    }

    pub(super) fn at_node(&mut self, index: usize, boot: u32, message: ToNode) {
        if !self.is_running(index, boot) {
            return;
        }
        match message {
            ToNode::Registered => self.nodes[index].is_registered = true,
            ToNode::Order(fence) => self.order(index, fence),
            ToNode::Load { model } => {
                self.nodes[index].engine.request_load(model);
                self.start_load(index);
            }
            ToNode::Fenced { fence, is_result, is_current } => self.fenced(index, fence, is_result, is_current),
            ToNode::HeartbeatReply { number, kept, register_again } => {
                if register_again {
                    self.nodes[index].is_registered = false;
                    return;
                }
                self.heartbeat_reply(index, number, &kept);
            }
        }
    }

    fn heartbeat_reply(&mut self, index: usize, number: u64, kept: &std::collections::BTreeMap<u64, bool>) {
        let Some(sent) = self.nodes[index].unanswered.remove(&number) else { return };
        let deadline = self.nodes[index].deadline(sent, &self.config.timing);
        for (lease, is_held) in kept {
            match (self.nodes[index].held.get_mut(lease), is_held) {
                (Some(held), true) => held.deadline = held.deadline.max(deadline),
                (Some(_), false) => self.drop_attempt(index, *lease),
                (None, _) => {}
            }
        }
    }

    fn order(&mut self, index: usize, fence: Fence) {
        let now = self.events.now();
        if let Some(held) = self.nodes[index].held.get(&fence.lease) {
            if held.phase == Phase::Offered {
                self.send_to_scheduler(index, ToScheduler::Accept(fence));
            }
            return;
        }
        let node = &mut self.nodes[index];
        if !node.admits(&self.calls[fence.job], self.calls) {
            let ledger_version = node.ledger(&self.models, self.calls).version;
            self.send_to_scheduler(index, ToScheduler::Refuse { fence, ledger_version });
            return;
        }
        let deadline = node.deadline(now, &self.config.timing);
        let will_fail = self.faults().is_some_and(|faults| self.rng.chance(faults.failure));
        let timer = self.retry_timer(index, fence.lease);
        let held = Held { fence, phase: Phase::Offered, deadline, timer, will_fail };
        self.nodes[index].held.insert(fence.lease, held);
        self.heartbeat_soon(index);
        self.send_to_scheduler(index, ToScheduler::Accept(fence));
    }

    /// Schedules a timer of an attempt; it replaces the one before.
    fn set_timer(&mut self, index: usize, lease: u64, at: Micros) -> u64 {
        self.next_timer += 1;
        let (boot, timer) = (self.nodes[index].boot, self.next_timer);
        self.events.at(at, Event::Timer { node: index, boot, lease, timer });
        timer
    }

    fn retry_timer(&mut self, index: usize, lease: u64) -> u64 {
        let at = self.events.now() + self.config.timing.report_retry_ms * MS;
        self.set_timer(index, lease, at)
    }

    /// A retry is due, or the engine has ended the attempt.
    pub(super) fn timer(&mut self, index: usize, boot: u32, lease: u64, timer: u64) {
        if !self.is_running(index, boot) {
            return;
        }
        self.stop_expired(index);
        let Some(held) = self.nodes[index].held.get(&lease).copied().filter(|held| held.timer == timer) else { return };
        let (report, phase) = match held.phase {
            Phase::Offered => (ToScheduler::Accept(held.fence), Phase::Offered),
            Phase::Running => {
                self.end_in_engine(index, held.fence);
                let result = if held.will_fail { AttemptResult::Failed } else { AttemptResult::Done };
                (ToScheduler::Result { fence: held.fence, result }, Phase::Ended(result))
            }
            Phase::Ended(result) => (ToScheduler::Result { fence: held.fence, result }, held.phase),
        };
        let timer = self.retry_timer(index, lease);
        if let Some(held) = self.nodes[index].held.get_mut(&lease) {
            (held.phase, held.timer) = (phase, timer);
        }
        self.send_to_scheduler(index, report);
    }

    /// The scheduler's reply to an acceptance or a result.
    fn fenced(&mut self, index: usize, fence: Fence, is_result: bool, is_current: bool) {
        self.stop_expired(index);
        let Some(held) = self.nodes[index].held.get(&fence.lease).copied() else { return };
        match (held.phase, is_result) {
            (Phase::Offered, false) if is_current => self.start_attempt(index, held),
            (Phase::Offered, false) | (Phase::Ended(_), true) => self.drop_attempt(index, fence.lease),
            (Phase::Offered | Phase::Running | Phase::Ended(_), _) => {}
        }
    }

    fn start_attempt(&mut self, index: usize, held: Held) {
        let (now, job, lease) = (self.events.now(), held.fence.job, held.fence.lease);
        let call = &self.calls[job];
        if !self.nodes[index].engine.admits(call) {
            // The model was unloaded between order and confirmation. The lease ends with the next heartbeat's list.
            self.drop_attempt(index, lease);
            return;
        }
        self.check_single_holder(index, job);
        if self.poison[job] {
            self.crash(index);
            return;
        }
        let admitted = self.nodes[index].engine.start(lease, call, now);
        self.metrics.started(call, self.arrived[job], now, admitted.cached_tokens);
        let boot = self.nodes[index].boot;
        self.running_on.insert(job, (index, boot, lease));
        let timer = self.set_timer(index, lease, admitted.end);
        self.events.at(admitted.first_token, Event::FirstToken { node: index, boot, lease });
        if let Some(held) = self.nodes[index].held.get_mut(&lease) {
            (held.phase, held.timer) = (Phase::Running, timer);
        }
    }

    /// Checks that no other node runs the job.
    fn check_single_holder(&mut self, index: usize, job: usize) {
        let now = self.events.now();
        let Some((other, boot, lease)) = self.running_on.get(&job).copied() else { return };
        let node = &self.nodes[other];
        let is_active = node.is_up
            && node.boot == boot
            && node.held.get(&lease).is_some_and(|held| held.phase == Phase::Running && now < held.deadline);
        self.violations.check(!is_active, || format!("job {job} starts on node {index} while it runs on node {other}"));
    }

    pub(super) fn first_token(&mut self, index: usize, boot: u32, lease: u64) {
        if !self.is_running(index, boot) {
            return;
        }
        self.stop_expired(index);
        let Some(held) = self.nodes[index].held.get(&lease).copied() else { return };
        let job = held.fence.job;
        if !self.has_first_token[job] {
            self.has_first_token[job] = true;
            self.metrics.first_token(self.arrived[job], self.events.now());
        }
        self.send_to_scheduler(index, ToScheduler::FirstToken(held.fence));
    }

    /// Stops the attempts whose leases were not confirmed in time.
    fn stop_expired(&mut self, index: usize) {
        let now = self.events.now();
        let expired: Vec<u64> =
            self.nodes[index].held.iter().filter(|(_, held)| held.deadline <= now).map(|(lease, _)| *lease).collect();
        for lease in expired {
            self.counts.stopped += 1;
            self.drop_attempt(index, lease);
        }
    }

    fn drop_attempt(&mut self, index: usize, lease: u64) {
        if let Some(held) = self.nodes[index].held.remove(&lease) {
            self.end_in_engine(index, held.fence);
        }
    }

    fn end_in_engine(&mut self, index: usize, fence: Fence) {
        self.nodes[index].engine.end(fence.lease);
        if self.running_on.get(&fence.job).is_some_and(|(_, _, lease)| *lease == fence.lease) {
            self.running_on.remove(&fence.job);
        }
        self.heartbeat_soon(index);
        self.start_load(index);
    }

    /// Starts a load that was requested, once there is memory for it.
    pub(super) fn start_load(&mut self, index: usize) {
        let boot = self.nodes[index].boot;
        // A model is not evicted while an attempt for it is offered.
        if self.nodes[index].held.values().any(|held| held.phase == Phase::Offered) {
            return;
        }
        if let Some((model, until)) = self.nodes[index].engine.start_load(self.events.now()) {
            self.events.at(until, Event::Loaded { node: index, boot, model });
            self.heartbeat_soon(index);
        }
    }

    pub(super) fn loaded(&mut self, index: usize, boot: u32, model: usize) {
        if self.is_running(index, boot) {
            self.nodes[index].engine.loaded(model, self.events.now());
            self.heartbeat_soon(index);
            self.start_load(index);
        }
    }
}
