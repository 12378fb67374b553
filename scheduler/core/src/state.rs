//! The planner's cache of rows. It makes no decisions.
//!
//! **Capacity.** A node's ledger states what its KV pool admits. Between two ledgers, the cache corrects these numbers
//! in both directions. A job that is placed, or was accepted since the node's last heartbeat, is not in the ledger yet:
//! its tokens and its slot are subtracted. A job that was in the ledger and has ended since is still counted there: its
//! tokens and its slot are added back, unless the ledger already shows that the sequence has ended. The ledger of the
//! next heartbeat contains both changes. So two jobs placed between two heartbeats never use the same capacity, and a
//! freed slot need not stay idle until the next heartbeat. If the correction is wrong, the node refuses (`not_now`),
//! which costs one message.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::capacity::ModelCapacity;
use crate::changes::Changes;
use crate::cost::kv_reservation;
use crate::job::{Job, JobPhase};
use crate::loads_in_progress::LoadsInProgress;
use crate::node::{Exclusion, Node};
use crate::occupancy::NodeOccupancy;
use crate::pending_reason::PendingReason;
use crate::prefix_index::PrefixIndex;
use crate::queue::Queue;
use crate::reservation::Reservation;
use crate::rooms::{Room, Rooms};

/// The durations of `cfq_proto::timing` that the planner needs, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannerTiming {
    /// Time from a node's last heartbeat until the node counts as not alive.
    pub lease_ttl_ms: u64,
    /// Time after which a placed job that was not accepted is published again.
    pub accept_timeout_ms: u64,
    /// Time that a node has to prepare a prompt before it accepts the job.
    pub prepare_timeout_ms: u64,
    /// Retry ceiling: time without an answer after which a job fails.
    pub retry_ceiling_ms: u64,
}

/// Maximum duration of an exclusion, as a multiple of `accept_timeout_ms`: after it the exclusion ends even if the
/// ledger does not change.
const MAX_EXCLUSION_ACCEPT_TIMEOUTS: u64 = 10;

/// A job that ended on a node whose last ledger may still count it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EndedJob {
    pub job: Job,
    pub ended_ms: i64,
}

/// Cached rows, and a record of what the leader has done since it started.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerState {
    pub(crate) timing: PlannerTiming,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) nodes: BTreeMap<NodeId, Arc<Node>>,
    /// Nodes that list each model.
    pub(crate) nodes_by_model: BTreeMap<ModelId, BTreeSet<NodeId>>,
    /// Placed and running jobs by node.
    pub(crate) held: BTreeMap<NodeId, BTreeSet<JobId>>,
    pub(crate) ended: BTreeMap<NodeId, Vec<EndedJob>>,
    /// Number of jobs of each task.
    pub(crate) jobs_of_task: BTreeMap<TaskId, u32>,
    pub(crate) queue: Queue,
    pub(crate) rooms: Rooms,
    pub(crate) reservations: BTreeMap<ModelId, Reservation>,
    pub(crate) changes: Changes,
    pub(crate) resends: BTreeMap<JobId, Resends>,
    /// Nodes that send heartbeats but accept no work.
    pub(crate) unresponsive: BTreeMap<NodeId, (BootId, Exclusion)>,
    pub(crate) explained: BTreeMap<JobId, Explained>,
    /// Last request to load each model on each node: the boot it was sent to, and its time in ms.
    pub(crate) load_requests: BTreeMap<(NodeId, ModelId), (BootId, i64)>,
    pub(crate) loads_in_progress: LoadsInProgress,
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

/// Room of a model on a node.
struct LedgerRoom {
    /// Free tokens of the ledger and those of jobs that ended since.
    tokens: u64,
    /// Tokens reserved by placements that the ledger does not show yet.
    taken_tokens: u64,
    /// Number of sequences, with these placements.
    concurrent: u32,
}

/// Whether the node's ledger does not show the job yet.
fn is_uncounted(job: &Job, node: &Node) -> bool {
    match job.phase {
        JobPhase::Queued => false,
        JobPhase::Placed { .. } => true,
        JobPhase::Running { accepted_ms, .. } => accepted_ms >= node.seen_ms,
    }
}

impl PlannerState {
    /// Creates an empty cache.
    pub fn new(timing: PlannerTiming) -> Self {
        Self {
            timing,
            jobs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            nodes_by_model: BTreeMap::new(),
            held: BTreeMap::new(),
            ended: BTreeMap::new(),
            jobs_of_task: BTreeMap::new(),
            queue: Queue::default(),
            rooms: Rooms::default(),
            reservations: BTreeMap::new(),
            changes: Changes::default(),
            resends: BTreeMap::new(),
            unresponsive: BTreeMap::new(),
            explained: BTreeMap::new(),
            load_requests: BTreeMap::new(),
            loads_in_progress: LoadsInProgress::default(),
            prefix_index: PrefixIndex::default(),
        }
    }

    /// Returns whether this boot of the node was asked to load the model within the last `accept_timeout_ms`. The
    /// message may be lost, so a node that does not start the load is asked again after that.
    pub(crate) fn load_requested_recently(&self, node: &NodeId, model: &ModelId, now_ms: i64) -> bool {
        let boot = self.nodes.get(node).map(|n| n.boot);
        self.load_requests
            .get(&(node.clone(), model.clone()))
            .is_some_and(|(asked, at)| Some(*asked) == boot && now_ms.abs_diff(*at) < self.timing.accept_timeout_ms)
    }

    /// Returns whether the node's load of the model takes longer than the retry ceiling.
    pub(crate) fn is_load_overdue(&self, node: &NodeId, model: &ModelId, now_ms: i64) -> bool {
        let overdue_ms = self.loads_in_progress.overdue_ms(node, model, self.timing.retry_ceiling_ms);
        overdue_ms.is_some_and(|overdue_ms| now_ms >= overdue_ms)
    }

    /// Returns whether a load of the node, of any model, takes longer than the retry ceiling. A node loads one model
    /// after the other.
    pub(crate) fn has_overdue_load(&self, node: &NodeId, now_ms: i64) -> bool {
        self.loads_in_progress.is_any_overdue(node, self.timing.retry_ceiling_ms, now_ms)
    }

    /// Leases of the jobs that are placed but not accepted.
    pub fn placed_leases(&self) -> impl Iterator<Item = LeaseId> + '_ {
        self.held.keys().flat_map(|node| self.held_jobs(node)).filter_map(|job| match &job.phase {
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

    /// Jobs that are placed or running on the node, on any of its boots.
    pub(crate) fn held_jobs(&self, node: &NodeId) -> impl Iterator<Item = &Job> {
        self.held.get(node).into_iter().flatten().filter_map(|job| self.jobs.get(job))
    }

    /// Which jobs the node runs concurrently.
    pub(crate) fn occupancy(&self, node: &NodeId) -> NodeOccupancy {
        let mut occupancy = NodeOccupancy::default();
        self.held_jobs(node).for_each(|job| occupancy.add(job));
        occupancy
    }

    pub(crate) fn max_exclusion_ms(&self) -> u64 {
        self.timing.accept_timeout_ms.saturating_mul(MAX_EXCLUSION_ACCEPT_TIMEOUTS)
    }

    /// Returns whether the node may be given work for the model now, regardless of its free capacity.
    pub(crate) fn accepts_work(&self, node: &Node, model: &ModelId, now_ms: i64) -> bool {
        let max_ms = self.max_exclusion_ms();
        let applies = |exclusion: &Exclusion| exclusion.applies(&node.ledger, now_ms, max_ms);
        let unresponsive = self.unresponsive.get(&node.id).is_some_and(|(_, exclusion)| applies(exclusion));
        node.alive(now_ms, self.timing.lease_ttl_ms)
            && !node.ledger.draining
            && !node.cordoned
            && !node.ledger.yields.contains_key(model)
            && !node.excluded_for(model, now_ms, max_ms)
            && !unresponsive
    }

    /// Free capacity of a model on a node: the ledger, corrected by what changed since (see the module's
    /// documentation).
    pub(crate) fn capacity(&self, node: &Node, model: &ModelState) -> ModelCapacity {
        let room = self.ledger_room(node, model);
        ModelCapacity {
            tokens: room.tokens.saturating_sub(room.taken_tokens),
            slots: model.max_sequences.saturating_sub(room.concurrent),
            concurrent: room.concurrent,
        }
    }

    /// Returns the tokens that become free when a job of the model on the node ends. A job that was placed alone may have an
    /// estimate above all tokens; it then takes all.
    pub(crate) fn held_tokens(&self, node: &Node, model: &ModelState) -> impl Fn(&Job) -> u64 {
        let room_tokens = self.ledger_room(node, model).tokens;
        move |job| {
            let tokens = kv_reservation(job, model);
            if is_uncounted(job, node) { tokens.min(room_tokens) } else { tokens }
        }
    }

    fn ledger_room(&self, node: &Node, model: &ModelState) -> LedgerRoom {
        let runs_on_it = |job: &&Job| job.holder() == Some((&node.id, node.boot)) && job.model == model.model;
        let uncounted = self.held_jobs(&node.id).filter(runs_on_it).filter(|job| is_uncounted(job, node));
        let sum = |(tokens, slots): (u64, u32), job: &Job| (tokens + kv_reservation(job, model), slots + 1);
        let (taken_tokens, taken_slots) = uncounted.fold((0, 0), sum);
        let ended = self.ended.get(&node.id).into_iter().flatten().map(|e| &e.job).filter(runs_on_it);
        let mut freed: Vec<u64> = ended.map(|job| kv_reservation(job, model)).collect();
        // A ledger may show the end of a sequence before the result of its job is written. So it counts no more of the
        // ended jobs than it has sequences without a row.
        let rows = self.held_jobs(&node.id).filter(runs_on_it).count();
        freed.sort_unstable();
        freed.truncate(((model.running + taken_slots) as usize).saturating_sub(rows));
        let (freed_tokens, freed_slots) = (freed.iter().sum::<u64>(), freed.len() as u32);
        LedgerRoom {
            tokens: model.kv_tokens_free + freed_tokens,
            taken_tokens,
            concurrent: (model.running + taken_slots).saturating_sub(freed_slots),
        }
    }

    /// The models of the node that have room.
    pub(crate) fn rooms_of<'a>(&'a self, node: &'a Arc<Node>) -> impl Iterator<Item = (&'a ModelId, Option<Room>)> {
        let occupancy = self.occupancy(&node.id);
        let models = node.ledger.models.iter().enumerate();
        // A ledger that lists a model twice is valid for its first entry.
        let first = models.filter(|(_, m)| node.model(&m.model).is_some_and(|first| std::ptr::eq(first, *m)));
        first.map(move |(index, model)| {
            let may_serve = is_ready(node, model) && !node.ledger.draining && !occupancy.exclusive;
            let capacity = may_serve.then(|| self.capacity(node, model)).filter(|capacity| capacity.slots > 0);
            let room = |capacity| Room { node: node.clone(), model: index, capacity, held_jobs: occupancy.jobs };
            (&model.model, capacity.map(room))
        })
    }

    /// Returns whether a node is live.
    pub(crate) fn any_live_node(&self, now_ms: i64) -> bool {
        self.nodes.values().any(|n| n.alive(now_ms, self.timing.lease_ttl_ms))
    }

    /// Models that live nodes list.
    pub(crate) fn models_of_live_nodes(&self, now_ms: i64) -> BTreeSet<&ModelId> {
        let alive = self.nodes.values().filter(|n| n.alive(now_ms, self.timing.lease_ttl_ms));
        alive.flat_map(|n| n.ledger.models.iter().map(|m| &m.model)).collect()
    }

    /// Live nodes that list the model, in the order of their names.
    pub(crate) fn live_nodes_with<'a>(
        &'a self,
        model: &'a ModelId,
        now_ms: i64,
    ) -> impl Iterator<Item = (&'a Node, &'a ModelState)> {
        let nodes = self.nodes_by_model.get(model).into_iter().flatten().filter_map(|id| self.nodes.get(id));
        nodes
            .filter(move |n| n.alive(now_ms, self.timing.lease_ttl_ms))
            .filter_map(move |n| n.model(model).map(|m| (&**n, m)))
    }
}

/// Whether the model is resident and not yielding, on a node that is not cordoned. A node may yield or be cordoned for
/// hours, so such a model counts as not resident.
pub(crate) fn is_ready(node: &Node, model: &ModelState) -> bool {
    matches!(model.residency, Residency::Resident) && !node.ledger.yields.contains_key(&model.model) && !node.cordoned
}
