//! The planner: decides which effects come next. Intended properties, checked by the property tests in `tests`:
//!
//! - a node never gets more than its last ledger admits, in tokens and in sequences;
//! - a plan that was carried out leaves nothing to do: planning twice changes nothing;
//! - a job never passes a higher-ranked one on a model that both wait for, so no job starves;
//! - a node loads the model of the highest-ranked job that needs a load there, and no other model is evicted for it
//!   while a job of higher rank waits on the node: two models on a node with memory for one take turns, and neither is
//!   evicted before it has served a call;
//! - a job that may be poison (it may have stopped more than one node) runs alone on its node, and while it waits, one
//!   node is reserved for it.

use std::collections::BTreeMap;

use cfq_proto::ids::NodeId;
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use crate::candidates::{Candidate, Candidates, accepts};
use crate::capacity::ModelCapacity;
use crate::cost::{PlacementCost, placement_cost};
use crate::effect::{Effect, UnplaceReason};
use crate::job::{Job, JobPhase};
use crate::model_loading::{LoadRequest, NodeLoads, node_loads, request_load};
use crate::node::Node;
use crate::occupancy::{NodeOccupancy, node_occupancies};
use crate::pending::pending_effect;
use crate::pending_reason::join_by_node;
use crate::priority::order_key;
use crate::state::PlannerState;

/// Maximum number of times that a placed attempt is published again to a node that sends heartbeats but does not accept
/// the attempt.
const MAX_RESENDS: u32 = 2;

/// Capacity that remains on each node after the placements and loads planned so far.
struct Remaining<'a> {
    /// Remaining capacity by node and model. Where an entry is missing, [`PlannerState::capacity`] still applies.
    capacities: BTreeMap<(&'a NodeId, &'a ModelId), ModelCapacity>,
    occupancies: BTreeMap<&'a NodeId, NodeOccupancy>,
    loads: BTreeMap<&'a NodeId, NodeLoads<'a>>,
}

impl<'a> Remaining<'a> {
    fn occupancy(&self, node: &'a NodeId) -> NodeOccupancy {
        self.occupancies.get(node).copied().unwrap_or_default()
    }

    /// Records that the job is placed on the node and reserves `tokens` of `capacity`.
    fn admit(&mut self, job: &'a Job, node: &'a NodeId, capacity: ModelCapacity, tokens: u64) {
        self.capacities.insert((node, &job.model), capacity.after_admitting(tokens));
        self.occupancies.entry(node).or_default().add(job);
        self.loads.entry(node).or_default().eviction_blocked = true;
    }

    /// Reserves the capacity that the job waits for, so that lower-ranked jobs do not take it: the job's model on all
    /// open nodes, or, for a job that may be poison, the whole node with the fewest jobs.
    fn reserve_for(&mut self, job: &'a Job, open: &[Candidate<'a>]) {
        if job.may_be_poison() {
            if let Some((node, _)) = open.iter().min_by_key(|(node, _)| self.occupancy(&node.id).jobs) {
                self.occupancies.entry(&node.id).or_default().exclusive = true;
            }
            return;
        }
        for (node, _) in open {
            self.capacities.insert((&node.id, &job.model), ModelCapacity::CLOSED);
            self.loads.entry(&node.id).or_default().eviction_blocked = true;
        }
    }

    /// Stops placements on the models that have to be evicted for a load.
    fn close_models_to_evict(&mut self, state: &PlannerState, request: LoadRequest<'a>) {
        let node = request.node;
        let planned =
            |model: &ModelState| self.capacities.get(&(&node.id, &model.model)).map(|capacity| capacity.concurrent);
        let is_idle =
            |model: &ModelState| planned(model).unwrap_or_else(|| state.capacity(node, model).concurrent) == 0;
        for model in request.models_to_evict(is_idle) {
            self.capacities.insert((&node.id, &model.model), ModelCapacity::CLOSED);
        }
    }
}

/// Returns the effects to carry out next, in order: first those that jobs and nodes wait for, then those that only record
/// why jobs wait. So a caller that stops early, because there are many, delays no placement. A pure function: the same
/// state and time give the same effects.
pub fn plan(state: &PlannerState, now_ms: i64) -> Vec<Effect> {
    let mut effects: Vec<Effect> =
        state.jobs.values().filter_map(|job| overdue_acceptance(state, job, now_ms)).collect();
    let mut queued: Vec<&Job> = state.jobs.values().filter(|j| matches!(j.phase, JobPhase::Queued)).collect();
    queued.sort_by_key(|job| order_key(job));
    let mut remaining =
        Remaining { capacities: BTreeMap::new(), occupancies: node_occupancies(state), loads: node_loads(state) };
    for job in queued {
        effects.extend(place(state, job, now_ms, &mut remaining));
    }
    let loads = remaining.loads.into_iter().flat_map(|(node, loads)| loads.planned.into_iter().map(move |l| (node, l)));
    let new_loads = loads.filter(|(node, load)| !state.load_requested_recently(node, load.model, now_ms));
    effects.extend(new_loads.filter_map(|(node, load)| {
        let boot = state.nodes.get(node)?.boot;
        let (node, model) = (node.clone(), load.model.clone());
        Some(Effect::Load { job: load.job, node, boot, model, reason: load.reason })
    }));
    // The sort is stable: jobs keep their order.
    effects.sort_by_key(Effect::is_record);
    effects
}

/// Returns the effect that resends or ends a placement that the node has not accepted in time.
fn overdue_acceptance(state: &PlannerState, job: &Job, now_ms: i64) -> Option<Effect> {
    let JobPhase::Placed { node, boot, lease, placed_ms } = &job.phase else { return None };
    let unplace = |reason: UnplaceReason| {
        Some(Effect::Unplace { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), reason })
    };
    let holder = state.nodes.get(node).filter(|n| n.boot == *boot);
    if !holder.is_some_and(|n| n.alive(now_ms, state.timing.lease_ttl_ms)) {
        return unplace(UnplaceReason::NodeLost);
    }
    let resends = state.resends.get(&job.id).filter(|r| r.lease == *lease);
    let since = resends.map_or(*placed_ms, |r| r.last_ms);
    // A placement far in the future was written before the database's clock was set back. How long it has waited is
    // unknown, so it counts as overdue.
    if now_ms.abs_diff(since) < state.timing.accept_timeout_ms {
        return None;
    }
    if resends.is_some_and(|r| r.count >= MAX_RESENDS) {
        return unplace(UnplaceReason::NodeUnresponsive);
    }
    Some(Effect::Resend { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), boot: *boot })
}

/// Returns the effect for a queued job: its placement, or what to do if it cannot be placed now.
fn place<'a>(state: &'a PlannerState, job: &'a Job, now_ms: i64, remaining: &mut Remaining<'a>) -> Option<Effect> {
    let candidates = Candidates::of(state, job, now_ms);
    if candidates.all_refused {
        let reason = format!("no node can run it: {}", join_by_node(&job.refused_by));
        return Some(Effect::Fail { job: job.id, attempt: job.attempt, failure: JobFailure::Rejected { reason } });
    }
    if let Some((best, next)) = two_cheapest(state, job, &candidates.open, remaining) {
        remaining.admit(job, &best.node.id, best.capacity, best.cost.reserved_tokens);
        let reason = placement_reason(&best, next.as_ref(), candidates.open.len());
        return Some(Effect::Place {
            job: job.id,
            attempt: job.attempt + 1,
            node: best.node.id.clone(),
            boot: best.node.boot,
            reason,
        });
    }
    remaining.reserve_for(job, &candidates.open);
    if candidates.resident.is_empty() {
        let loaders = candidates.able.iter().copied();
        let loaders =
            loaders.filter(|(n, _)| accepts(state, job, n, now_ms) && remaining.occupancy(&n.id).admits(job)).collect();
        let request = request_load(job, &candidates.able, loaders, &state.prefix_index, &mut remaining.loads);
        if let Some(request) = request {
            remaining.close_models_to_evict(state, request);
        }
    }
    pending_effect(state, job, &candidates, now_ms)
}

/// An open node that has room for a job.
struct Offer<'a> {
    node: &'a Node,
    /// The job's cost on the node; `reserved_tokens` is the number of tokens to reserve.
    cost: PlacementCost,
    /// Capacity of the node before the job is admitted.
    capacity: ModelCapacity,
}

/// Returns the open node with room for the job on which it costs least, and the next one. On ties, the first node in
/// the order of names precedes.
fn two_cheapest<'a>(
    state: &'a PlannerState,
    job: &'a Job,
    open: &[Candidate<'a>],
    remaining: &mut Remaining<'a>,
) -> Option<(Offer<'a>, Option<Offer<'a>>)> {
    let mut best: Option<Offer<'a>> = None;
    let mut next: Option<Offer<'a>> = None;
    for &(node, model) in open {
        if !remaining.occupancy(&node.id).admits(job) {
            continue;
        }
        let capacity =
            *remaining.capacities.entry((&node.id, &job.model)).or_insert_with(|| state.capacity(node, model));
        let cached_blocks = state.prefix_index.cached_blocks(node, model, &job.prefix);
        let cost = placement_cost(job, model, capacity.concurrent, cached_blocks);
        let Some(reserved_tokens) = capacity.reservation_for(&cost) else { continue };
        let offer = Offer { node, cost: PlacementCost { reserved_tokens, ..cost }, capacity };
        let precedes = |other: &Option<Offer<'a>>| {
            other.as_ref().is_none_or(|other| offer.cost.total_ms() < other.cost.total_ms())
        };
        if precedes(&best) {
            next = best.replace(offer);
        } else if precedes(&next) {
            next = Some(offer);
        }
    }
    best.map(|best| (best, next))
}

/// Numbers behind a placement, stored with the job and shown to users.
fn placement_reason(best: &Offer<'_>, next: Option<&Offer<'_>>, open: usize) -> String {
    let capacity = best.capacity;
    let mut reason = format!(
        "{} of {open} open nodes: resident, {}, needs {} of {} free tokens, {} of {} slots free, ledger {}",
        best.node.id,
        time_estimate(&best.cost),
        best.cost.reserved_tokens,
        capacity.tokens,
        capacity.slots,
        capacity.slots.saturating_add(capacity.concurrent),
        best.node.ledger.version,
    );
    if let Some(next) = next {
        reason += &format!("; next {}: {}", next.node.id, time_estimate(&next.cost));
    }
    reason
}

/// The expected durations of a job on a node.
fn time_estimate(cost: &PlacementCost) -> String {
    let cached = if cost.cached_tokens > 0 { format!(" ({} cached)", cost.cached_tokens) } else { String::new() };
    let computed = cost.prompt_tokens - cost.cached_tokens;
    let (prefill, decode) = (cost.prefill_ms / 1000.0, cost.decode_ms / 1000.0);
    format!("prefill {computed} tokens{cached} {prefill:.1} s, decode {decode:.1} s")
}
