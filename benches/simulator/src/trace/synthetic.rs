//! Generated workloads.

use super::{Arrival, BLOCK_TOKENS, Call, Workload, chain};
use crate::rng::Rng;

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

/// Size of a workload of review loops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TaskLoad {
    /// Number of models.
    pub models: usize,
    /// Number of calls.
    pub jobs: usize,
    /// Time during which the tasks arrive, in s.
    pub duration_s: f64,
}

/// Tasks that arrive at random times. Each has a model that writes and one that reviews, and two to eight calls, each of
/// which waits for the one before and contains its prompt's beginning.
pub fn task_loops(load: TaskLoad, seed: u64) -> Workload {
    let mut rng = Rng::new(seed);
    let mut calls: Vec<Call> = Vec::with_capacity(load.jobs);
    let mut task = 0;
    while calls.len() < load.jobs {
        task += 1;
        let (writer, critic) = (rng.below(load.models as u64) as usize, rng.below(load.models as u64) as usize);
        let count = (2 + rng.below(7) as usize).min(load.jobs - calls.len());
        let context = 4 + rng.below(12);
        let start_ms = rng.unit() * load.duration_s * 1e3;
        for step in 0..count {
            let (model, role) = if step % 2 == 0 { (writer, 0) } else { (critic, 1) };
            let own = (1_000 + task * 100)..(1_000 + task * 100 + context + step as u64);
            let ids: Vec<u64> = (role * 8..role * 8 + 4).chain(own).collect();
            let arrival = match step {
                0 => Arrival::At(start_ms),
                _ => Arrival::After(vec![(calls.len() - 1, 5.0)]),
            };
            calls.push(Call {
                model,
                prompt_tokens: ids.len() as u64 * BLOCK_TOKENS,
                output_tokens: 20 + rng.below(600) as u32,
                chain: chain(model, &ids),
                arrival,
            });
        }
    }
    Workload { calls, models: (0..load.models).map(|model| format!("m{model}")).collect() }
}
