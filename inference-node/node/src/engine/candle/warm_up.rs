//! The first passes of a loaded model: what is made at the first use is made now, not in somebody's first answer, and the
//! ledger has rates from the start that can be compared with those of nodes that have worked for hours.

use std::time::{Duration, Instant};

use crate::engine::candle::kv::{BLOCK, BlockMemory, KvPool, SequenceKv};
use crate::engine::candle::model::{Network, Rows};
use crate::engine::candle::rate::Load;
use crate::engine::candle::room::Figures;

/// Tokens of the prompt.
pub const PROMPT: usize = 64;
/// The same rows are measured as if so many tokens stood before them: what attention costs, a short prompt does not show.
const BEFORE: usize = 960;

/// One prompt, a piece of a long one and a few tokens.
pub fn warm_up<N: Network>(model: &N, pool: &mut KvPool<N::Memory>, figures: &Figures) -> candle_core::Result<()> {
    let prompt = PROMPT.min(pool.available() * BLOCK);
    let tokens: Vec<u32> = (0..prompt as u64).map(|i| (i * 37 % model.shape().vocabulary) as u32).collect();
    // The first pass pays for what is new; the second is measured.
    for round in 0..2 {
        let kv = begin(pool, prompt)?;
        let took = pass(model, pool, &kv, &tokens)?;
        if round == 1 {
            figures.prefilled(Load::of(prompt, 0), took);
            late(model, pool, &kv, &tokens, figures)?;
        }
        pool.discard(kv);
    }
    let kv = begin(pool, 1)?;
    for round in 0..4 {
        let took = pass(model, pool, &kv, &tokens[..1])?;
        if round > 0 {
            figures.decoded(took);
        }
    }
    pool.discard(kv);
    Ok(())
}

/// The end of a prompt as long as the context allows, over what `written` holds again and again: as much to attend to, and
/// no memory.
fn late<N: Network>(
    model: &N,
    pool: &mut KvPool<N::Memory>,
    written: &SequenceKv,
    tokens: &[u32],
    figures: &Figures,
) -> candle_core::Result<()> {
    let context = usize::try_from(model.shape().context).unwrap_or(usize::MAX);
    let before = BEFORE.min(context.saturating_sub(PROMPT)) / BLOCK * BLOCK;
    if !N::REWINDS || before <= PROMPT || tokens.len() < PROMPT {
        return Ok(());
    }
    let kv = written.mirrored(before, PROMPT);
    let took = pass(model, pool, &kv, tokens)?;
    figures.prefilled(Load::of(PROMPT, before), took);
    Ok(())
}

fn begin<M: BlockMemory>(pool: &mut KvPool<M>, positions: usize) -> candle_core::Result<SequenceKv> {
    let mut kv = pool.begin(&[], false, false);
    match pool.grow(&mut kv, positions) {
        true => Ok(kv),
        false => candle_core::bail!("the KV pool has no room for {positions} tokens to warm up with"),
    }
}

fn pass<N: Network>(
    model: &N,
    pool: &mut KvPool<N::Memory>,
    kv: &SequenceKv,
    tokens: &[u32],
) -> candle_core::Result<Duration> {
    let began = Instant::now();
    model.forward(pool, &[Rows { kv, tokens, scored: 1 }], false)?;
    Ok(began.elapsed())
}
