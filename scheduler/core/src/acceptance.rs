//! Placements that a node does not accept in time: the order is sent again, then the placement ends.

use crate::effect::{Effect, UnplaceReason};
use crate::job::{Job, JobPhase};
use crate::state::PlannerState;

/// Maximum number of times that a placed attempt is published again to a node that sends heartbeats but does not accept
/// the attempt.
const MAX_RESENDS: u32 = 2;

/// Returns the effect that resends or ends a placement that the node has not accepted in time.
pub(crate) fn overdue_acceptance(state: &PlannerState, job: &Job, now_ms: i64) -> Option<Effect> {
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

/// Time at which a placement that is not overdue becomes so, in ms. `None` if the job is not placed.
pub(crate) fn acceptance_due_ms(state: &PlannerState, job: &Job) -> Option<i64> {
    let JobPhase::Placed { lease, placed_ms, .. } = &job.phase else { return None };
    let resends = state.resends.get(&job.id).filter(|r| r.lease == *lease);
    let since = resends.map_or(*placed_ms, |r| r.last_ms);
    Some(since.saturating_add_unsigned(state.timing.accept_timeout_ms))
}
