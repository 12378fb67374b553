//! The interface between the batcher and a forward pass.

use candle_core::{Result, Tensor};
use cfq_memory::ModelShape;

use crate::kv::{BlockMemory, KvPool, SequenceKv};

/// Maximum number of prompt tokens in one forward pass; bounds the size of its activations.
pub const MAX_PREFILL_ROWS: usize = 512;
/// Maximum number of drafted tokens in one forward pass, over all its sequences.
pub const MAX_DRAFT_ROWS: usize = 32;

/// One sequence's part of a forward pass.
pub struct BatchEntry<'a> {
    /// The sequence's KV blocks; blocks for `tokens` are already allocated by [`KvPool::grow`].
    pub kv: &'a SequenceKv,
    /// New tokens to compute, which follow the positions already in `kv`.
    pub tokens: &'a [u32],
    /// Number of tokens, counted from the last, whose logits are returned.
    pub scored: usize,
}

/// A loaded model on any device.
pub trait ForwardModel {
    /// Memory that holds the model's keys and values.
    type Memory: BlockMemory;

    /// Whether a sequence can be rewound to an earlier position. This allows a new sequence to start from another
    /// sequence's prefix, and rejected drafts to be dropped. Without it, sequences run one at a time, each from its
    /// first token on.
    const REWINDS: bool = true;

    /// Number and sizes of the model's layers, heads and matrices.
    fn shape(&self) -> &ModelShape;

    /// Longest sequence that uses the short-context RoPE frequencies, in tokens; `None` if the model has one set only.
    fn original_context(&self) -> Option<u64>;

    /// Logits of the scored tokens of all entries, in order: (scored tokens, vocabulary); `None` if there are none.
    ///
    /// Writes the keys and values of the new positions, but leaves the sequences' lengths unchanged: the caller
    /// advances them with [`KvPool::advance`]. With `batch_invariant`, the pass is batch-invariant: no bit of a
    /// sequence's logits depends on the rest of the batch, even if that needs slower kernels. All work on the device is
    /// complete when this returns, because the measured latency determines the size of the next passes.
    ///
    /// # Errors
    /// candle's error; [`Self::failure`] classifies it.
    fn forward(
        &self,
        pool: &mut KvPool<Self::Memory>,
        batch: &[BatchEntry<'_>],
        batch_invariant: bool,
    ) -> Result<Option<Tensor>>;

    /// Classifies an error of [`Self::forward`].
    fn failure(&self, error: &candle_core::Error) -> ForwardFailure;
}

/// The scope of a failed forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardFailure {
    /// The sequences of this pass cannot be computed; others can.
    Pass,
    /// Memory ran out during the pass; earlier results are intact.
    Memory,
    /// The device failed: everything in its memory must be considered lost.
    Device,
}
