//! Estimates when the queued jobs of a model start: each job, in their order, is added to the node where it has room
//! first. The estimate uses the same capacities, reservations of tokens and durations as the placement. It assumes that
//! each call generates its maximum number of tokens, and that no other job is submitted.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::candidates::{Candidate, is_open};
use crate::cost::{load_ms, placement_cost};
use crate::job::Job;
use crate::node::Node;
use crate::room_timeline::RoomTimeline;
use crate::state::{PlannerState, is_ready};

/// Maximum number of jobs that are estimated one by one. Those behind them are expected to start at the same rate.
const MAX_ESTIMATED_JOBS: usize = 256;
/// Maximum number of nodes that are compared.
const MAX_NODES: usize = 1_024;

/// When a queued job is expected to start and end, in ms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueEstimate {
    /// Node where the job starts first.
    pub node: NodeId,
    /// Time of the start.
    pub start_ms: i64,
    /// Time of the end.
    pub end_ms: i64,
    /// Whether everything that the estimate depends on is known.
    pub is_certain: bool,
}

/// The expected starts of the first queued jobs of a model, at most 256 of them. A job that no node can run now is left
/// out.
pub fn queue_estimates(state: &PlannerState, model: &ModelId, now_ms: i64) -> BTreeMap<JobId, QueueEstimate> {
    let mut timelines = timelines(state, model, now_ms);
    let mut estimates = BTreeMap::new();
    for key in state.queue.in_order(model).take(MAX_ESTIMATED_JOBS) {
        let Some(job) = state.jobs.get(&key.job()) else { continue };
        let starts =
            timelines.iter_mut().filter(|timeline| timeline.serves(state, job, now_ms)).filter_map(|timeline| {
                let cost = placement_cost(job, timeline.candidate.1, 0, 0);
                let start = timeline.room.start(&cost)?;
                Some((!(start.is_certain && timeline.is_loaded), start.at_ms, timeline, cost))
            });
        let first = starts.min_by(|a, b| (a.0, a.1, &a.2.candidate.0.id).cmp(&(b.0, b.1, &b.2.candidate.0.id)));
        let Some((is_uncertain, start_ms, timeline, cost)) = first else { continue };
        let duration_ms = cost.total_ms() as i64;
        timeline.room.add(&cost, duration_ms);
        // A job that may be poison needs a whole node, which the timelines do not show.
        let is_certain = !is_uncertain && !job.may_be_poison();
        let (node, end_ms) = (timeline.candidate.0.id.clone(), start_ms.saturating_add(duration_ms));
        estimates.insert(job.id, QueueEstimate { node, start_ms, end_ms, is_certain });
    }
    estimates
}

/// The expected start of one queued job. `before` is the number of jobs before it.
pub(crate) fn queue_estimate(state: &PlannerState, job: &Job, before: u64, now_ms: i64) -> Option<QueueEstimate> {
    let mut estimates = queue_estimates(state, &job.model, now_ms);
    if let Some(own) = estimates.remove(&job.id) {
        return Some(own);
    }
    if before < MAX_ESTIMATED_JOBS as u64 {
        return None;
    }
    let last = estimates.into_values().max_by_key(|estimate| estimate.start_ms)?;
    let wait_ms = last.start_ms.saturating_sub(now_ms) as f64 * before as f64 / MAX_ESTIMATED_JOBS as f64;
    let node = state.nodes.get(&last.node)?;
    let duration_ms = placement_cost(job, node.model(&job.model)?, 0, 0).total_ms();
    let start_ms = now_ms.saturating_add(wait_ms as i64);
    let end_ms = start_ms.saturating_add(duration_ms as i64);
    Some(QueueEstimate { node: last.node, start_ms, end_ms, is_certain: false })
}

/// A node that serves the model, now or after a load.
struct NodeTimeline<'a> {
    candidate: Candidate<'a>,
    is_loaded: bool,
    room: RoomTimeline,
}

impl NodeTimeline<'_> {
    fn serves(&self, state: &PlannerState, job: &Job, now_ms: i64) -> bool {
        let node = &self.candidate.0.id;
        match self.is_loaded {
            true => is_open(state, job, &self.candidate, now_ms),
            false => !job.refused_by.contains_key(node) && !job.is_blocked_on(node, now_ms),
        }
    }
}

/// The timelines of the nodes that have the model loaded; if there is none, of those that can load it.
fn timelines<'a>(state: &'a PlannerState, model: &'a ModelId, now_ms: i64) -> Vec<NodeTimeline<'a>> {
    let live: Vec<Candidate<'a>> = state.live_nodes_with(model, now_ms).take(MAX_NODES).collect();
    let loaded: Vec<NodeTimeline<'a>> = live
        .iter()
        .filter(|(node, model)| is_ready(node, model) && !state.occupancy(&node.id).exclusive)
        .map(|candidate| {
            let room = RoomTimeline::of(state, *candidate, now_ms, &[]);
            NodeTimeline { candidate: *candidate, is_loaded: true, room }
        })
        .collect();
    if !loaded.is_empty() {
        return loaded;
    }
    let loads = live.into_iter().filter(|(node, model)| may_load(state, node, model, now_ms));
    loads
        .map(|candidate| {
            let loaded_ms = now_ms.saturating_add(load_ms(candidate.1) as i64);
            let room = RoomTimeline::after_load(loaded_ms, candidate.1.max_sequences);
            NodeTimeline { candidate, is_loaded: false, room }
        })
        .collect()
}

fn may_load(state: &PlannerState, node: &Node, model: &ModelState, now_ms: i64) -> bool {
    matches!(model.residency, Residency::Available | Residency::Loading)
        && state.accepts_work(node, &model.model, now_ms)
}
