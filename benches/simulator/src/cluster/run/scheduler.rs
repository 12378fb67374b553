//! The scheduler's side: messages of nodes, submits, plan, sweep and resync.

use cfq_proto::task::Priority;
use cfq_scheduler_core::{Effect, Job, MAX_OVERTAKING_MS};

use super::super::leader::{Outgoing, is_fenced, placement};
use super::super::messages::{ToNode, ToScheduler};
use super::super::node::Phase;
use super::super::tables::boot_id;
use super::{Event, World};
use crate::engine::{Engine, EngineConfig};
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
                    self.send_to_node(node, boot, ToNode::Registered);
                }
            }
            ToScheduler::Accept(fence) => {
                let is_current = self.tables.accept(node, id, fence, now_ms);
                self.send_to_node(node, boot, ToNode::Fenced { fence, is_result: false, is_current });
            }
            ToScheduler::Refuse { fence, ledger_version } => {
                self.tables.refuse(node, id, fence, ledger_version, now_ms);
            }
            ToScheduler::FirstToken(fence) => {
                self.tables.first_token(node, id, fence);
            }
            ToScheduler::Result { fence, result } => {
                let is_current = self.tables.result(node, id, fence, result, now_ms, &mut self.violations);
                self.counts.fenced += u64::from(!is_current);
                self.send_to_node(node, boot, ToNode::Fenced { fence, is_result: true, is_current });
            }
            ToScheduler::Heartbeat { number, ledger, held } => {
                let reply = match self.tables.heartbeat(node, id, ledger, &held, now_ms) {
                    Some(kept) => ToNode::HeartbeatReply { number, kept, register_again: false },
                    None => ToNode::HeartbeatReply { number, kept: Default::default(), register_again: true },
                };
                self.send_to_node(node, boot, reply);
            }
        }
        self.feed();
    }

    /// Schedules the calls that waited for jobs that have ended.
    pub(super) fn end_jobs(&mut self) {
        let now = self.events.now();
        for job in std::mem::take(&mut self.tables.just_ended) {
            self.metrics.makespan_s = now as f64 / 1e6;
            for (call, at) in self.arrivals.ended(job, now) {
                self.events.at(at, Event::Arrive(call));
            }
        }
    }

    /// Passes changed rows to the leader, unless the hint is lost, and schedules a plan.
    fn feed(&mut self) {
        self.end_jobs();
        let hint_loss = self.faults().map_or(0.0, |faults| faults.hint_loss);
        let jobs = std::mem::take(&mut self.tables.changed_jobs);
        let nodes = std::mem::take(&mut self.tables.changed_nodes);
        if self.leader_is_paused {
            return;
        }
        let Some(leader) = &mut self.leader else { return };
        for job in jobs {
            if !self.rng.chance(hint_loss) {
                leader.read_job(&self.tables, job);
                self.plan_is_due = true;
            }
        }
        for node in nodes {
            if !self.rng.chance(hint_loss) {
                leader.read_node(&self.tables, node);
                self.plan_is_due = true;
            }
        }
        self.schedule_plan();
    }

    /// Error of the leader's next reading of the database's clock, in ms.
    fn clock_error_ms(&mut self) -> i64 {
        let error = self.faults().map_or(0, |faults| faults.clock_reading_error_ms) as i64;
        self.rng.below(2 * error as u64 + 1) as i64 - error
    }

    pub(super) fn plan(&mut self) {
        self.plan_is_scheduled = false;
        if !self.is_database_up() || self.leader_is_paused {
            return;
        }
        let is_grace = self.events.now() < self.grace_until;
        let Some(mut leader) = self.leader.take() else { return };
        leader.is_grace = is_grace;
        self.plan_is_due = false;
        self.counts.plans += 1;
        let every = self.config.repeat_one_plan_in;
        let is_checked = every > 0 && self.counts.plans.is_multiple_of(every);
        let step = leader.plan(self.events.now_ms(), is_checked, &mut self.violations);
        self.counts.compared += u64::from(is_checked && !step.is_cut);
        let mut effects = step.effects;
        let stops_early = self.faults().is_some_and(|faults| self.rng.chance(faults.plan_stop));
        if stops_early {
            // The scheduler stops a plan that takes too long, and plans again.
            effects.truncate(self.rng.below(effects.len() as u64 + 1) as usize);
        }
        self.plan_is_due = step.is_cut || stops_early;
        let mut out = Outgoing::new();
        for effect in &effects {
            self.check_order(effect);
            self.check_capacity(effect);
            leader.apply(effect, &mut self.tables, self.events.now_ms(), &mut out, &mut self.violations);
        }
        if is_checked {
            self.counts.repeated += effects.len() as u64;
            let rejected = self.tables.counts.rejected;
            for effect in effects.iter().filter(|effect| is_fenced(effect)) {
                let mut again = Outgoing::new();
                let now_ms = self.events.now_ms();
                let changed = leader.apply(effect, &mut self.tables, now_ms, &mut again, &mut self.violations);
                self.violations.check(!changed && again.is_empty(), || format!("carried out twice: {effect:?}"));
            }
            self.tables.counts.rejected = rejected;
        }
        self.tables.changed_jobs.clear();
        self.leader = Some(leader);
        self.end_jobs();
        for (node, message) in out {
            let boot = self.nodes[node].boot;
            self.send_to_node(node, boot, message);
        }
        self.schedule_plan();
    }

    fn schedule_plan(&mut self) {
        if self.plan_is_due && !self.plan_is_scheduled {
            self.plan_is_scheduled = true;
            self.events.after(self.config.timing.plan_delay_ms * MS, Event::Plan);
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
            let need = |job: &Job| job.prompt_bytes + u64::from(job.max_tokens);
            let may_run = need(&row.job) <= need(&placed.job)
                && !row.job.refused_by.contains_key(node)
                && !row.job.node_failures.blocks(node, now_ms)
                && !row.job.may_be_poison()
                && now_ms - row.changed_ms > self.config.timing.resync_ms as i64;
            self.violations.check(!may_run, || {
                format!("job {job} was placed on {node} while job {waiting} has waited since {waiting_ms} ms")
            });
        }
    }

    /// Checks that the node has room for the job beside all that are placed and running on it, if the leader has read
    /// all rows.
    fn check_capacity(&mut self, effect: &Effect) {
        let Some((node, job)) = placement(effect) else { return };
        let read_all_s = self.config.faults.until_s + 2e-3 * self.config.timing.resync_ms as f64;
        if (self.events.now() as f64) < read_all_s * 1e6 {
            return;
        }
        let (node, model) = (self.tables.node_index(node), self.calls[job].model);
        // An attempt that has ended on its node uses nothing, although its result is not written yet.
        let has_ended = |job: &usize| {
            let lease = self.tables.jobs.get(job).map_or(0, |row| row.lease);
            self.nodes[node].held.get(&lease).is_some_and(|held| matches!(held.phase, Phase::Ended(_)))
        };
        let on_it = self.tables.held[node].iter().filter(|held| self.calls[**held].model == model && !has_ended(held));
        let (count, tokens) =
            on_it.fold((0, 0), |(count, tokens), held| (count + 1, tokens + Engine::reservation(&self.calls[*held])));
        let tokens = tokens + Engine::reservation(&self.calls[job]);
        let EngineConfig { max_sequences, kv_tokens, .. } = self.config.engine;
        self.violations.check(count < max_sequences && tokens <= kv_tokens, || {
            format!("job {job} is placed on node {node}, which then has {} jobs with {tokens} tokens", count + 1)
        });
    }

    pub(super) fn tick(&mut self) {
        self.events.after(self.config.timing.sweep_ms * MS, Event::Tick);
        if !self.is_database_up() || self.leader_is_paused {
            return;
        }
        let error_ms = self.clock_error_ms();
        self.leader.iter_mut().for_each(|leader| leader.clock_error_ms = error_ms);
        if self.events.now() >= self.grace_until {
            let now_ms = self.events.now_ms();
            self.tables.sweep(self.tables.term, now_ms, &mut self.violations);
        }
        self.plan_is_due = true;
        self.feed();
    }

    pub(super) fn resync(&mut self) {
        self.events.after(self.config.timing.resync_ms * MS, Event::Resync);
        if self.is_database_up()
            && !self.leader_is_paused
            && let Some(leader) = &mut self.leader
        {
            leader.resync(&self.tables);
        }
    }
}
