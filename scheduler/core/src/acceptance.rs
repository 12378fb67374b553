//! Placements that a node does not accept in time: the order is sent again, then the placement ends. While a node
//! reports that it is preparing the prompt, its time to accept starts again with each report.

use crate::effect::{Effect, UnplaceReason};
use crate::job::{Job, JobPhase};
use crate::state::PlannerState;

/// Maximum number of times that a placed attempt is published again to a node that sends heartbeats but does not accept
/// the attempt.
const MAX_RESENDS: u32 = 2;
/// Time after the end of a node's time to prepare a prompt until which reports of the preparation count, in ms. It limits
/// how long a faulty node can keep a job that it does not run. The database's clock may jump ahead by more; then the
/// order is sent again, and the placement ends if the node does not accept it in time.
const PREPARATION_MARGIN_MS: u64 = 10_000;

/// Returns the effect that resends or ends a placement that the node has not accepted in time.
pub(crate) fn overdue_acceptance(state: &PlannerState, job: &Job, now_ms: i64) -> Option<Effect> {
    let JobPhase::Placed { node, boot, lease, .. } = &job.phase else { return None };
    let unplace = |reason: UnplaceReason| {
        Some(Effect::Unplace { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), reason })
    };
    let holder = state.nodes.get(node).filter(|n| n.boot == *boot);
    if !holder.is_some_and(|n| n.alive(now_ms, state.timing.lease_ttl_ms)) {
        return unplace(UnplaceReason::NodeLost);
    }
    let since = waits_since_ms(state, job)?;
    // A placement far in the future was written before the database's clock was set back. How long it has waited is
    // unknown, so it counts as overdue.
    if now_ms.abs_diff(since) < state.timing.accept_timeout_ms {
        return None;
    }
    if state.resends.get(&job.id).is_some_and(|r| r.lease == *lease && r.count >= MAX_RESENDS) {
        return unplace(UnplaceReason::NodeUnresponsive);
    }
    Some(Effect::Resend { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), boot: *boot })
}

/// Time at which a placement that is not overdue becomes so, in ms. `None` if the job is not placed.
pub(crate) fn acceptance_due_ms(state: &PlannerState, job: &Job) -> Option<i64> {
    Some(waits_since_ms(state, job)?.saturating_add_unsigned(state.timing.accept_timeout_ms))
}

/// Time from which the node's time to accept the job counts, in ms: that of the last resend, else of the last report of
/// the preparation, else of the placement. `None` if the job is not placed.
fn waits_since_ms(state: &PlannerState, job: &Job) -> Option<i64> {
    let JobPhase::Placed { lease, placed_ms, .. } = &job.phase else { return None };
    let resent = state.resends.get(&job.id).filter(|resends| resends.lease == *lease);
    Some(match (resent, counted_report_ms(state, &job.phase)) {
        (Some(resends), _) => resends.last_ms,
        (None, Some(report_ms)) => report_ms.max(*placed_ms),
        (None, None) => *placed_ms,
    })
}

/// Time of the last report of the preparation, as far as it counts, in ms; `None` if there was none.
pub(crate) fn counted_report_ms(state: &PlannerState, phase: &JobPhase) -> Option<i64> {
    let JobPhase::Placed { placed_ms, preparing_ms, .. } = phase else { return None };
    let counted_for_ms = state.timing.prepare_timeout_ms.saturating_add(PREPARATION_MARGIN_MS);
    preparing_ms.map(|at_ms| at_ms.min(placed_ms.saturating_add_unsigned(counted_for_ms)))
}
