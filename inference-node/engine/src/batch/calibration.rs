//! Calibration: measures the speed of a loaded model with its first forward passes.
//!
//! These passes also trigger all allocations that happen at first use, so that no sequence waits for them. The measured
//! rates make a model that was just loaded comparable with models that have run for hours.

use std::time::{Duration, Instant};

use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::batch::admission::EngineStats;
use crate::batch::latency_model::BatchWork;
use crate::kv::{BlockMemory, KV_BLOCK_TOKENS, KvPool, SequenceKv};

/// Length of the calibration prompt, in tokens.
pub const PROMPT_TOKENS: usize = 64;
/// Number of cached tokens before the prompt in the second measurement, which measures the cost of attention: a short
/// prompt alone does not show it.
const LONG_PAST_TOKENS: usize = 960;

/// Measures the prefill of a short prompt, the prefill of as many rows after [`LONG_PAST_TOKENS`] cached tokens, and
/// decoding, and records the results in `stats`.
///
/// # Errors
/// The forward pass's error, or an error if the pool has no free block.
pub fn calibrate<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    stats: &EngineStats,
) -> candle_core::Result<()> {
    let prompt = PROMPT_TOKENS.min(pool.available() * KV_BLOCK_TOKENS);
    let tokens: Vec<u32> = (0..prompt as u64).map(|i| (i * 37 % model.shape().vocabulary) as u32).collect();
    // The first pass allocates memory, so only the second is measured.
    for round in 0..2 {
        let kv = allocate(pool, prompt)?;
        let took = timed_pass(model, pool, &kv, &tokens)?;
        if round == 1 {
            stats.record_prefill(BatchWork::new(prompt, 0), took);
            measure_long_past(model, pool, &kv, &tokens, stats)?;
        }
        pool.discard(kv);
    }
    let kv = allocate(pool, 1)?;
    for round in 0..4 {
        let took = timed_pass(model, pool, &kv, &tokens[..1])?;
        if round > 0 {
            stats.record_decode(took);
        }
    }
    pool.discard(kv);
    Ok(())
}

/// Measures the prefill of `tokens` after [`LONG_PAST_TOKENS`] cached tokens, or after fewer if the context is shorter.
/// The block table of these cached tokens repeats the blocks of `written`: attention does the same work as with
/// different blocks, and no further blocks are needed.
fn measure_long_past<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    written: &SequenceKv,
    tokens: &[u32],
    stats: &EngineStats,
) -> candle_core::Result<()> {
    let context = usize::try_from(model.shape().context).unwrap_or(usize::MAX);
    let past = LONG_PAST_TOKENS.min(context.saturating_sub(PROMPT_TOKENS)) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if !M::REWINDS || past <= PROMPT_TOKENS || tokens.len() < PROMPT_TOKENS {
        return Ok(());
    }
    let kv = written.repeated(past, PROMPT_TOKENS);
    let took = timed_pass(model, pool, &kv, tokens)?;
    stats.record_prefill(BatchWork::new(PROMPT_TOKENS, past), took);
    Ok(())
}

fn allocate<B: BlockMemory>(pool: &mut KvPool<B>, positions: usize) -> candle_core::Result<SequenceKv> {
    let mut kv = pool.begin(&[], false, false);
    match pool.grow(&mut kv, positions) {
        true => Ok(kv),
        false => candle_core::bail!("the KV pool is too small for the {positions} tokens of the calibration"),
    }
}

fn timed_pass<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    kv: &SequenceKv,
    tokens: &[u32],
) -> candle_core::Result<Duration> {
    let started = Instant::now();
    model.forward(pool, &[BatchEntry { kv, tokens, scored: 1 }], false)?;
    Ok(started.elapsed())
}
