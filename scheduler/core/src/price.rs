//! What a job would cost on a node, as a time: load + prefill of what it does not hold + decode. Only nodes with room are priced, so the wait for
//! room is nought for every candidate; a job without a candidate waits in the queue, where a later P0 can still pass it.
//!
//! Rates a node has not measured yet are taken as those of a slow processor, so that an unknown node is chosen only where
//! nothing known is better; its first job measures it.

use cfq_proto::node::ModelState;
use cfq_proto::prefix;

use crate::job::Job;

/// Tokens per second of a small model on two old cores.
const UNKNOWN_PREFILL: f64 = 50.0;
const UNKNOWN_DECODE: f64 = 5.0;
/// Bytes per second of an old disk, with the weights brought into the kernels' order.
const UNKNOWN_LOAD: f64 = 1e8;
/// English prose and code are at 0.25 to 0.35 tokens a byte with byte-level vocabularies; the upper end is the safe one.
const UNKNOWN_TOKENS_PER_BYTE: f64 = 0.35;
/// Role markers of a chat template around three or four messages.
const TEMPLATE_TOKENS: u64 = 32;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    pub prompt_tokens: u64,
    /// Of those, believed to be there.
    pub held: u64,
    /// Tokens the job takes from the pool.
    pub need: u64,
    pub prefill_ms: f64,
    pub decode_ms: f64,
}

impl Price {
    pub fn total_ms(&self) -> f64 {
        self.prefill_ms + self.decode_ms
    }
}

pub fn prompt_tokens(job: &Job, model: &ModelState) -> u64 {
    tokens_of(job.prompt_bytes, model)
}

fn tokens_of(prompt_bytes: u64, model: &ModelState) -> u64 {
    let ratio = known_or(model.tokens_per_byte, UNKNOWN_TOKENS_PER_BYTE);
    // Saturates; a prompt of 2^53 bytes is refused long before.
    (prompt_bytes as f64 * ratio).ceil() as u64 + TEMPLATE_TOKENS
}

/// Of one block of a prefix chain.
pub fn link_tokens(model: &ModelState) -> f64 {
    prefix::BLOCK as f64 * known_or(model.tokens_per_byte, UNKNOWN_TOKENS_PER_BYTE)
}

/// Pool tokens the job is admitted with. A sequence ends at the model's context, so it never needs more than that; whether
/// the prompt alone is too long is for the node to say, with the exact count.
pub fn need(job: &Job, model: &ModelState) -> u64 {
    let asked = job.known_need.unwrap_or_else(|| prompt_tokens(job, model) + u64::from(job.max_tokens));
    if model.context_tokens == 0 { asked } else { asked.min(u64::from(model.context_tokens)) }
}

/// `beside`: sequences it would share the model with. One forward pass serves them all, but on the hardware at hand the
/// time of a pass grows with its rows, so each costs the newcomer its share. `links`: of its chain, as far as they are there.
pub fn price(job: &Job, model: &ModelState, beside: u32, links: u64) -> Price {
    Price { need: need(job, model), ..expected(job.prompt_bytes, job.max_tokens, model, beside, links) }
}

/// The same for a call that is only expected; it takes no room.
pub fn expected(prompt_bytes: u64, max_tokens: u32, model: &ModelState, beside: u32, links: u64) -> Price {
    let prompt_tokens = tokens_of(prompt_bytes, model);
    // The last token is always computed: the first of the answer is drawn from it.
    let held = ((links as f64 * link_tokens(model)) as u64).min(prompt_tokens.saturating_sub(1));
    let crowd = f64::from(beside) + 1.0;
    Price {
        prompt_tokens,
        held,
        need: 0,
        prefill_ms: 1000.0 * (prompt_tokens - held) as f64 / known_or(model.prefill_rate, UNKNOWN_PREFILL),
        decode_ms: 1000.0 * crowd * f64::from(max_tokens) / known_or(model.decode_rate, UNKNOWN_DECODE),
    }
}

/// Until a model on disk could answer.
pub fn load_ms(model: &ModelState) -> f64 {
    1000.0 * model.need_bytes as f64 / known_or(model.load_rate, UNKNOWN_LOAD)
}

fn known_or(measured: f64, unknown: f64) -> f64 {
    if measured.is_finite() && measured > 0.0 { measured } else { unknown }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{job, model};
    use cfq_proto::task::Priority;

    #[test]
    fn a_measured_fast_model_is_cheaper_than_an_unknown_and_a_crowd_costs() {
        let job = job(Priority::P2, 0);
        let mut fast = model(4096, 2);
        (fast.prefill_rate, fast.decode_rate) = (2000.0, 60.0);
        let mut unknown = model(4096, 2);
        (unknown.prefill_rate, unknown.decode_rate) = (0.0, f64::NAN);
        assert!(price(&job, &fast, 0, 0).total_ms() < price(&job, &unknown, 0, 0).total_ms());
        assert!(price(&job, &fast, 0, 0).total_ms() < price(&job, &fast, 1, 0).total_ms());
    }

    #[test]
    fn a_nodes_own_count_beats_the_estimate_and_nothing_exceeds_the_context() {
        let mut job = job(Priority::P2, 0);
        let model = model(4096, 2);
        assert_eq!(need(&job, &model), prompt_tokens(&job, &model) + u64::from(job.max_tokens));
        job.known_need = Some(777);
        assert_eq!(need(&job, &model), 777);
        job.known_need = Some(1 << 40);
        assert_eq!(need(&job, &model), u64::from(model.context_tokens));
    }
}
