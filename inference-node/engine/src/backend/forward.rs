//! The interface between the batcher and a forward pass.

use candle_core::{Result, Tensor};
use cfq_memory::ModelShape;

use crate::kv::{BlockMemory, KvPool, SequenceKv};

/// Maximum number of prompt rows of one forward pass; bounds its activations.
pub const MAX_PREFILL_ROWS: usize = 512;
/// Maximum number of rows of drafted tokens of one forward pass, shared by its sequences.
pub const MAX_DRAFT_ROWS: usize = 32;

/// One sequence's part of a forward pass.
pub struct BatchEntry<'a> {
    /// The sequence's KV blocks, grown for `tokens`: see [`KvPool::grow`].
    pub kv: &'a SequenceKv,
    /// Tokens at the positions after those that `kv` holds.
    pub tokens: &'a [u32],
    /// Number of tokens, counted from the last, whose logits are returned.
    pub scored: usize,
}

/// A loaded model on any device.
pub trait ForwardModel {
    /// Storage of its keys and values.
    type Memory: BlockMemory;

    /// Whether a sequence can be rewound: a new sequence can start from another's prefix, and rejected drafts can be
    /// dropped. Without rewinding, one sequence runs at a time, from its first token on.
    const REWINDS: bool = true;

    /// Sizes of the model.
    fn shape(&self) -> &ModelShape;

    /// Longest sequence that uses the short-context RoPE frequencies, in tokens; `None` if the model has one set only.
    fn original_context(&self) -> Option<u64>;

    /// Logits of the scored tokens of all entries, in order: (scored tokens, vocabulary); `None` if there are none.
    ///
    /// Writes keys and values of the new positions but does not count them: see [`KvPool::advance`]. With
    /// `batch_invariant`, no bit of a row depends on the other rows, even if that needs slower kernels. The work is
    /// complete when it returns: the measured latency sizes the next passes.
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
    /// The device failed: none of its contents can be relied on.
    Device,
}
