//! Preemption: sequences that release their KV blocks, wait, and resume; and the policy after a failed pass.
//!
//! Admission reserves KV tokens for the expected output of a sequence, not for its maximum output, so the pool can run
//! out of blocks. Then the youngest sequence is preempted. Its tokens are kept; when it resumes, its keys and values
//! are found in the prefix cache or computed again. The oldest sequence keeps its blocks, so at least one always makes
//! progress.
//!
//! After a pass that ran out of GPU memory, all sequences are preempted and smaller passes follow
//! ([`crate::batch::oom_backoff`]). A second such pass in a row, and any other error of the GPU's driver, breaks the
//! engine as a panic does: it serves no more requests until its process is restarted.

use super::{Batcher, Running};
use crate::backend::forward::{ForwardFailure, ForwardModel};
use crate::batch::sequence::{Sequence, failed_by_engine};
use crate::engine_failure::EngineFailure;
use crate::kv::KV_BLOCK_TOKENS;

/// Number of blocks that a sequence needs for its tokens so far, and one more to continue.
fn required_blocks(sequence: &Sequence) -> usize {
    sequence.tokens.len() / KV_BLOCK_TOKENS + 2
}

impl Running {
    /// Number of blocks that the sequence still has to allocate for its tokens so far and to continue.
    pub(super) fn missing_blocks(&self) -> usize {
        required_blocks(&self.sequence).saturating_sub(self.kv.blocks())
    }
}

impl<M: ForwardModel> Batcher<M> {
    /// Moves preempted sequences back to the batch, oldest first, as long as the pool has enough free blocks for the
    /// next one and for all that the running sequences still have to allocate. (A sequence that has just resumed has
    /// not allocated all of its blocks yet.) If no sequence is running, the first one always resumes.
    pub(super) fn resume_preempted(&mut self) {
        while let Some(first) = self.preempted.front() {
            if self.running.len() >= self.limit.rows() {
                return;
            }
            let reserved: usize = self.running.iter().map(Running::missing_blocks).sum();
            // A single sequence always fits: admission refuses sequences larger than the pool.
            if !self.running.is_empty() && reserved + required_blocks(first) > self.pool.available() {
                return;
            }
            if let Some(sequence) = self.preempted.pop_front() {
                self.start(sequence);
            }
        }
    }

    /// Preempts the youngest sequence, which releases its blocks.
    pub(super) fn preempt_youngest(&mut self, reason: &str) {
        let Some(Running { sequence, kv, .. }) = self.running.pop() else { return };
        tracing::debug!(tokens = sequence.tokens.len(), reason, "sequence preempted");
        self.stats.record_preemption();
        self.pool.end(kv, &sequence.tokens);
        let at = self.preempted.partition_point(|s| s.arrival < sequence.arrival);
        self.preempted.insert(at, sequence);
    }

    /// Handles the failure of a pass of `rows` rows.
    pub(super) fn on_forward_failure(&mut self, error: &candle_core::Error, rows: usize) -> Result<(), EngineFailure> {
        match self.model.failure(error) {
            ForwardFailure::Pass => {
                // It is unknown which sequence caused the failure, and their keys and values may be partly written.
                for running in self.running.drain(..) {
                    self.pool.discard(running.kv);
                    running.sequence.end(Err(failed_by_engine(format!("the forward pass failed: {error}"))));
                }
                self.pool.clear();
                Ok(())
            }
            // Positions computed before this pass are intact: the pass wrote only to later positions, which are not
            // counted as computed.
            ForwardFailure::Memory if self.limit.on_out_of_memory(rows) => {
                tracing::warn!(
                    %error,
                    rows,
                    "out of memory in a forward pass: all sequences preempted, smaller passes follow"
                );
                while !self.running.is_empty() {
                    self.preempt_youngest("out of memory in a forward pass");
                }
                Ok(())
            }
            ForwardFailure::Memory => Err(EngineFailure::OutOfMemory { error: error.to_string() }),
            ForwardFailure::Device => Err(EngineFailure::DeviceLost { error: error.to_string() }),
        }
    }
}
