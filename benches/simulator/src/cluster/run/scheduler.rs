//! The scheduler's side: messages of nodes, submits, plan, sweep and resync.

use cfq_proto::task::Priority;
use cfq_scheduler_core::{Effect, MAX_OVERTAKING_MS, Step};

use super::super::leader::{Outgoing, is_fenced, placement};
use super::super::messages::{ToNode, ToScheduler};
use super::super::tables::boot_id;
use super::{Event, World};
use crate::event_queue::MS;

/// Number of older waiting jobs compared with a placement.
const MAX_COMPARED: usize = 8;
/// Interval at which a client repeats a submit that was not acknowledged.
const SUBMIT_RETRY_MS: u64 = 500;

impl World<'_> {
    pub(super) fn arrive(&mut self, call: usize) {
        if !self.is_database_up() {
            self.events.after(SUBMIT_RETRY_MS * MS, Event::Arrive(call));
            return;
        }
        let now = self.events.now();
        self.arrived[call] = now;
        self.last_arrival = now;
        self.unarrived -= 1;
        self.metrics.pooled.call(&self.calls[call]);
        let class = if self.config.random_priorities { self.rng.below(4) as i16 } else { 2 };
        let priority = Priority::try_from(class).unwrap_or(Priority::P2);
        self.tables.submit(call, &self.calls[call], priority, self.events.now_ms());
        if let Some(faults) = self.faults() {
            self.poison[call] = self.rng.chance(faults.poison);
            if self.rng.chance(faults.cancel) {
                let delay = (self.rng.exponential(20.0) * 1e6) as u64;
                self.events.after(delay, Event::Cancel(call));
            }
        }
        self.feed();
    }

    pub(super) fn cancel(&mut self, job: usize) {
        if !self.is_database_up() {
            self.events.after(SUBMIT_RETRY_MS * MS, Event::Cancel(job));
            return;
        }
        if self.tables.jobs.contains_key(&job) {
            self.tables.cancel(job, &mut self.violations);
            self.job_ended(job);
            self.feed();
        }
    }

    pub(super) fn at_scheduler(&mut self, node: usize, boot: u32, message: ToScheduler) {
        if !self.is_database_up() {
            return;
        }
        let (id, now_ms) = (boot_id(node, boot), self.events.now_ms());
        match message {
            ToScheduler::Register { ledger } => {
                if self.tables.register(node, id, ledger, now_ms, &mut self.violations) {
                    self.to_node(node, boot, ToNode::Registered);
                }
            }
            ToScheduler::Accept(fence) => {
                let is_current = self.tables.accept(node, id, fence, now_ms);
                self.to_node(node, boot, ToNode::Fenced { fence, is_result: false, is_current });
            }
            ToScheduler::Refuse { fence, ledger_version } => {
                self.tables.refuse(node, id, fence, ledger_version, now_ms);
            }
            ToScheduler::FirstToken(fence) => {
                self.tables.first_token(node, id, fence);
            }
            ToScheduler::Result { fence, result } => {
                let was_live = self.tables.jobs.contains_key(&fence.job);
                let ceiling_ms = self.config.timing.retry_ceiling_ms;
                let is_current = self.tables.result(node, id, fence, result, now_ms, ceiling_ms, &mut self.violations);
                if was_live && !self.tables.jobs.contains_key(&fence.job) {
                    self.job_ended(fence.job);
                }
                self.counts.fenced += u64::from(!is_current);
                self.to_node(node, boot, ToNode::Fenced { fence, is_result: true, is_current });
            }
            ToScheduler::Heartbeat { number, ledger, held } => {
                let reply = match self.tables.heartbeat(node, id, ledger, &held, now_ms) {
                    Some(kept) => ToNode::HeartbeatReply { number, kept, register_again: false },
                    None => ToNode::HeartbeatReply { number, kept: Default::default(), register_again: true },
                };
                self.to_node(node, boot, reply);
            }
        }
        self.feed();
    }

    /// Schedules the calls that waited for this job.
    pub(super) fn job_ended(&mut self, job: usize) {
        let now = self.events.now();
        self.metrics.makespan_s = now as f64 / 1e6;
        for (call, at) in self.arrivals.ended(job, now) {
            self.events.at(at, Event::Arrive(call));
        }
    }

    /// Passes changed rows to the leader, unless the hint is lost, and schedules a plan.
    fn feed(&mut self) {
        let now_ms = self.events.now_ms();
        let hint_loss = self.faults().map_or(0.0, |faults| faults.hint_loss);
        let jobs = std::mem::take(&mut self.tables.changed_jobs);
        let nodes = std::mem::take(&mut self.tables.changed_nodes);
        let Some(leader) = &mut self.leader else { return };
        for job in jobs {
            if !self.rng.chance(hint_loss) {
                leader.read_job(&self.tables, job, now_ms);
                self.plan_is_due = true;
            }
        }
        for node in nodes {
            if !self.rng.chance(hint_loss) {
                leader.read_node(&self.tables, node);
                self.plan_is_due = true;
            }
        }
        if self.plan_is_due && !self.plan_is_scheduled {
            self.plan_is_scheduled = true;
            self.events.after(self.config.timing.plan_delay_ms * MS, Event::Plan);
        }
    }

    /// The leader's reading of the database's clock.
    fn read_clock_ms(&mut self) -> i64 {
        let error = self.faults().map_or(0, |faults| faults.clock_reading_error_ms) as i64;
        self.events.now_ms() + self.rng.below(2 * error as u64 + 1) as i64 - error
    }

    pub(super) fn plan(&mut self) {
        self.plan_is_scheduled = false;
        if !self.is_database_up() {
            return;
        }
        let now_ms = self.read_clock_ms();
        let Some(mut leader) = self.leader.take() else { return };
        self.plan_is_due = false;
        self.counts.plans += 1;
        let Step { effects, is_cut } = leader.plan(now_ms);
        let mut out = Outgoing::new();
        let mut ended = Vec::new();
        for effect in &effects {
            self.check_order(effect);
            leader.apply(effect, &mut self.tables, self.events.now_ms(), &mut out, &mut self.violations);
            let job = super::super::tables::job_index(effect.job());
            if !self.tables.jobs.contains_key(&job) && self.tables.ended.contains_key(&job) {
                ended.push(job);
            }
        }
        let every = self.config.repeat_one_plan_in;
        if every > 0 && self.counts.plans.is_multiple_of(every) {
            self.counts.repeated += effects.len() as u64;
            for effect in effects.iter().filter(|effect| is_fenced(effect)) {
                let mut again = Outgoing::new();
                let now_ms = self.events.now_ms();
                let changed = leader.apply(effect, &mut self.tables, now_ms, &mut again, &mut self.violations);
                self.violations.check(!changed && again.is_empty(), || format!("carried out twice: {effect:?}"));
            }
        }
        self.tables.changed_jobs.clear();
        self.leader = Some(leader);
        if is_cut {
            self.plan_is_due = true;
            self.plan_is_scheduled = true;
            self.events.after(self.config.timing.plan_delay_ms * MS, Event::Plan);
        }
        ended.dedup();
        ended.into_iter().for_each(|job| self.job_ended(job));
        for (node, message) in out {
            let boot = self.nodes[node].boot;
            self.to_node(node, boot, message);
        }
    }

    /// Checks that no job is placed while a much older one waits that the node could run.
    fn check_order(&mut self, effect: &Effect) {
        let Some((node, job)) = placement(effect) else { return };
        let Some(placed) = self.tables.jobs.get(&job) else { return };
        let model = self.tables.model_index(&placed.job.model);
        let (created_ms, now_ms) = (placed.job.created_ms, self.events.now_ms());
        for (waiting_ms, waiting) in self.tables.waiting[model].iter().take(MAX_COMPARED) {
            if *waiting == job || created_ms - waiting_ms <= MAX_OVERTAKING_MS {
                return;
            }
            let Some(row) = self.tables.jobs.get(waiting) else { continue };
            let may_run = !row.job.refused_by.contains_key(node)
                && !row.job.node_failures.blocks(node, now_ms)
                && !row.job.may_be_poison()
                && now_ms - row.changed_ms > self.config.timing.resync_ms as i64;
            self.violations.check(!may_run, || {
                format!("job {job} was placed on {node} while job {waiting} has waited since {waiting_ms} ms")
            });
        }
    }

    pub(super) fn tick(&mut self) {
        self.events.after(self.config.timing.sweep_ms * MS, Event::Tick);
        if !self.is_database_up() || self.leader.is_none() {
            return;
        }
        if self.events.now() >= self.grace_until {
            let now_ms = self.events.now_ms();
            let before: Vec<usize> =
                self.tables.leases.iter().take_while(|(at, _)| *at < now_ms).map(|(_, job)| *job).collect();
            self.tables.sweep(self.tables.term, now_ms, &mut self.violations);
            for job in before {
                if !self.tables.jobs.contains_key(&job) {
                    self.job_ended(job);
                }
            }
        }
        self.plan_is_due = true;
        self.feed();
    }

    pub(super) fn resync(&mut self) {
        self.events.after(self.config.timing.resync_ms * MS, Event::Resync);
        let now_ms = self.events.now_ms();
        if self.is_database_up()
            && let Some(leader) = &mut self.leader
        {
            leader.resync(&self.tables, now_ms);
        }
    }
}
