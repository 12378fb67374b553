//! Why a job was placed on its node.

use crate::capacity::ModelCapacity;
use crate::cost::PlacementCost;
use crate::node::Node;

/// Numbers behind a placement, stored with the job and shown to users.
pub(crate) fn placement_reason(cost: &PlacementCost, node: &Node, capacity: ModelCapacity, open: usize) -> String {
    let cached = if cost.cached_tokens > 0 { format!(" ({} cached)", cost.cached_tokens) } else { String::new() };
    format!(
        "{} of {open} open nodes: resident, prefill {} tokens{cached} {:.1} s, decode {:.1} s, \
         needs {} of {} free tokens, {} of {} slots free, ledger {}",
        node.id,
        cost.prompt_tokens - cost.cached_tokens,
        cost.prefill_ms / 1000.0,
        cost.decode_ms / 1000.0,
        cost.reserved_tokens,
        capacity.tokens,
        capacity.slots,
        capacity.slots.saturating_add(capacity.concurrent),
        node.ledger.version,
    )
}
