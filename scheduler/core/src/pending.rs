//! What to do with a queued job that cannot be placed now: fail it at the retry ceiling, or record why it waits.

use std::collections::BTreeMap;

use cfq_proto::ids::NodeId;
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::candidates::{Candidate, Candidates, is_open};
use crate::effect::Effect;
use crate::job::Job;
use crate::node::Node;
use crate::pending_reason::PendingReason;
use crate::reservation::Reservation;
use crate::state::PlannerState;

/// Number of writes of `no_node_ms` until the retry ceiling is reached: `no_node_ms` is written each time it has grown
/// by the retry ceiling divided by this number. A scheduler that exits unexpectedly loses at most this much of the
/// count, and a waiting job causes few writes.
const NO_NODE_WRITES_PER_CEILING: u64 = 20;
/// Minimum interval of these writes, in ms.
const MIN_NO_NODE_WRITE_INTERVAL_MS: u64 = 5_000;

/// Effect for a queued job that no node can take now. `None` if the recorded reason is still correct. `reservation` is
/// that of the job's model.
pub(crate) fn pending_effect(
    state: &PlannerState,
    job: &Job,
    candidates: &Candidates<'_>,
    reservation: Option<&Reservation>,
    now_ms: i64,
) -> Option<Effect> {
    let fail =
        |reason| Some(Effect::Fail { job: job.id, attempt: job.attempt, failure: JobFailure::Unavailable { reason } });
    let ceiling_ms = ceiling_after_failure_ms(state, job);
    // Only failures count: a node that drains, loads or has no free capacity has not failed. A load may never end, so
    // an overdue one does not postpone the failure of a job whose attempts failed elsewhere.
    let is_failing = |(n, m): &Candidate<'_>| {
        job.is_blocked_on(&n.id, now_ms)
            || matches!(m.residency, Residency::Unusable { .. })
            || state.is_load_overdue(&n.id, &m.model, now_ms)
            || job.has_fallback && is_withdrawn(n, m)
    };
    let no_node_ceiling_ms = ceiling_without_node_ms(state, job);
    if let Some(first) = job.first_failure_ms
        && now_ms >= first.saturating_add_unsigned(ceiling_ms)
        && !candidates.able.is_empty()
        && candidates.able.iter().all(is_failing)
    {
        let last = job.last_failure.as_ref().map(ToString::to_string).unwrap_or_default();
        return fail(match job.has_fallback {
            true => format!("no node can run {} now; the last failure: {last}", job.model),
            false => {
                let minutes = minutes(ceiling_ms);
                format!("no answer in {minutes:.1} minutes of repeated attempts; the last failure: {last}")
            }
        });
    }
    let pending = match candidates.able.is_empty() {
        true if !state.any_live_node(now_ms) => PendingReason::NoNodeUp,
        true => PendingReason::NoNodeHasModel { model: job.model.clone() },
        false => match (reason_with_able_nodes(job, candidates), reservation) {
            (PendingReason::Capacity, Some(own)) if own.job == job.id && now_ms >= reported_from_ms(state, own) => {
                PendingReason::ReservedNode { node: own.node.clone() }
            }
            (reason, _) => reason,
        },
    };
    let no_node_ms = no_node_ms(state, job, &pending, now_ms);
    if let PendingReason::NoNodeHasModel { model } = &pending
        && no_node_ms >= no_node_ceiling_ms
    {
        return fail(match job.has_fallback {
            true => format!("no running node has the model {model}"),
            false => no_node_failure(state, model, now_ms),
        });
    }
    match (unavailable(job, &pending), job.first_failure_ms) {
        (Some(reports), None) => {
            return Some(Effect::NoteUnavailable { job: job.id, attempt: job.attempt, reports });
        }
        // An explanation would end the count.
        (Some(_), Some(_)) if pending.is_served() => return None,
        (Some(_) | None, _) => {}
    }
    let recorded = state.explained.get(&job.id).map(|e| &e.pending);
    let ends_a_count = pending.is_served() && (job.no_node_ms > 0 || job.is_unavailable_everywhere());
    let is_news = match &pending {
        // Lack of capacity is common in a busy cluster, and temporary: it is not worth a write unless another reason is
        // recorded.
        PendingReason::Capacity => recorded.is_some_and(|recorded| *recorded != PendingReason::Capacity),
        PendingReason::NoNodeHasModel { .. } => {
            recorded != Some(&pending)
                || no_node_ms >= job.no_node_ms.saturating_add(no_node_write_interval_ms(state, job))
        }
        PendingReason::NoNodeUp
        | PendingReason::Loading { .. }
        | PendingReason::Unusable { .. }
        | PendingReason::Yielding { .. }
        | PendingReason::Cordoned { .. }
        | PendingReason::Backoff
        | PendingReason::ReservedNode { .. }
        | PendingReason::ExclusiveNode { .. } => recorded != Some(&pending),
    };
    (is_news || ends_a_count).then_some(Effect::Explain { job: job.id, attempt: job.attempt, pending, no_node_ms })
}

/// Whether the job only waits for capacity and nothing else is recorded, so that [`pending_effect`] is `None`. The
/// common case in a busy cluster; no more nodes are looked at than needed.
pub(crate) fn is_plainly_waiting(
    state: &PlannerState,
    job: &Job,
    reservation: Option<&Reservation>,
    now_ms: i64,
) -> bool {
    let has_history = job.no_node_ms > 0
        || job.first_failure_ms.is_some()
        || !job.node_failures.0.is_empty()
        || state.explained.contains_key(&job.id);
    !has_history
        && !job.may_be_poison()
        && reservation.is_none_or(|reservation| reservation.job != job.id)
        && state.live_nodes_with(&job.model, now_ms).any(|candidate| is_open(state, job, &candidate, now_ms))
}

/// Next time at which [`pending_effect`] may differ although no event concerns the job, in ms.
pub(crate) fn next_check_ms(
    state: &PlannerState,
    job: &Job,
    reservation: Option<&Reservation>,
    now_ms: i64,
) -> Option<i64> {
    let no_node_ceiling_ms = ceiling_without_node_ms(state, job);
    let no_node = state.explained.get(&job.id).filter(|e| matches!(e.pending, PendingReason::NoNodeHasModel { .. }));
    let no_node = no_node.map(|explained| {
        let left_ms = no_node_ceiling_ms.saturating_sub(job.no_node_ms);
        explained.at_ms.saturating_add_unsigned(left_ms.min(no_node_write_interval_ms(state, job)))
    });
    let ceiling_ms = ceiling_after_failure_ms(state, job);
    let ceiling = job.first_failure_ms.map(|first| first.saturating_add_unsigned(ceiling_ms));
    let own = reservation.filter(|reservation| reservation.job == job.id).map(|own| reported_from_ms(state, own));
    let listing = job.first_failure_ms.and_then(|_| state.nodes_by_model.get(&job.model)).into_iter().flatten();
    let overdue =
        listing.filter_map(|node| state.loads_in_progress.overdue_ms(node, &job.model, state.timing.retry_ceiling_ms));
    let times = job.node_failures.change_times_ms().chain(no_node).chain(ceiling).chain(own).chain(overdue);
    times.filter(|at_ms| *at_ms > now_ms).min()
}

/// Time after which a reservation is shown to users. Most large jobs are placed before.
fn reported_from_ms(state: &PlannerState, reservation: &Reservation) -> i64 {
    reservation.since_ms.saturating_add_unsigned(state.timing.accept_timeout_ms)
}

fn no_node_write_interval_ms(state: &PlannerState, job: &Job) -> u64 {
    (ceiling_without_node_ms(state, job) / NO_NODE_WRITES_PER_CEILING).max(MIN_NO_NODE_WRITE_INTERVAL_MS)
}

/// Time from the first failure until the job fails, if no node can run it. A job with a fallback fails at once after
/// failed calls, but a server that only restarts is waited for.
fn ceiling_after_failure_ms(state: &PlannerState, job: &Job) -> u64 {
    match job.has_fallback {
        true if job.is_unavailable_everywhere() => state.timing.lease_ttl_ms,
        true => 0,
        false => state.timing.retry_ceiling_ms,
    }
}

/// Time until the job fails if nodes are live but none has its model. With a fallback, it is the time in which a node
/// that restarts registers again.
fn ceiling_without_node_ms(state: &PlannerState, job: &Job) -> u64 {
    if job.has_fallback { state.timing.lease_ttl_ms } else { state.timing.retry_ceiling_ms }
}

/// Time in which nodes were live but none had the model, in ms. This time is stored with the job, so that it survives a
/// change of leader and the job cannot wait forever. Time in which no node or no scheduler was up is not evidence about
/// the model and is not counted. Once a node has the model, the count restarts at zero.
fn no_node_ms(state: &PlannerState, job: &Job, pending: &PendingReason, now_ms: i64) -> u64 {
    let since_recorded = state
        .explained
        .get(&job.id)
        .filter(|e| matches!(e.pending, PendingReason::NoNodeHasModel { .. }))
        .map_or(0, |e| u64::try_from(now_ms.saturating_sub(e.at_ms)).unwrap_or(0));
    match pending {
        PendingReason::NoNodeHasModel { .. } | PendingReason::NoNodeUp => job.no_node_ms.saturating_add(since_recorded),
        PendingReason::Loading { .. }
        | PendingReason::Unusable { .. }
        | PendingReason::Yielding { .. }
        | PendingReason::Cordoned { .. }
        | PendingReason::Backoff
        | PendingReason::ExclusiveNode { .. }
        | PendingReason::ReservedNode { .. }
        | PendingReason::Capacity => 0,
    }
}

/// Returns the failure message for a job whose model no node lists. Such a model is most often misspelt or was never
/// set up, so the job would wait forever and keep its runner occupied.
fn no_node_failure(state: &PlannerState, model: &ModelId, now_ms: i64) -> String {
    let minutes = minutes(state.timing.retry_ceiling_ms);
    let served: Vec<&str> = state.models_of_live_nodes(now_ms).into_iter().map(ModelId::as_str).collect();
    let served = if served.is_empty() { "none".to_owned() } else { served.join(", ") };
    format!(
        "for {minutes:.1} minutes, no running node has had the model {model}; models served: {served}. Use one of \
         those, or add {model} to a node's configuration ([node] models, and [endpoints] if an endpoint serves it) and \
         restart that node"
    )
}

fn minutes(ms: u64) -> f64 {
    ms as f64 / 60_000.0
}

/// Whether the node has the model, but no work is placed there until a person or another program changes that.
fn is_withdrawn(node: &Node, model: &ModelState) -> bool {
    node.cordoned || node.ledger.draining || node.ledger.yields.contains_key(&model.model)
}

/// Why no node can use the model, by node, if that counts toward the retry ceiling. A job with a fallback does not wait
/// for nodes that are cordoned or yield.
fn unavailable(job: &Job, pending: &PendingReason) -> Option<BTreeMap<NodeId, String>> {
    match pending {
        PendingReason::Unusable { reasons } => Some(reasons.clone()),
        PendingReason::Cordoned { nodes, others } if job.has_fallback => {
            let cordoned = nodes.iter().map(|node| (node.clone(), "cordoned".to_owned()));
            Some(others.clone().into_iter().chain(cordoned).collect())
        }
        PendingReason::Yielding { programs, unusable } if job.has_fallback => {
            let yielding = programs.iter().map(|(node, program)| (node.clone(), format!("yields to {program}")));
            Some(unusable.clone().into_iter().chain(yielding).collect())
        }
        PendingReason::Cordoned { .. }
        | PendingReason::Yielding { .. }
        | PendingReason::NoNodeHasModel { .. }
        | PendingReason::NoNodeUp
        | PendingReason::Loading { .. }
        | PendingReason::Backoff
        | PendingReason::ExclusiveNode { .. }
        | PendingReason::ReservedNode { .. }
        | PendingReason::Capacity => None,
    }
}

/// Returns the pending reason of a job for which at least one live node has the model and may run the job.
fn reason_with_able_nodes(job: &Job, candidates: &Candidates<'_>) -> PendingReason {
    if candidates.resident.is_empty() {
        let (cordoned, able): (Vec<Candidate<'_>>, Vec<Candidate<'_>>) =
            candidates.able.iter().copied().partition(|(node, _)| node.cordoned);
        let programs = able.iter().filter_map(|(n, m)| Some((n.id.clone(), n.ledger.yields.get(&m.model)?.clone())));
        let unusable = able.iter().filter_map(|(n, m)| match &m.residency {
            Residency::Unusable { reason } => Some((n.id.clone(), reason.clone())),
            Residency::Resident | Residency::Available | Residency::Loading => None,
        });
        let (programs, unusable): (BTreeMap<NodeId, String>, BTreeMap<NodeId, String>) =
            (programs.collect(), unusable.collect());
        let all_fail = programs.len() + unusable.len() == able.len();
        return if !cordoned.is_empty() && all_fail {
            let yielding = programs.into_iter().map(|(node, program)| (node, format!("yields to {program}")));
            let nodes = cordoned.iter().map(|(node, _)| node.id.clone()).collect();
            PendingReason::Cordoned { nodes, others: unusable.into_iter().chain(yielding).collect() }
        } else if unusable.len() == able.len() {
            PendingReason::Unusable { reasons: unusable }
        } else if all_fail {
            PendingReason::Yielding { programs, unusable }
        } else {
            PendingReason::Loading { model: job.model.clone() }
        };
    }
    match candidates.open.is_empty() {
        true if !job.node_failures.0.is_empty() => PendingReason::Backoff,
        false if job.may_be_poison() => {
            PendingReason::ExclusiveNode { lost_or_unaccepted: job.losses.saturating_add(job.unaccepted) }
        }
        true | false => PendingReason::Capacity,
    }
}
