//! Speculative prefill: computing the keys and values of a prompt before the call that will use them arrives.
//!
//! A speculative prefill is not a sequence: it has no reservation, no slot in the batch and no reader. It runs in
//! chunks, each in a separate forward pass, and only while the engine is otherwise idle. It leaves KV blocks like those
//! of a finished sequence: in the prefix cache, referenced by no sequence, and the first to be evicted. The call finds
//! them like any other cached prefix. If the prompt was predicted wrongly, its blocks are never found and are evicted
//! eventually, so nothing has to be cancelled. In `usage`, speculative prefill appears only as cached tokens.
//!
//! A chunk starts after the longest cached prefix and ends at a block boundary, because a later sequence shares only
//! whole blocks and has to copy a partial one. A chunk is smaller than a block only if the model needs more time for a
//! block than one pass may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::Result;
use tokio::sync::oneshot;

use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::kv::{KV_BLOCK_TOKENS, KvPool};

/// Target duration of a chunk: about a quarter of the maximum duration of a pass that prefills ordinary prompts. A
/// sequence that arrives while a chunk runs waits for the end of the chunk. If one block takes longer than the target,
/// so does the chunk, but at most as long as such a pass.
pub const CHUNK_TIME: Duration = Duration::from_millis(60);

/// Tokens of an expected prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpeculativePrompt {
    /// Token ids from the beginning of the prompt.
    pub tokens: Vec<u32>,
    /// Whether RoPE uses the long-context frequencies.
    pub long_context: bool,
    /// Whether the expected sequence will request batch-invariant computation.
    pub batch_invariant: bool,
}

/// Result of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillProgress {
    /// More chunks remain.
    More,
    /// The engine was not idle; nothing was computed.
    Busy,
    /// The whole prompt is computed, or the pool has no free blocks for more.
    Done,
}

/// Limits the chunks in the batcher's command channel to one.
#[derive(Debug, Clone, Default)]
pub struct ChunkSlot(Arc<AtomicBool>);

impl ChunkSlot {
    /// Takes the slot; `None` while another chunk holds it.
    pub fn take(&self) -> Option<ChunkSlotGuard> {
        let free = !self.0.swap(true, Ordering::SeqCst);
        free.then(|| ChunkSlotGuard(self.0.clone()))
    }
}

/// Holds the slot of a [`ChunkSlot`]; dropping it releases the slot.
#[derive(Debug)]
pub struct ChunkSlotGuard(Arc<AtomicBool>);

impl Drop for ChunkSlotGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A request to the batcher for one chunk.
#[derive(Debug)]
pub struct PrefillChunk {
    /// The prompt to prefill.
    pub prompt: Arc<SpeculativePrompt>,
    reply: oneshot::Sender<PrefillProgress>,
    _slot: ChunkSlotGuard,
}

impl PrefillChunk {
    /// Creates the request for one chunk of `prompt`, and the receiver of its result.
    pub fn new(prompt: Arc<SpeculativePrompt>, slot: ChunkSlotGuard) -> (Self, oneshot::Receiver<PrefillProgress>) {
        let (reply, result) = oneshot::channel();
        (Self { prompt, reply, _slot: slot }, result)
    }

    /// Sends the result and frees the slot.
    pub fn finish(self, progress: PrefillProgress) {
        let Self { reply, _slot: slot, .. } = self;
        // Released before the reply, because the receiver may request the next chunk immediately.
        drop(slot);
        // The receiver may have been dropped.
        let _ = reply.send(progress);
    }
}

/// Computes one chunk of `prompt`, after its longest cached prefix. `rows_after` maps the length of that prefix to the
/// maximum number of rows of the chunk.
///
/// # Errors
/// The error of the forward pass; the blocks of the chunk are discarded.
pub fn run_chunk<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    prompt: &SpeculativePrompt,
    rows_after: impl Fn(usize) -> usize,
) -> Result<PrefillProgress> {
    let SpeculativePrompt { tokens, long_context, batch_invariant } = prompt;
    // The last token is never prefilled: the call has to compute it to get its scores.
    let target = tokens.len().saturating_sub(1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    let mut kv = pool.begin(tokens, *long_context, *batch_invariant);
    let from = kv.len();
    let rows = rows_after(from);
    let end = if rows < KV_BLOCK_TOKENS { from + rows } else { (from + rows) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS };
    let to = end.min(target);
    if from >= to || !pool.grow(&mut kv, to - from) {
        pool.end(kv, tokens);
        return Ok(PrefillProgress::Done);
    }
    // The duration is not recorded in the stats, since a short chunk has a lower rate than a full pass.
    let entry = BatchEntry { kv: &kv, tokens: &tokens[from..to], scored: 0 };
    if let Err(error) = model.forward(pool, &[entry], *batch_invariant) {
        pool.discard(kv);
        return Err(error);
    }
    pool.advance(&mut kv, tokens, to - from);
    pool.end(kv, tokens);
    Ok(if to < target { PrefillProgress::More } else { PrefillProgress::Done })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_chunk_is_queued_at_a_time() {
        let slot = ChunkSlot::default();
        let first = slot.take();
        assert!(first.is_some() && slot.take().is_none());
        drop(first);
        assert!(slot.take().is_some());
    }
}
