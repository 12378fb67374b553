//! Placement cost: the estimated time of a call on a node, as load + wait for earlier prefills + prefill of the tokens
//! that are not cached + decode, and the time to compute again what the call evicts from the prefix cache. A job that no
//! node has room for waits in the queue, where a later P0 can still pass it.
//!
//! Rates that a node has not measured yet default to those of a slow processor. A node without measurements is
//! therefore chosen only where no measured node is better, and its first job provides the measurements.

use cfq_proto::node::ModelState;
use cfq_proto::prefix;

use crate::job::Job;

/// Prefill rate assumed until it is measured, in tokens per second: that of a small model on two old CPU cores.
const DEFAULT_PREFILL_TOKENS_PER_SECOND: f64 = 50.0;
/// Decode rate assumed until it is measured, in tokens per second: that of a small model on two old CPU cores.
const DEFAULT_DECODE_TOKENS_PER_SECOND: f64 = 5.0;
/// Load rate assumed until it is measured, in bytes per second: that of an old disk, including the conversion of the
/// weights to the kernels' layout.
const DEFAULT_LOAD_BYTES_PER_SECOND: f64 = 1e8;
/// Tokens per byte of prompt, assumed until measured. English prose and code have 0.25 to 0.35 with byte-level
/// vocabularies; the upper end is the safe choice.
const DEFAULT_TOKENS_PER_BYTE: f64 = 0.35;
/// Relative slowdown of a sequence per sequence that it shares a forward pass with. It is 0.2 on two CPU cores, where
/// eight sequences decode about three times as many tokens per second as one (docs/benchmarks.md), and less on GPUs.
const DECODE_SLOWDOWN_PER_SEQUENCE: f64 = 0.1;
/// Tokens of the role markers that a chat template puts around three or four messages.
const CHAT_TEMPLATE_TOKENS: u64 = 32;

/// Estimated cost of one call on one model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlacementCost {
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the node is believed to have in its prefix cache.
    pub cached_tokens: u64,
    /// KV cache tokens that the job reserves.
    pub reserved_tokens: u64,
    /// Time until the node begins with the prompt, in ms.
    pub wait_ms: f64,
    /// Time to compute the prompt tokens that are not cached, in ms.
    pub prefill_ms: f64,
    /// Time to generate the maximum number of tokens, in ms.
    pub decode_ms: f64,
    /// Expected time to compute again what the prompt evicts from the prefix cache, in ms.
    pub eviction_ms: f64,
}

impl PlacementCost {
    /// Time until the end of the call, and the time that its evictions cost later, in ms.
    pub fn total_ms(&self) -> f64 {
        self.wait_ms + self.prefill_ms + self.decode_ms + self.eviction_ms
    }
}

/// Estimated length of the job's prompt, in tokens.
pub fn prompt_tokens(job: &Job, model: &ModelState) -> u64 {
    tokens_of_bytes(job.prompt_bytes, model)
}

fn tokens_of_bytes(prompt_bytes: u64, model: &ModelState) -> u64 {
    let ratio = measured_or(model.tokens_per_byte, DEFAULT_TOKENS_PER_BYTE);
    // The conversion saturates; a prompt of 2^53 bytes is refused long before.
    (prompt_bytes as f64 * ratio).ceil() as u64 + CHAT_TEMPLATE_TOKENS
}

/// Estimated number of tokens in one block of a prefix hash chain.
pub fn tokens_per_block(model: &ModelState) -> f64 {
    prefix::PREFIX_BLOCK_BYTES as f64 * measured_or(model.tokens_per_byte, DEFAULT_TOKENS_PER_BYTE)
}

/// KV cache tokens to reserve for the job. A sequence ends at the model's context length, so it never reserves more
/// than that. The node decides whether the prompt alone is too long, because the node counts the tokens exactly.
pub fn kv_reservation(job: &Job, model: &ModelState) -> u64 {
    let wanted = job.counted_tokens.unwrap_or_else(|| prompt_tokens(job, model) + u64::from(job.max_tokens));
    if model.context_tokens == 0 { wanted } else { wanted.min(u64::from(model.context_tokens)) }
}

/// Cost of a job on a model. `concurrent` is the number of sequences it would share the model with: one forward pass
/// serves all of them, but its duration grows with the number of sequences, so each of them slows the job down.
/// `cached_blocks` is the number of leading blocks of the job's prefix chain that the node is believed to have cached.
pub fn placement_cost(job: &Job, model: &ModelState, concurrent: u32, cached_blocks: u64) -> PlacementCost {
    let cost = prefill_hint_cost(job.prompt_bytes, job.max_tokens, model, concurrent, cached_blocks);
    PlacementCost { reserved_tokens: kv_reservation(job, model), ..cost }
}

/// Cost of a call that is expected but not submitted yet, computed as in [`placement_cost`]; it reserves no tokens.
pub fn prefill_hint_cost(
    prompt_bytes: u64,
    max_tokens: u32,
    model: &ModelState,
    concurrent: u32,
    cached_blocks: u64,
) -> PlacementCost {
    let prompt_tokens = tokens_of_bytes(prompt_bytes, model);
    // The last prompt token is always computed: the first output token is sampled from its logits.
    let cached_tokens = ((cached_blocks as f64 * tokens_per_block(model)) as u64).min(prompt_tokens.saturating_sub(1));
    let slowdown = 1.0 + DECODE_SLOWDOWN_PER_SEQUENCE * f64::from(concurrent);
    let prefill_rate = measured_or(model.prefill_rate, DEFAULT_PREFILL_TOKENS_PER_SECOND);
    let decode_rate = measured_or(model.decode_rate, DEFAULT_DECODE_TOKENS_PER_SECOND);
    PlacementCost {
        prompt_tokens,
        cached_tokens,
        reserved_tokens: 0,
        wait_ms: 0.0,
        prefill_ms: 1000.0 * (prompt_tokens - cached_tokens) as f64 / prefill_rate,
        decode_ms: 1000.0 * slowdown * f64::from(max_tokens) / decode_rate,
        eviction_ms: 0.0,
    }
}

/// Time until the end of a call of this cost, in ms, if the model decodes its sequences one after the other: the slowest
/// case, for jobs that must not end late.
pub fn slowest_end_ms(cost: &PlacementCost, concurrent: u32) -> f64 {
    let others = f64::from(concurrent);
    let alone_ms = cost.decode_ms / (1.0 + DECODE_SLOWDOWN_PER_SEQUENCE * others);
    cost.wait_ms + cost.prefill_ms + alone_ms * (1.0 + others)
}

/// Time to compute one block of a prompt, in ms.
pub fn block_ms(model: &ModelState) -> f64 {
    1000.0 * tokens_per_block(model) / measured_or(model.prefill_rate, DEFAULT_PREFILL_TOKENS_PER_SECOND)
}

/// Estimated model load time, in ms.
pub fn load_ms(model: &ModelState) -> f64 {
    1000.0 * model.need_bytes as f64 / measured_or(model.load_rate, DEFAULT_LOAD_BYTES_PER_SECOND)
}

fn measured_or(measured: f64, default: f64) -> f64 {
    if measured.is_finite() && measured > 0.0 { measured } else { default }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{job, model};
    use cfq_proto::task::Priority;

    #[test]
    fn unmeasured_rates_and_concurrent_sequences_cost_more() {
        let job = job(Priority::P2, 0);
        let mut fast = model(4096, 2);
        (fast.prefill_rate, fast.decode_rate) = (2000.0, 60.0);
        let mut unknown = model(4096, 2);
        (unknown.prefill_rate, unknown.decode_rate) = (0.0, f64::NAN);
        assert!(placement_cost(&job, &fast, 0, 0).total_ms() < placement_cost(&job, &unknown, 0, 0).total_ms());
        assert!(placement_cost(&job, &fast, 0, 0).total_ms() < placement_cost(&job, &fast, 1, 0).total_ms());
    }

    #[test]
    fn reservation_uses_the_nodes_count_and_stays_within_the_context() {
        let mut job = job(Priority::P2, 0);
        let model = model(4096, 2);
        assert_eq!(kv_reservation(&job, &model), prompt_tokens(&job, &model) + u64::from(job.max_tokens));
        job.counted_tokens = Some(777);
        assert_eq!(kv_reservation(&job, &model), 777);
        job.counted_tokens = Some(1 << 40);
        assert_eq!(kv_reservation(&job, &model), u64::from(model.context_tokens));
    }
}
