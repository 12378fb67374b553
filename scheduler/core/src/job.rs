//! A job as the planner sees it: one row of Postgres that is not over.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, Priority};

use crate::backoff::Setbacks;

#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub id: JobId,
    pub task: TaskId,
    pub role: Agent,
    pub model: ModelId,
    pub priority: Priority,
    pub deadline_ms: Option<i64>,
    /// When the job was asked for; going back to the queue does not make it younger.
    pub created_ms: i64,
    pub prompt_bytes: u64,
    /// Its chain of [`cfq_proto::prefix`].
    pub prefix: Vec<u64>,
    pub max_tokens: u32,
    /// Tokens a node counted when it refused: better than any estimate.
    pub known_need: Option<u64>,
    /// Nodes that can never run it, with their words.
    pub never: BTreeMap<NodeId, String>,
    pub setbacks: Setbacks,
    /// Since when it fails without an answer in between, or no node that has the model can serve it.
    pub first_failure_ms: Option<i64>,
    /// How long it waited beside live nodes of which none has the model, as far as that is written down.
    pub no_node_ms: u64,
    /// Attempts that were lost with their node.
    pub losses: u32,
    /// The last failure in words, empty if there was none.
    pub failure: String,
    pub attempt: i32,
    pub phase: Phase,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Phase {
    Queued,
    /// Published, not accepted yet.
    Placed {
        node: NodeId,
        boot: BootId,
        lease: LeaseId,
        placed_ms: i64,
    },
    Running {
        node: NodeId,
        boot: BootId,
        accepted_ms: i64,
    },
}

/// So often a job may be lost beside others before it has a node to itself.
const LOST_IN_COMPANY: u32 = 2;

impl Job {
    /// Its node was lost under it more than once: it may be what breaks the node, or only have run beside what does. Alone it
    /// shows which, and takes nobody with it.
    pub fn is_suspect(&self) -> bool {
        self.losses >= LOST_IN_COMPANY
    }

    /// The ceiling counts although no attempt of its own failed: every node that has the model said it cannot serve it.
    pub fn noted_unavailable(&self) -> bool {
        self.first_failure_ms.is_some() && self.setbacks.0.is_empty()
    }

    /// The node that has it now, if any.
    pub fn holder(&self) -> Option<(&NodeId, BootId)> {
        match &self.phase {
            Phase::Queued => None,
            Phase::Placed { node, boot, .. } | Phase::Running { node, boot, .. } => Some((node, *boot)),
        }
    }
}
