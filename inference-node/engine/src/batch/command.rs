//! Commands to the batcher thread.

use crate::batch::sequence::SequenceRequest;
use crate::batch::speculative_prefill::PrefillChunk;

/// Work for the batcher thread.
pub enum EngineCommand {
    /// Run an admitted sequence.
    Sequence(Box<SequenceRequest>),
    /// Prefill one chunk speculatively while nothing else runs.
    PrefillChunk(PrefillChunk),
}
