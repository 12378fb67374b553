//! A node as the planner sees it: its row, and whether it takes work for a model.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, ModelState};
use serde::{Deserialize, Serialize};

/// The Postgres row of one node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Name of the node.
    pub id: NodeId,
    /// Boot (process start) of the node that wrote the row last.
    pub boot: BootId,
    /// Latest ledger that the node reported.
    pub ledger: Ledger,
    /// Time of the last heartbeat or registration, in ms; the ledger was correct at that time.
    pub seen_ms: i64,
    /// Whether an operator said that the node gets no new work.
    pub cordoned: bool,
    /// Models for which the node answered `not_now`. A refusal for one model does not apply to the others.
    pub exclusions: BTreeMap<ModelId, Exclusion>,
}

/// Temporary exclusion of a node: for one model after a refusal, or for all models if the node is unresponsive. Until
/// the node's ledger has a later version, the node gets no more of this work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// Version of the ledger when the exclusion began; a later version ends the exclusion.
    pub version: u64,
    /// Time at which the exclusion began, in ms.
    pub at_ms: i64,
}

impl Node {
    /// Returns whether the node was seen within `ttl_ms`. If the last heartbeat is far in the future, the database's
    /// clock was set back, and the node counts as not seen.
    pub fn alive(&self, now_ms: i64, ttl_ms: u64) -> bool {
        now_ms.abs_diff(self.seen_ms) <= ttl_ms
    }

    /// Returns whether the node is excluded for `model`. See [`Exclusion::applies`].
    pub fn excluded_for(&self, model: &ModelId, now_ms: i64, max_ms: u64) -> bool {
        self.exclusions.get(model).is_some_and(|e| e.applies(&self.ledger, now_ms, max_ms))
    }

    /// State of a model in the ledger. `None` if the node does not list it.
    pub fn model(&self, model: &ModelId) -> Option<&ModelState> {
        self.ledger.models.iter().find(|m| m.model == *model)
    }
}

impl Exclusion {
    /// Returns whether the exclusion still applies. The refusal may have come with a later ledger than the one cached
    /// here, so only a ledger with a later version than at the refusal ends the exclusion. `max_ms` is a safety net for
    /// a ledger that never changes: an idle node that refuses is asked again from time to time.
    pub fn applies(&self, ledger: &Ledger, now_ms: i64, max_ms: u64) -> bool {
        ledger.version <= self.version && now_ms.abs_diff(self.at_ms) < max_ms
    }
}
