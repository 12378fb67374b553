//! Estimates when a job can start on a node that is full now.

use std::cmp::Reverse;

use cfq_proto::node::ModelState;

use crate::candidates::{Candidate, is_open};
use crate::capacity::ModelCapacity;
use crate::cost::{kv_reservation, placement_cost};
use crate::job::{Job, JobPhase};
use crate::node::Node;
use crate::reservation::Reservation;
use crate::state::PlannerState;

/// When a job can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StartEstimate {
    pub at_ms: i64,
    /// False if the node also runs sequences that are not in the cache, so that their ends are unknown. The job can
    /// then start later than estimated.
    is_certain: bool,
}

/// A placement that is planned but not carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub end_ms: i64,
    pub tokens: u64,
    /// Time to compute its prompt, in ms.
    pub prefill_ms: f64,
}

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
    let cost = placement_cost(job, model, 0, 0);
    let mut capacity = state.capacity(node, model);
    let held = state.held_jobs(&node.id);
    let held = held.filter(|held| held.holder() == Some((&node.id, node.boot)) && held.model == model.model);
    let mut ends: Vec<(i64, u64)> = held
        .map(|held| (expected_end_ms(held, model, now_ms).max(now_ms), kv_reservation(held, model)))
        .chain(planned.iter().map(|planned| (planned.end_ms, planned.tokens)))
        .collect();
    ends.sort_unstable();
    for planned in &planned {
        capacity = capacity.after_admitting(planned.tokens);
    }
    let mut at_ms = now_ms;
    for (end_ms, tokens) in ends {
        if capacity.reservation_for(&cost).is_some() {
            break;
        }
        at_ms = end_ms;
        capacity = ModelCapacity {
            tokens: capacity.tokens.saturating_add(tokens),
            slots: (capacity.slots + 1).min(model.max_sequences),
            concurrent: capacity.concurrent.saturating_sub(1),
        };
    }
    let is_certain = capacity.reservation_for(&cost).is_some();
    (is_certain || capacity.concurrent > 0).then_some(StartEstimate { at_ms, is_certain })
}

/// Time at which the job has generated the maximum number of tokens if it runs alone on the model and nothing of its
/// prompt was cached; a queued job would begin now. With more sequences it ends later, so that a job that reserves its
/// room does not count on it too late.
pub(crate) fn expected_end_ms(job: &Job, model: &ModelState, now_ms: i64) -> i64 {
    let began_ms = match &job.phase {
        JobPhase::Queued => now_ms,
        JobPhase::Placed { placed_ms, .. } => *placed_ms,
        JobPhase::Running { accepted_ms, .. } => *accepted_ms,
    };
    began_ms.saturating_add(placement_cost(job, model, 0, 0).total_ms() as i64)
}
