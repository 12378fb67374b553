//! Explains what is planned for a job: its position, the nodes with their costs or why they cannot run it, and when it is
//! expected to start. It only reads the cache, with the functions that place jobs. Its work is bounded.

use cfq_proto::http::{CostTerms, JobEstimate, JobPlan, NodePlan, NodeVerdict, QueuePosition, ReservationView};
use cfq_proto::ids::JobId;
use cfq_proto::node::{ModelState, Residency};

use crate::candidates::is_open;
use crate::capacity::ModelCapacity;
use crate::cost::{PlacementCost, load_ms, placement_cost};
use crate::job::{Job, JobPhase};
use crate::node::Node;
use crate::node_cost::node_cost;
use crate::queue_estimate::{QueueEstimate, queue_estimate};
use crate::room_timeline::expected_end_ms;
use crate::start_estimate::start_estimate;
use crate::state::PlannerState;

/// Maximum number of nodes that an explanation lists.
const MAX_LISTED_NODES: usize = 64;

/// Explains a job that has not ended; `None` if it is not in the cache.
pub fn explain_job(state: &PlannerState, job: JobId, now_ms: i64) -> Option<JobPlan> {
    let job = state.jobs.get(&job)?;
    if let Some((holder, _)) = job.holder() {
        let model = state.nodes.get(holder).and_then(|node| node.model(&job.model));
        let estimate = model.map(|model| JobEstimate {
            node: holder.clone(),
            start_in_ms: 0,
            end_in_ms: ms_until(expected_end_ms(job, model, now_ms), now_ms),
            is_certain: true,
        });
        return Some(JobPlan { estimate, ..JobPlan::default() });
    }
    let position = position(state, job);
    let mut nodes: Vec<NodePlan> = listed_nodes(state, job).map(|node| node_plan(state, job, node, now_ms)).collect();
    // Stable: nodes of equal cost stay in the order of their names, as when a job is placed.
    nodes.sort_by_key(|node| node.cost.map_or(u64::MAX, |cost| cost.total_ms()));
    let reservation = state.reservations.get(&job.model).map(|reservation| ReservationView {
        job: reservation.job,
        node: reservation.node.clone(),
        age_ms: ms_until(now_ms, reservation.since_ms),
        start_in_ms: ms_until(reservation.start_ms, now_ms),
    });
    let estimate = queue_estimate(state, job, position.before, now_ms).map(|estimate| {
        let QueueEstimate { node, start_ms, end_ms, is_certain } = estimate;
        let (start_in_ms, end_in_ms) = (ms_until(start_ms, now_ms), ms_until(end_ms, now_ms));
        JobEstimate { node, start_in_ms, end_in_ms, is_certain }
    });
    let omitted_nodes = state.nodes.len().saturating_sub(nodes.len()) as u64;
    Some(JobPlan { position: Some(position), nodes, omitted_nodes, reservation, estimate })
}

fn position(state: &PlannerState, job: &Job) -> QueuePosition {
    let (before, queued) = state.queue.position(job);
    QueuePosition { before: before as u64, queued: queued as u64 }
}

/// First the nodes that list the model, then the others.
fn listed_nodes<'a>(state: &'a PlannerState, job: &Job) -> impl Iterator<Item = &'a Node> {
    let listing = state.nodes_by_model.get(&job.model);
    let with_model = listing.into_iter().flatten().filter_map(|id| state.nodes.get(id));
    let without_model = state
        .nodes
        .iter()
        .filter(move |(id, _)| listing.is_none_or(|listing| !listing.contains(*id)))
        .map(|(_, node)| node);
    with_model.chain(without_model).take(MAX_LISTED_NODES).map(|node| &**node)
}

fn node_plan(state: &PlannerState, job: &Job, node: &Node, now_ms: i64) -> NodePlan {
    let id = node.id.clone();
    let Some(model) = node.model(&job.model) else {
        let verdict = if node.alive(now_ms, state.timing.lease_ttl_ms) {
            NodeVerdict::NoModel
        } else {
            NodeVerdict::NotAlive { silent_ms: ms_until(now_ms, node.seen_ms) }
        };
        return NodePlan { node: id, verdict, cost: None, start_in_ms: None };
    };
    let capacity = state.capacity(node, model);
    let cost = node_cost(state, job, node, model, capacity.concurrent, now_ms);
    let candidate = (node, model);
    let start = is_open(state, job, &candidate, now_ms)
        .then(|| start_estimate(state, job, candidate, now_ms, vec![]))
        .flatten();
    let verdict = match is_open(state, job, &candidate, now_ms) {
        true => room_verdict(state, job, candidate, capacity, start.is_some()),
        false => closed_verdict(state, job, node, model, now_ms),
    };
    let needs_load = !matches!(model.residency, Residency::Resident | Residency::Unusable { .. });
    let terms = cost_terms(&cost, capacity, if needs_load { load_ms(model) } else { 0.0 });
    NodePlan { node: id, verdict, cost: Some(terms), start_in_ms: start.map(|start| ms_until(start.at_ms, now_ms)) }
}

/// Whether a node that accepts the job has room for it.
fn room_verdict(
    state: &PlannerState,
    job: &Job,
    (node, model): (&Node, &ModelState),
    capacity: ModelCapacity,
    can_ever_start: bool,
) -> NodeVerdict {
    if !state.occupancy(&node.id).admits(job) {
        return NodeVerdict::Isolated;
    }
    let reserved = state.reservations.get(&job.model).filter(|r| r.node == node.id && r.job != job.id);
    match (capacity.reservation_for(&placement_cost(job, model, capacity.concurrent, 0)), reserved) {
        (Some(_), Some(reservation)) => NodeVerdict::Reserved { job: reservation.job },
        (Some(_), None) => NodeVerdict::HasRoom,
        (None, _) if !can_ever_start => NodeVerdict::TooLarge,
        (None, _) if capacity.slots == 0 => NodeVerdict::NoFreeSlot,
        (None, _) => NodeVerdict::TooFewFreeTokens,
    }
}

/// Why a node does not accept the job now, whatever room it has.
fn closed_verdict(state: &PlannerState, job: &Job, node: &Node, model: &ModelState, now_ms: i64) -> NodeVerdict {
    if !node.alive(now_ms, state.timing.lease_ttl_ms) {
        return NodeVerdict::NotAlive { silent_ms: ms_until(now_ms, node.seen_ms) };
    }
    if let Some(reason) = job.refused_by.get(&node.id) {
        return NodeVerdict::Refused { reason: reason.clone() };
    }
    if node.ledger.draining {
        return NodeVerdict::Draining;
    }
    if node.cordoned {
        return NodeVerdict::Cordoned;
    }
    if let Some(program) = node.ledger.yields.get(&model.model) {
        return NodeVerdict::Yielding { program: program.clone() };
    }
    match &model.residency {
        Residency::Unusable { reason } => return NodeVerdict::Unusable { reason: reason.clone() },
        Residency::Loading => return NodeVerdict::Loading,
        Residency::Available if model.running > 0 => return NodeVerdict::Unloading,
        Residency::Available => return NodeVerdict::NotLoaded,
        Residency::Resident => {}
    }
    if job.has_fallback && job.is_blocked_on(&node.id, now_ms) {
        let failure = job.last_failure.as_ref().map(ToString::to_string).unwrap_or_default();
        return NodeVerdict::Unusable { reason: format!("the call failed, and the agent has a fallback: {failure}") };
    }
    if job.is_blocked_on(&node.id, now_ms) {
        let until_ms = job.node_failures.0.get(&node.id).map_or(now_ms, |backoff| backoff.until_ms);
        return NodeVerdict::Backoff { left_ms: ms_until(until_ms, now_ms) };
    }
    if node.excluded_for(&model.model, now_ms, state.max_exclusion_ms()) {
        return NodeVerdict::RefusedForNow;
    }
    NodeVerdict::Unresponsive
}

fn cost_terms(cost: &PlacementCost, capacity: ModelCapacity, load_ms: f64) -> CostTerms {
    // The conversions saturate.
    CostTerms {
        prompt_tokens: cost.prompt_tokens,
        cached_tokens: cost.cached_tokens,
        reserved_tokens: cost.reserved_tokens,
        free_tokens: capacity.tokens,
        free_slots: capacity.slots,
        other_sequences: capacity.concurrent,
        earlier_prefills_ms: cost.wait_ms as u64,
        prefill_ms: cost.prefill_ms as u64,
        decode_ms: cost.decode_ms as u64,
        eviction_ms: cost.eviction_ms as u64,
        load_ms: load_ms as u64,
    }
}

/// Time from `now_ms` until `at_ms`, in ms; 0 if it has passed.
fn ms_until(at_ms: i64, now_ms: i64) -> u64 {
    u64::try_from(at_ms.saturating_sub(now_ms)).unwrap_or(0)
}

impl PlannerState {
    /// Models with queued jobs, for [`queue_estimates`](crate::queue_estimates()).
    pub fn models_with_queued_jobs(&self) -> impl Iterator<Item = &cfq_proto::model::ModelId> {
        self.queue.models()
    }

    /// When the node accepted the job, in ms; `None` if the job is not running.
    pub fn accepted_ms(&self, job: JobId) -> Option<i64> {
        match self.jobs.get(&job)?.phase {
            JobPhase::Running { accepted_ms, .. } => Some(accepted_ms),
            JobPhase::Queued | JobPhase::Placed { .. } => None,
        }
    }
}
