//! The planner's cache: rows in, nothing decided here.
//!
//! **Room.** A node's ledger says what its pool admits; between two ledgers the cache keeps it honest both ways. A job that
//! is placed, or accepted since the node's last beat, is not in the ledger yet: its tokens and its slot are subtracted. A
//! job that was in the ledger and is over since is still in it: they are added. The next beat settles both. So two jobs
//! placed between two beats never count on the same room, and a slot is not idle until the next beat. Where the guess is
//! wrong the node refuses (`not_now`), which costs a message.

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::messages::WarmUp;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;
use cfq_proto::prefix::chain;

use crate::held::Held;
use crate::job::{Job, Phase};
use crate::load::Loads;
use crate::node::{LeftOut, Node};
use crate::plan::Waiting;
use crate::price::need;

/// The waits of `cfq_proto::timing` that the rules need, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A node silent for this long is not alive.
    pub lease_ttl_ms: u64,
    pub accept_ms: u64,
    pub retry_ceiling_ms: u64,
}

/// A job that ended on a node whose last ledger may still count it.
#[derive(Debug, Clone, PartialEq)]
struct Freed {
    job: Job,
    over_ms: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub(crate) limits: Limits,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) nodes: BTreeMap<NodeId, Node>,
    freed: Vec<Freed>,
    pub(crate) resent: BTreeMap<JobId, Resent>,
    deaf: BTreeMap<NodeId, (BootId, LeftOut)>,
    pub(crate) explained: BTreeMap<JobId, Explained>,
    /// When a node was last asked to load a model.
    asked: BTreeMap<(NodeId, ModelId), (BootId, i64)>,
    pub(crate) held: Held,
}

/// What a queued job waits for, and when that was last written down.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Explained {
    pub waiting: Waiting,
    pub at_ms: i64,
}

/// How often a placed attempt was published again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resent {
    pub lease: LeaseId,
    pub times: u32,
    pub last_ms: i64,
}

/// What the cache believes a model on a node can still admit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub tokens: u64,
    pub slots: u32,
    /// Sequences a newcomer would share the model with.
    pub beside: u32,
}

/// The jobs a node has, as far as it matters who runs beside whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Company {
    pub jobs: u32,
    /// It has, or is kept for, a job that runs alone.
    pub closed: bool,
}

impl Company {
    pub fn admits(self, job: &Job) -> bool {
        !self.closed && (self.jobs == 0 || !job.is_suspect())
    }

    pub fn take(&mut self, job: &Job) {
        self.jobs += 1;
        self.closed |= job.is_suspect();
    }
}

impl State {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            jobs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            freed: Vec::new(),
            resent: BTreeMap::new(),
            deaf: BTreeMap::new(),
            explained: BTreeMap::new(),
            asked: BTreeMap::new(),
            held: Held::default(),
        }
    }

    /// The row of a job that is not over, as it is now. `changed_ms`: when it was last written.
    pub fn job(&mut self, job: Job, changed_ms: i64) {
        if let Some(before) = self.jobs.get(&job.id) {
            let left = before.holder().is_some() && before.holder() != job.holder();
            if left {
                self.free(before.clone(), changed_ms);
            }
            if matches!(job.phase, Phase::Running { .. })
                && let Some((node, _)) = job.holder()
            {
                // It takes work after all.
                self.deaf.remove(node);
            }
        }
        let known = self.jobs.get(&job.id).is_some_and(|before| before.phase == job.phase);
        if !known {
            self.computes(&job);
        }
        if !matches!(job.phase, Phase::Placed { .. }) {
            self.resent.remove(&job.id);
        }
        if !matches!(job.phase, Phase::Queued) {
            self.explained.remove(&job.id);
        }
        self.jobs.insert(job.id, job);
    }

    /// The job is over since `over_ms`: done, failed, dead or cancelled.
    pub fn job_over(&mut self, job: JobId, over_ms: i64) {
        if let Some(before) = self.jobs.remove(&job) {
            self.computes(&before);
            self.free(before, over_ms);
        }
        self.resent.remove(&job);
        self.explained.remove(&job);
    }

    fn computes(&mut self, job: &Job) {
        if let Phase::Running { node, boot, .. } = &job.phase {
            self.held.used(node, *boot, &job.model, &job.prefix);
        }
    }

    /// The node was asked to compute this call's prompt ahead.
    pub fn warmed(&mut self, node: &NodeId, ahead: &WarmUp) {
        if let Some(boot) = self.nodes.get(node).map(|node| node.boot) {
            self.held.used(node, boot, &ahead.model, &chain(ahead.model.as_str(), &ahead.messages));
        }
    }

    fn free(&mut self, before: Job, over_ms: i64) {
        if let (Phase::Running { accepted_ms, .. }, Some((node, boot))) = (&before.phase, before.holder())
            && let Some(node) = self.nodes.get(node)
            && node.boot == boot
            && *accepted_ms < node.seen_ms
            && over_ms >= node.seen_ms
        {
            self.freed.push(Freed { job: before, over_ms });
        }
    }

    /// The row of a node, as it is now.
    pub fn node(&mut self, node: Node) {
        let same_boot = |boot: BootId| boot == node.boot;
        self.freed.retain(|f| {
            f.job.holder().is_none_or(|(id, boot)| *id != node.id || (same_boot(boot) && f.over_ms >= node.seen_ms))
        });
        if self.deaf.get(&node.id).is_some_and(|(boot, _)| !same_boot(*boot)) {
            self.deaf.remove(&node.id);
        }
        self.nodes.insert(node.id.clone(), node);
    }

    pub fn node_gone(&mut self, node: &NodeId) {
        self.nodes.remove(node);
        self.held.forget(node);
        self.asked.retain(|(asked, _), _| asked != node);
        self.deaf.remove(node);
        self.freed.retain(|f| f.job.holder().is_none_or(|(id, _)| id != node));
    }

    /// A `Resend` was carried out.
    pub fn resent(&mut self, job: JobId, lease: LeaseId, now_ms: i64) {
        let times = self.resent.get(&job).filter(|r| r.lease == lease).map_or(0, |r| r.times) + 1;
        self.resent.insert(job, Resent { lease, times, last_ms: now_ms });
    }

    /// The node beats but did not take what was published to it: it gets nothing until its ledger changes.
    pub fn deaf(&mut self, node: &NodeId, now_ms: i64) {
        if let Some(held) = self.nodes.get(node) {
            self.deaf.insert(node.clone(), (held.boot, LeftOut { version: held.ledger.version, at_ms: now_ms }));
        }
    }

    /// A `Load` was carried out.
    pub fn asked_to_load(&mut self, node: NodeId, boot: BootId, model: ModelId, now_ms: i64) {
        self.asked.insert((node, model), (boot, now_ms));
    }

    /// The message may be lost, so a node that does nothing is asked again after the time in which it would accept work.
    pub(crate) fn asked_lately(&self, node: &NodeId, model: &ModelId, now_ms: i64) -> bool {
        let boot = self.nodes.get(node).map(|n| n.boot);
        self.asked
            .get(&(node.clone(), model.clone()))
            .is_some_and(|(asked, at)| Some(*asked) == boot && now_ms.abs_diff(*at) < self.limits.accept_ms)
    }

    /// An `Explain` was carried out, and the job's row was read again.
    pub fn explained(&mut self, job: JobId, waiting: Waiting, now_ms: i64) {
        self.explained.insert(job, Explained { waiting, at_ms: now_ms });
    }

    /// Jobs by phase: queued, placed, running. For gauges.
    pub fn counts(&self) -> (usize, usize, usize) {
        self.jobs.values().fold((0, 0, 0), |(q, p, r), job| match job.phase {
            Phase::Queued => (q + 1, p, r),
            Phase::Placed { .. } => (q, p + 1, r),
            Phase::Running { .. } => (q, p, r + 1),
        })
    }

    /// Jobs the cache holds, so that the shell can tell which are over since.
    pub fn job_ids(&self) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.keys().copied()
    }

    pub fn node_ids(&self) -> impl Iterator<Item = &NodeId> {
        self.nodes.keys()
    }

    pub(crate) fn takes_work(&self, node: &Node, model: &ModelId, now_ms: i64) -> bool {
        let longest = self.limits.accept_ms.saturating_mul(10);
        let deaf = self.deaf.get(&node.id).is_some_and(|(_, since)| since.holds(&node.ledger, now_ms, longest));
        node.alive(now_ms, self.limits.lease_ttl_ms)
            && !node.ledger.draining
            && !node.ledger.yields.contains_key(model)
            && !node.leaves_out(model, now_ms, longest)
            && !deaf
    }

    /// Who has work of each node, placed or running.
    pub(crate) fn company(&self) -> BTreeMap<&NodeId, Company> {
        let mut company: BTreeMap<&NodeId, Company> = BTreeMap::new();
        for job in self.jobs.values() {
            if let Some((node, _)) = job.holder() {
                company.entry(node).or_default().take(job);
            }
        }
        company
    }

    /// What nodes can load beside what they have, and which have work that they did not take up yet: nothing gives way there.
    pub(crate) fn loads(&self) -> BTreeMap<&NodeId, Loads<'_>> {
        let mut loads: BTreeMap<&NodeId, Loads<'_>> = self.nodes.values().map(|n| (&n.id, Loads::of(n))).collect();
        for job in self.jobs.values().filter(|job| matches!(job.phase, Phase::Placed { .. })) {
            if let Some(loads) = job.holder().and_then(|(node, _)| loads.get_mut(node)) {
                loads.kept = true;
            }
        }
        loads
    }

    pub(crate) fn room(&self, node: &Node, model: &ModelState) -> Room {
        let on_it = |job: &&Job| job.holder() == Some((&node.id, node.boot)) && job.model == model.model;
        let uncounted = self.jobs.values().filter(on_it).filter(|job| match job.phase {
            Phase::Queued => false,
            Phase::Placed { .. } => true,
            Phase::Running { accepted_ms, .. } => accepted_ms >= node.seen_ms,
        });
        let (taken, taken_slots) = uncounted.fold((0u64, 0u32), |(t, s), job| (t + need(job, model), s + 1));
        let freed = self.freed.iter().map(|f| &f.job).filter(on_it);
        let (back, back_slots) = freed.fold((0u64, 0u32), |(t, s), job| (t + need(job, model), s + 1));
        let beside = (model.running + taken_slots).saturating_sub(back_slots);
        Room {
            tokens: (model.kv_tokens_free + back).saturating_sub(taken),
            slots: model.max_sequences.saturating_sub(beside),
            beside,
        }
    }

    /// What live nodes list; `None` if none is alive.
    pub(crate) fn served(&self, now_ms: i64) -> Option<BTreeSet<&ModelId>> {
        let mut alive = self.nodes.values().filter(|n| n.alive(now_ms, self.limits.lease_ttl_ms)).peekable();
        alive.peek()?;
        Some(alive.flat_map(|n| n.ledger.models.iter().map(|m| &m.model)).collect())
    }

    pub(crate) fn serving<'a>(
        &'a self,
        model: &'a ModelId,
        now_ms: i64,
    ) -> impl Iterator<Item = (&'a Node, &'a ModelState)> {
        self.nodes
            .values()
            .filter(move |n| n.alive(now_ms, self.limits.lease_ttl_ms))
            .filter_map(move |n| n.model(model).map(|m| (n, m)))
    }
}
