//! Calibration: the first passes of a loaded model.
//!
//! They allocate what is allocated at first use, so that no sequence waits for it, and they measure rates that are
//! comparable with those of nodes that have worked for hours.

use std::time::{Duration, Instant};

use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::batch::admission::EngineStats;
use crate::batch::latency_model::BatchWork;
use crate::kv::{BLOCK, BlockMemory, KvPool, SequenceKv};

/// Length of the calibration prompt, in tokens.
pub const PROMPT_TOKENS: usize = 64;
/// Cached tokens before the prompt in the second measurement; a short prompt does not show the cost of attention.
const LONG_PAST_TOKENS: usize = 960;

/// Measures a short prompt, the same rows late in a long prompt, and decoding.
///
/// # Errors
/// The forward pass's error, or a pool that cannot hold [`PROMPT_TOKENS`].
pub fn calibrate<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    stats: &EngineStats,
) -> candle_core::Result<()> {
    let prompt = PROMPT_TOKENS.min(pool.available() * BLOCK);
    let tokens: Vec<u32> = (0..prompt as u64).map(|i| (i * 37 % model.shape().vocabulary) as u32).collect();
    // The first pass allocates; the second is measured.
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

/// Measures `tokens` after [`LONG_PAST_TOKENS`] cached tokens, as far as the context allows. The past repeats the
/// blocks of `written`: the attention does the same work, and no memory is needed.
fn measure_long_past<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    written: &SequenceKv,
    tokens: &[u32],
    stats: &EngineStats,
) -> candle_core::Result<()> {
    let context = usize::try_from(model.shape().context).unwrap_or(usize::MAX);
    let past = LONG_PAST_TOKENS.min(context.saturating_sub(PROMPT_TOKENS)) / BLOCK * BLOCK;
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
        false => candle_core::bail!("the KV pool has no room for the {positions} tokens of the calibration"),
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
