//! Estimates when a job can start on a node that is full now.

use std::cmp::Reverse;

use crate::candidates::{Candidate, is_open};
use crate::cost::placement_cost;
use crate::job::Job;
use crate::node::Node;
use crate::reservation::Reservation;
use crate::room_timeline::{Planned, RoomTimeline, StartEstimate};
use crate::state::PlannerState;

/// Returns the node where the job can start first. `None` if it does not fit on any node, however long it waits.
/// `planned` are the placements that are planned for the job's model on a node.
pub(crate) fn reserve_node(
    state: &PlannerState,
    job: &Job,
    now_ms: i64,
    planned: impl Fn(&Node) -> Vec<Planned>,
) -> Option<Reservation> {
    let nodes = state.live_nodes_with(&job.model, now_ms).filter(|candidate| is_open(state, job, candidate, now_ms));
    let nodes = nodes.filter(|(node, _)| !state.occupancy(&node.id).exclusive);
    let starts = nodes
        .filter_map(|(node, model)| Some((start_estimate(state, job, (node, model), now_ms, planned(node))?, node)));
    let (start, node) = starts.min_by_key(|(start, node)| (Reverse(start.is_certain), start.at_ms, &node.id))?;
    let (node, boot) = (node.id.clone(), node.boot);
    Some(Reservation { job: job.id, node, boot, since_ms: now_ms, start_ms: start.at_ms })
}

/// Estimates when the job can start on the node: once enough of the jobs there have ended. `None` if it does not fit
/// after all of them have.
pub(crate) fn start_estimate(
    state: &PlannerState,
    job: &Job,
    (node, model): Candidate<'_>,
    now_ms: i64,
    planned: Vec<Planned>,
) -> Option<StartEstimate> {
    RoomTimeline::of(state, (node, model), now_ms, &planned).start(&placement_cost(job, model, 0, 0))
}
