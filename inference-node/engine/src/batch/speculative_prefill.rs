//! Speculative prefill: computing the keys and values of a prompt before the call that will use them arrives.
//!
//! It is not a sequence: nothing is reserved for it, it has no slot in a batch, and no reader waits for its end. It
//! runs chunk by chunk, each chunk a forward pass of its own that runs only while the engine is otherwise idle. It
//! leaves KV blocks like those of a finished sequence: indexed by their tokens, referenced by no sequence, and evicted
//! first. The call finds them like any other shared prefix; blocks of a wrong guess are never found and age out.
//! Cancelling is therefore a no-op, and `usage` shows speculative prefill only as cached tokens.
//!
//! A chunk starts from the longest cached prefix and ends at a block boundary, since a later sequence copies a partial
//! block instead of sharing it. Chunks are smaller only on a model that needs longer for one block than a pass may
//! take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::Result;
use tokio::sync::oneshot;

use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::kv::{BLOCK, KvPool};

/// Longest delay that a chunk imposes on a sequence that arrives while it runs, if that is enough for one block: a
/// quarter of what another sequence's prompt may cost it. The delay never exceeds that of such a prompt.
pub const CHUNK_TIME: Duration = Duration::from_millis(60);

/// Tokens of an expected prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpeculativePrompt {
    /// Token ids from the beginning of the prompt.
    pub tokens: Vec<u32>,
    /// Whether RoPE uses the long-context frequencies.
    pub long_context: bool,
    /// Whether the sequence asks for batch-invariant kernels.
    pub batch_invariant: bool,
}

/// Result of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillProgress {
    /// More chunks remain.
    More,
    /// Other work came first; nothing was computed.
    Busy,
    /// Everything is computed, or the pool has no free blocks for more.
    Done,
}

/// The single slot for a chunk in the batcher's channel.
#[derive(Debug, Clone, Default)]
pub struct ChunkSlot(Arc<AtomicBool>);

impl ChunkSlot {
    /// Takes the slot; `None` while another chunk holds it.
    pub fn take(&self) -> Option<ChunkSlotGuard> {
        let free = !self.0.swap(true, Ordering::SeqCst);
        free.then(|| ChunkSlotGuard(self.0.clone()))
    }
}

/// The taken slot; dropping it releases the slot.
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
    /// A chunk of `prompt` and the receiver of its result.
    pub fn new(prompt: Arc<SpeculativePrompt>, slot: ChunkSlotGuard) -> (Self, oneshot::Receiver<PrefillProgress>) {
        let (reply, result) = oneshot::channel();
        (Self { prompt, reply, _slot: slot }, result)
    }

    /// Sends the result and frees the slot.
    pub fn finish(self, progress: PrefillProgress) {
        let Self { reply, _slot: slot, .. } = self;
        // The receiver may ask for the next chunk at once.
        drop(slot);
        // The receiver may have been dropped.
        let _ = reply.send(progress);
    }
}

/// Runs one chunk after the longest cached prefix; `rows_after` returns its maximum length for the length of that
/// prefix.
///
/// # Errors
/// The forward pass's error; the chunk's blocks are discarded then.
pub fn run_chunk<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    prompt: &SpeculativePrompt,
    rows_after: impl Fn(usize) -> usize,
) -> Result<PrefillProgress> {
    let SpeculativePrompt { tokens, long_context, batch_invariant } = prompt;
    // The last token is left to the call, as with any cached prefix.
    let target = tokens.len().saturating_sub(1) / BLOCK * BLOCK;
    let mut kv = pool.begin(tokens, *long_context, *batch_invariant);
    let from = kv.len();
    let rows = rows_after(from);
    let end = if rows < BLOCK { from + rows } else { (from + rows) / BLOCK * BLOCK };
    let to = end.min(target);
    if from >= to || !pool.grow(&mut kv, to - from) {
        pool.end(kv, tokens);
        return Ok(PrefillProgress::Done);
    }
    // The duration is not recorded: a short chunk would lower the measured rates of full passes.
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
