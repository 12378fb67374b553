//! Generated workloads.

use super::{Arrival, BLOCK_TOKENS, Call, Workload, chain};

/// Calls of `models` models in turn, one every `interval_ms`: the worst case for nodes with memory for one model. The
/// prompts of a model share half of their blocks.
pub fn alternating(models: usize, calls: usize, interval_ms: f64, blocks: u64, output_tokens: u32) -> Workload {
    let call = |index: usize| {
        let model = index % models.max(1);
        let own = 1_000 + index as u64 * blocks;
        let ids: Vec<u64> = (0..blocks).map(|block| if block < blocks / 2 { block } else { own + block }).collect();
        Call {
            model,
            prompt_tokens: blocks * BLOCK_TOKENS,
            output_tokens,
            chain: chain(model, &ids),
            arrival: Arrival::At(index as f64 * interval_ms),
        }
    };
    Workload { calls: (0..calls).map(call).collect(), models: (0..models).map(|model| format!("m{model}")).collect() }
}
