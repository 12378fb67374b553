//! The planner's cache of rows. It makes no decisions.
//!
//! **Capacity.** A node's ledger states what its KV pool admits. Between two ledgers, the cache corrects these numbers
//! in both directions. A job that is placed, or was accepted since the node's last heartbeat, is not in the ledger yet:
//! its tokens and its slot are subtracted. A job that was in the ledger and has ended since is still counted there: its
//! tokens and its slot are added back. The ledger of the next heartbeat contains both changes. So two jobs placed
//! between two heartbeats never use the same capacity, and a freed slot need not stay idle until the next heartbeat. If
//! the correction is wrong, the node refuses (`not_now`), which costs one message.

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::messages::PrefillHint;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;
use cfq_proto::prefix::chain;

use crate::capacity::ModelCapacity;
use crate::cost::kv_reservation;
use crate::job::{Job, JobPhase};
use crate::node::{Exclusion, Node};
use crate::pending_reason::PendingReason;
use crate::prefix_index::PrefixIndex;

/// The durations of `cfq_proto::timing` that the planner needs, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannerTiming {
    /// Time from a node's last heartbeat until the node counts as not alive.
    pub lease_ttl_ms: u64,
    /// Time after which a placed job that was not accepted is published again.
    pub accept_timeout_ms: u64,
    /// Retry ceiling: time without an answer after which a job fails.
    pub retry_ceiling_ms: u64,
}

/// Maximum duration of an exclusion, as a multiple of `accept_timeout_ms`: after it the exclusion ends even if the
/// ledger does not change.
const MAX_EXCLUSION_ACCEPT_TIMEOUTS: u64 = 10;

/// A job that ended on a node whose last ledger may still count it.
#[derive(Debug, Clone, PartialEq)]
struct EndedJob {
    job: Job,
    ended_ms: i64,
}

/// Cached rows, and a record of what the leader has done since it started.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerState {
    pub(crate) timing: PlannerTiming,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) nodes: BTreeMap<NodeId, Node>,
    ended: Vec<EndedJob>,
    pub(crate) resends: BTreeMap<JobId, Resends>,
    /// Nodes that send heartbeats but accept no work.
    unresponsive: BTreeMap<NodeId, (BootId, Exclusion)>,
    pub(crate) explained: BTreeMap<JobId, Explained>,
    /// Last request to load each model on each node: the boot it was sent to, and its time in ms.
    load_requests: BTreeMap<(NodeId, ModelId), (BootId, i64)>,
    pub(crate) prefix_index: PrefixIndex,
}

/// The recorded pending reason of a queued job, and when it was written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Explained {
    pub pending: PendingReason,
    pub at_ms: i64,
}

/// How often, and when last, a placed attempt was published again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resends {
    pub lease: LeaseId,
    pub count: u32,
    pub last_ms: i64,
}

impl PlannerState {
    /// Creates an empty cache.
    pub fn new(timing: PlannerTiming) -> Self {
        Self {
            timing,
            jobs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            ended: Vec::new(),
            resends: BTreeMap::new(),
            unresponsive: BTreeMap::new(),
            explained: BTreeMap::new(),
            load_requests: BTreeMap::new(),
            prefix_index: PrefixIndex::default(),
        }
    }

    /// Stores the current row of a job that has not ended. `changed_ms` is the time of the row's last write.
    pub fn on_job_row(&mut self, job: Job, changed_ms: i64) {
        if let Some(before) = self.jobs.get(&job.id) {
            let left_its_node = before.holder().is_some() && before.holder() != job.holder();
            if left_its_node {
                self.record_end(before.clone(), changed_ms);
            }
            if matches!(job.phase, JobPhase::Running { .. })
                && let Some((node, _)) = job.holder()
            {
                // The node has accepted a job, so it is responsive again.
                self.unresponsive.remove(node);
            }
        }
        let is_known = self.jobs.get(&job.id).is_some_and(|before| before.phase == job.phase);
        if !is_known {
            self.record_prompt(&job);
        }
        if !matches!(job.phase, JobPhase::Placed { .. }) {
            self.resends.remove(&job.id);
        }
        if !matches!(job.phase, JobPhase::Queued) {
            self.explained.remove(&job.id);
        }
        self.jobs.insert(job.id, job);
    }

    /// Removes a job that is done, failed, dead or cancelled since `ended_ms`.
    pub fn on_job_ended(&mut self, job: JobId, ended_ms: i64) {
        if let Some(before) = self.jobs.remove(&job) {
            self.record_prompt(&before);
            self.record_end(before, ended_ms);
        }
        self.resends.remove(&job);
        self.explained.remove(&job);
    }

    fn record_prompt(&mut self, job: &Job) {
        if let JobPhase::Running { node, boot, .. } = &job.phase {
            self.prefix_index.record_prompt(node, *boot, &job.model, &job.prefix);
        }
    }

    /// Records that the node was asked to compute the prompt of an expected call.
    pub fn on_prefill_hint_sent(&mut self, node: &NodeId, hint: &PrefillHint) {
        if let Some(boot) = self.nodes.get(node).map(|node| node.boot) {
            let chain = chain(hint.model.as_str(), &hint.messages);
            self.prefix_index.record_prompt(node, boot, &hint.model, &chain);
        }
    }

    /// Keeps an ended job while its node's ledger still counts it.
    fn record_end(&mut self, before: Job, ended_ms: i64) {
        if let (JobPhase::Running { accepted_ms, .. }, Some((node, boot))) = (&before.phase, before.holder())
            && let Some(node) = self.nodes.get(node)
            && node.boot == boot
            && *accepted_ms < node.seen_ms
            && ended_ms >= node.seen_ms
        {
            self.ended.push(EndedJob { job: before, ended_ms });
        }
    }

    /// Stores the current row of a node.
    pub fn on_node_row(&mut self, node: Node) {
        let same_boot = |boot: BootId| boot == node.boot;
        self.ended.retain(|e| {
            e.job.holder().is_none_or(|(id, boot)| *id != node.id || (same_boot(boot) && e.ended_ms >= node.seen_ms))
        });
        if self.unresponsive.get(&node.id).is_some_and(|(boot, _)| !same_boot(*boot)) {
            self.unresponsive.remove(&node.id);
        }
        self.nodes.insert(node.id.clone(), node);
    }

    /// Removes a node whose row was deleted.
    pub fn on_node_gone(&mut self, node: &NodeId) {
        self.nodes.remove(node);
        self.prefix_index.forget_node(node);
        self.load_requests.retain(|(requested, _), _| requested != node);
        self.unresponsive.remove(node);
        self.ended.retain(|e| e.job.holder().is_none_or(|(id, _)| id != node));
    }

    /// Records that an [`Effect::Resend`](crate::Effect::Resend) was carried out.
    pub fn on_resent(&mut self, job: JobId, lease: LeaseId, now_ms: i64) {
        let count = self.resends.get(&job).filter(|r| r.lease == lease).map_or(0, |r| r.count) + 1;
        self.resends.insert(job, Resends { lease, count, last_ms: now_ms });
    }

    /// Records that the node sends heartbeats but did not accept what was published to it: it gets no work until its
    /// ledger changes.
    pub fn on_node_unresponsive(&mut self, node: &NodeId, now_ms: i64) {
        if let Some(row) = self.nodes.get(node) {
            let exclusion = Exclusion { version: row.ledger.version, at_ms: now_ms };
            self.unresponsive.insert(node.clone(), (row.boot, exclusion));
        }
    }

    /// Records that an [`Effect::Load`](crate::Effect::Load) was carried out.
    pub fn on_load_requested(&mut self, node: NodeId, boot: BootId, model: ModelId, now_ms: i64) {
        self.load_requests.insert((node, model), (boot, now_ms));
    }

    /// Returns whether this boot of the node was asked to load the model within the last `accept_timeout_ms`. The
    /// message may be lost, so a node that does not start the load is asked again after that.
    pub(crate) fn load_requested_recently(&self, node: &NodeId, model: &ModelId, now_ms: i64) -> bool {
        let boot = self.nodes.get(node).map(|n| n.boot);
        self.load_requests
            .get(&(node.clone(), model.clone()))
            .is_some_and(|(asked, at)| Some(*asked) == boot && now_ms.abs_diff(*at) < self.timing.accept_timeout_ms)
    }

    /// Records that an [`Effect::Explain`](crate::Effect::Explain) was carried out. Call it after the job's row was
    /// read again.
    pub fn on_pending_explained(&mut self, job: JobId, pending: PendingReason, now_ms: i64) {
        self.explained.insert(job, Explained { pending, at_ms: now_ms });
    }

    /// Leases of the jobs that are placed but not accepted.
    pub fn placed_leases(&self) -> impl Iterator<Item = LeaseId> + '_ {
        self.jobs.values().filter_map(|job| match &job.phase {
            JobPhase::Placed { lease, .. } => Some(*lease),
            JobPhase::Queued | JobPhase::Running { .. } => None,
        })
    }

    /// The cached row of a job that has not ended.
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// Ids of the cached jobs; the scheduler service uses them to find the jobs that have ended.
    pub fn job_ids(&self) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.keys().copied()
    }

    /// Ids of the cached nodes.
    pub fn node_ids(&self) -> impl Iterator<Item = &NodeId> {
        self.nodes.keys()
    }

    /// Returns whether the node may be given work for the model now, regardless of its free capacity.
    pub(crate) fn accepts_work(&self, node: &Node, model: &ModelId, now_ms: i64) -> bool {
        let max_ms = self.timing.accept_timeout_ms.saturating_mul(MAX_EXCLUSION_ACCEPT_TIMEOUTS);
        let applies = |exclusion: &Exclusion| exclusion.applies(&node.ledger, now_ms, max_ms);
        let unresponsive = self.unresponsive.get(&node.id).is_some_and(|(_, exclusion)| applies(exclusion));
        node.alive(now_ms, self.timing.lease_ttl_ms)
            && !node.ledger.draining
            && !node.ledger.yields.contains_key(model)
            && !node.excluded_for(model, now_ms, max_ms)
            && !unresponsive
    }

    /// Free capacity of a model on a node: the ledger, corrected by what changed since (see the module's
    /// documentation).
    pub(crate) fn capacity(&self, node: &Node, model: &ModelState) -> ModelCapacity {
        let runs_on_it = |job: &&Job| job.holder() == Some((&node.id, node.boot)) && job.model == model.model;
        let uncounted = self.jobs.values().filter(runs_on_it).filter(|job| match job.phase {
            JobPhase::Queued => false,
            JobPhase::Placed { .. } => true,
            JobPhase::Running { accepted_ms, .. } => accepted_ms >= node.seen_ms,
        });
        let sum = |(tokens, slots): (u64, u32), job: &Job| (tokens + kv_reservation(job, model), slots + 1);
        let (taken_tokens, taken_slots) = uncounted.fold((0, 0), sum);
        let (freed_tokens, freed_slots) = self.ended.iter().map(|e| &e.job).filter(runs_on_it).fold((0, 0), sum);
        let concurrent = (model.running + taken_slots).saturating_sub(freed_slots);
        ModelCapacity {
            tokens: (model.kv_tokens_free + freed_tokens).saturating_sub(taken_tokens),
            slots: model.max_sequences.saturating_sub(concurrent),
            concurrent,
        }
    }

    /// Models that live nodes list. `None` if no node is live.
    pub(crate) fn models_of_live_nodes(&self, now_ms: i64) -> Option<BTreeSet<&ModelId>> {
        let mut alive = self.nodes.values().filter(|n| n.alive(now_ms, self.timing.lease_ttl_ms)).peekable();
        alive.peek()?;
        Some(alive.flat_map(|n| n.ledger.models.iter().map(|m| &m.model)).collect())
    }

    /// Live nodes that list the model, in the order of their names.
    pub(crate) fn live_nodes_with<'a>(
        &'a self,
        model: &'a ModelId,
        now_ms: i64,
    ) -> impl Iterator<Item = (&'a Node, &'a ModelState)> {
        self.nodes
            .values()
            .filter(move |n| n.alive(now_ms, self.timing.lease_ttl_ms))
            .filter_map(move |n| n.model(model).map(|m| (n, m)))
    }
}
