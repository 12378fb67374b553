//! Why a job was placed on its node.

use cfq_proto::ids::NodeId;

use crate::capacity::ModelCapacity;
use crate::cost::PlacementCost;
use crate::node::Node;

/// Numbers behind a placement, stored with the job and shown to users. `next` is the node that would have been chosen
/// otherwise, with the job's cost there.
pub(crate) fn placement_reason(
    cost: &PlacementCost,
    node: &Node,
    capacity: ModelCapacity,
    open: usize,
    next: Option<(&NodeId, PlacementCost)>,
) -> String {
    let mut reason = format!(
        "{} of {open} open nodes: resident, {}, needs {} of {} free tokens, {} of {} slots free, ledger {}",
        node.id,
        time_estimate(cost),
        cost.reserved_tokens,
        capacity.tokens,
        capacity.slots,
        capacity.slots.saturating_add(capacity.concurrent),
        node.ledger.version,
    );
    if let Some((next, cost)) = next {
        reason += &format!("; next {next}: {}", time_estimate(&cost));
    }
    reason
}

/// The expected durations of a job on a node.
fn time_estimate(cost: &PlacementCost) -> String {
    let cached = if cost.cached_tokens > 0 { format!(" ({} cached)", cost.cached_tokens) } else { String::new() };
    let computed = cost.prompt_tokens - cost.cached_tokens;
    let (prefill, decode) = (cost.prefill_ms / 1000.0, cost.decode_ms / 1000.0);
    let wait = if cost.wait_ms > 0.0 { format!("wait {:.1} s, ", cost.wait_ms / 1000.0) } else { String::new() };
    let eviction = cost.eviction_ms / 1000.0;
    let eviction = if eviction > 0.0 { format!(", evictions {eviction:.1} s") } else { String::new() };
    format!("{wait}prefill {computed} tokens{cached} {prefill:.1} s, decode {decode:.1} s{eviction}")
}
