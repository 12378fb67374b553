//! Planning of a step: which tokens each running sequence computes in the next forward pass.
//!
//! Decoding sequences get one row each; prompts share the remaining rows that the pass can compute within
//! [`MAX_PREFILL_TIME`]. Draft tokens are added only to passes that prefill nothing.

use std::time::Duration;

use super::Batcher;
use crate::backend::forward::{ForwardModel, MAX_DRAFT_ROWS, MAX_PREFILL_ROWS};
use crate::batch::admission::EngineStats;
use crate::batch::chunked_prefill::{MIN_CHUNK_ROWS, PrefillDemand, split_rows};
use crate::batch::sequence::Sequence;

/// Maximum duration of a pass that contains prefill, whatever the number of prompts in it.
pub(super) const MAX_PREFILL_TIME: Duration = Duration::from_millis(250);
/// Number of prompt rows of a pass until the model's latency has been measured.
const UNMEASURED_PREFILL_ROWS: usize = 32;

/// The part of one sequence in a forward pass.
pub(super) struct StepEntry {
    /// The tokens to compute: known tokens, then draft tokens.
    pub tokens: Vec<u32>,
    /// Number of draft tokens at the end of `tokens`.
    pub drafted: usize,
    /// Number of rows at the end of `tokens` whose scores are needed.
    pub scored: usize,
}

/// Number of prompt rows that a pass can compute in `time` after `past` cached tokens.
pub(super) fn prefill_rows(stats: &EngineStats, time: Duration, past: usize) -> usize {
    match stats.rows_in(time, past) {
        Some(rows) => (rows as usize).clamp(MIN_CHUNK_ROWS, MAX_PREFILL_ROWS),
        None => UNMEASURED_PREFILL_ROWS,
    }
}

impl<M: ForwardModel> Batcher<M> {
    /// One entry per running sequence, with KV blocks allocated for it. If no block is left, the youngest sequences are
    /// preempted.
    pub(super) fn plan(&mut self) -> Vec<StepEntry> {
        let demands: Vec<PrefillDemand> = self
            .running
            .iter()
            .map(|r| PrefillDemand { uncomputed: r.uncomputed().len(), last_step: r.last_step })
            .collect();
        let prefilling = demands.iter().any(|demand| demand.uncomputed > 1);
        let rows = split_rows(&demands, self.prefill_budget());
        let cost = (self.pass_cost)(&self.stats, self.running.len());
        // A pass that prefills has no time left for drafts.
        let max_drafts = if prefilling || !M::REWINDS { 0 } else { MAX_DRAFT_ROWS.min(self.limit.rows()) };
        let max_drafts = max_drafts / self.running.len().max(1);
        let running = self.running.len();
        let mut plan: Vec<StepEntry> = Vec::with_capacity(running);
        while plan.len() < self.running.len() {
            let take = rows[plan.len()];
            let next = &mut self.running[plan.len()];
            if !self.pool.grow(&mut next.kv, take) {
                self.preempt_youngest("the KV pool is full");
                continue;
            }
            if take > 0 {
                next.last_step = self.steps;
            }
            let mut tokens = next.uncomputed()[..take].to_vec();
            let mut drafted = 0;
            if next.uncomputed().len() == 1 && next.sequence.sampling.prompt_lookup {
                let Sequence { lookup, tokens: all, max_len, .. } = &mut next.sequence;
                let drafts = lookup.draft(all, max_drafts.min(max_len.saturating_sub(all.len() + 1)), cost);
                // Each other sequence may need one more block in this pass; drafts must leave these blocks free.
                if !drafts.is_empty()
                    && self.pool.available() > running
                    && self.pool.grow(&mut next.kv, 1 + drafts.len())
                {
                    drafted = drafts.len();
                    tokens.extend(drafts);
                }
            }
            let scored = if take == next.uncomputed().len() { drafted + 1 } else { 0 };
            plan.push(StepEntry { tokens, drafted, scored });
        }
        plan
    }

    /// Number of prompt rows of the next pass. The time of a row is estimated for the sequence with the most cached
    /// tokens, whose rows are the slowest because they attend to the most tokens.
    fn prefill_budget(&self) -> usize {
        if !self.limit.is_unlimited() {
            return self.limit.rows();
        }
        let prefilling = self.running.iter().filter(|r| r.uncomputed().len() > 1);
        let past = prefilling.map(|r| r.kv.len()).max().unwrap_or(0);
        prefill_rows(&self.stats, MAX_PREFILL_TIME, past)
    }
}
