//! Cost of a job on one node, with what the node is assumed to have cached.

use cfq_proto::node::ModelState;

use crate::cost::{PlacementCost, block_ms, placement_cost};
use crate::job::Job;
use crate::node::Node;
use crate::state::PlannerState;

/// Cost of the job on the node. `concurrent` is the number of sequences it would share the model with.
pub(crate) fn node_cost(
    state: &PlannerState,
    job: &Job,
    node: &Node,
    model: &ModelState,
    concurrent: u32,
    now_ms: i64,
) -> PlacementCost {
    let prompt = state.prefix_index.estimate(node, model, &job.prefix, block_ms(model), now_ms);
    let cost = placement_cost(job, model, concurrent, prompt.cached_blocks);
    PlacementCost { wait_ms: prompt.wait_ms, eviction_ms: prompt.eviction_ms, ..cost }
}
