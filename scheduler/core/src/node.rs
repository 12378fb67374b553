//! A node as the planner sees it: its row, and what room its last ledger leaves.

use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, ModelState};

#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub id: NodeId,
    pub boot: BootId,
    pub ledger: Ledger,
    /// When its last beat (or hello) was written: the ledger was true then.
    pub seen_ms: i64,
    pub left_out: Option<LeftOut>,
}

/// A node that said `not_now`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftOut {
    /// Its ledger when it refused; a later one ends the waiting.
    pub version: u64,
    pub at_ms: i64,
}

impl Node {
    pub fn alive(&self, now_ms: i64, ttl_ms: u64) -> bool {
        now_ms <= self.seen_ms.saturating_add_unsigned(ttl_ms)
    }

    /// The refusal may have come with a later ledger than the one held here, so only a later one still lets it back in.
    /// `longest_ms` is a net under a ledger that never changes: an idle node that refuses is asked again now and then.
    pub fn is_left_out(&self, now_ms: i64, longest_ms: u64) -> bool {
        self.left_out
            .is_some_and(|l| self.ledger.version <= l.version && now_ms < l.at_ms.saturating_add_unsigned(longest_ms))
    }

    pub fn model(&self, model: &ModelId) -> Option<&ModelState> {
        self.ledger.models.iter().find(|m| m.model == *model)
    }
}
