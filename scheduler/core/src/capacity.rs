//! Free capacity of one model on one node, as estimated by the planner.

use crate::cost::PlacementCost;

/// Capacity that a model on a node still has for new sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelCapacity {
    /// Free KV cache tokens.
    pub tokens: u64,
    /// Free sequence slots.
    pub slots: u32,
    /// Number of sequences that a new sequence would run concurrently with.
    pub concurrent: u32,
}

impl ModelCapacity {
    /// Capacity left after one more sequence that reserves `tokens`.
    pub fn after_admitting(self, tokens: u64) -> Self {
        Self {
            tokens: self.tokens.saturating_sub(tokens),
            slots: self.slots.saturating_sub(1),
            concurrent: self.concurrent.saturating_add(1),
        }
    }

    /// Tokens to reserve for a job of this cost, or `None` if it does not fit. An idle model admits a job whose
    /// estimate exceeds the whole pool as long as the prompt itself fits, because such a job would otherwise wait
    /// forever. The node counts the tokens exactly, and refuses the job if it does not fit.
    pub fn reservation_for(self, cost: &PlacementCost) -> Option<u64> {
        if self.slots == 0 {
            None
        } else if cost.reserved_tokens <= self.tokens {
            Some(cost.reserved_tokens)
        } else if self.concurrent == 0 && cost.prompt_tokens < self.tokens {
            Some(self.tokens)
        } else {
            None
        }
    }
}
