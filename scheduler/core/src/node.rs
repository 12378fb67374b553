//! A node as the planner sees it: its row, and what room its last ledger leaves.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, ModelState};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub id: NodeId,
    pub boot: BootId,
    pub ledger: Ledger,
    /// When its last beat (or hello) was written: the ledger was true then.
    pub seen_ms: i64,
    /// Models it said `not_now` for: one that is full says nothing about another.
    pub left_out: BTreeMap<ModelId, LeftOut>,
}

/// A node that said `not_now`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its ledger when it refused; a later one ends the waiting.
    pub version: u64,
    pub at_ms: i64,
}

impl Node {
    /// A last word from the future is none: the database's clock was set back since.
    pub fn alive(&self, now_ms: i64, ttl_ms: u64) -> bool {
        now_ms.abs_diff(self.seen_ms) <= ttl_ms
    }

    pub fn leaves_out(&self, model: &ModelId, now_ms: i64, longest_ms: u64) -> bool {
        self.left_out.get(model).is_some_and(|l| l.holds(&self.ledger, now_ms, longest_ms))
    }

    pub fn model(&self, model: &ModelId) -> Option<&ModelState> {
        self.ledger.models.iter().find(|m| m.model == *model)
    }
}

impl LeftOut {
    /// The refusal may have come with a later ledger than the one held here, so only a later one still lets it back in.
    /// `longest_ms` is a net under a ledger that never changes: an idle node that refuses is asked again now and then.
    pub fn holds(&self, ledger: &Ledger, now_ms: i64, longest_ms: u64) -> bool {
        ledger.version <= self.version && now_ms.abs_diff(self.at_ms) < longest_ms
    }
}
