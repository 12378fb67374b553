//! The nodes considered for a queued job.

use cfq_proto::node::ModelState;

use crate::job::Job;
use crate::node::Node;
use crate::state::{PlannerState, is_ready};

/// A node together with its state of the job's model.
pub(crate) type Candidate<'a> = (&'a Node, &'a ModelState);

/// The live nodes that have a job's model, in three sets, each a subset of the one before.
#[derive(Debug)]
pub(crate) struct Candidates<'a> {
    /// True if at least one live node has the model and all such nodes refused the job permanently.
    pub all_refused: bool,
    /// Nodes that have the model and did not refuse the job permanently.
    pub able: Vec<Candidate<'a>>,
    /// Nodes of `able` on which the model is resident and not yielding, and which are not cordoned.
    pub resident: Vec<Candidate<'a>>,
    /// Nodes of `resident` that accept the job now, provided that it fits into their free capacity.
    pub open: Vec<Candidate<'a>>,
}

impl<'a> Candidates<'a> {
    pub fn of(state: &'a PlannerState, job: &'a Job, now_ms: i64) -> Self {
        let listing: Vec<Candidate<'a>> = state.live_nodes_with(&job.model, now_ms).collect();
        let able: Vec<Candidate<'a>> =
            listing.iter().copied().filter(|(n, _)| !job.refused_by.contains_key(&n.id)).collect();
        let resident: Vec<Candidate<'a>> = able.iter().copied().filter(|(n, m)| is_ready(n, m)).collect();
        let open = resident.iter().copied().filter(|(n, _)| accepts(state, job, n, now_ms)).collect();
        Self { all_refused: !listing.is_empty() && able.is_empty(), able, resident, open }
    }
}

/// Returns whether the node accepts work for the job's model and is not in backoff for the job.
pub(crate) fn accepts(state: &PlannerState, job: &Job, node: &Node, now_ms: i64) -> bool {
    !job.is_blocked_on(&node.id, now_ms) && state.accepts_work(node, &job.model, now_ms)
}

/// Returns whether the node accepts the job now, regardless of its free capacity.
pub(crate) fn is_open(state: &PlannerState, job: &Job, (node, model): &Candidate<'_>, now_ms: i64) -> bool {
    is_ready(node, model) && !job.refused_by.contains_key(&node.id) && accepts(state, job, node, now_ms)
}
