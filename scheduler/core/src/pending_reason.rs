//! Why a queued job is not placed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;

/// Why a queued job is not placed. The text is stored with the job and shown to users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PendingReason {
    /// Nodes are live, but none lists the model.
    NoNodeHasModel {
        /// The job's model.
        model: ModelId,
    },
    /// No node is live; the machines may be starting.
    NoNodeUp,
    /// The model is on the disk of a node, or being loaded there.
    Loading {
        /// The job's model.
        model: ModelId,
    },
    /// No node that has the model can serve it.
    Unusable {
        /// What each node reports.
        reasons: BTreeMap<NodeId, String>,
    },
    /// The backoff after failed attempts is not over on any node.
    Backoff,
    /// The nodes that could serve the model yield to programs of their machines' owners.
    Yielding {
        /// The program that each yielding node yields to.
        programs: BTreeMap<NodeId, String>,
        /// Reports of the nodes that have the model but cannot serve it.
        unusable: BTreeMap<NodeId, String>,
    },
    /// The nodes that could serve the model are cordoned.
    Cordoned {
        /// The cordoned nodes.
        nodes: BTreeSet<NodeId>,
        /// Why the other nodes that have the model cannot serve it.
        others: BTreeMap<NodeId, String>,
    },
    /// A job that may be poison waits for a node that runs nothing else.
    ExclusiveNode {
        /// Number of the job's attempts that were lost with their node or not accepted.
        lost_or_unaccepted: u32,
    },
    /// No node has enough free capacity for the job, so one is reserved for it.
    ReservedNode {
        /// The reserved node.
        node: NodeId,
    },
    /// No node has enough free capacity, or higher-ranked jobs wait for it.
    Capacity,
}

impl PendingReason {
    /// Returns whether the reason implies that some node can serve the model. If it does, an earlier record that the
    /// model is unavailable is obsolete, and only failures of the job's own attempts still count towards the retry
    /// ceiling.
    pub fn is_served(&self) -> bool {
        match self {
            Self::Loading { .. }
            | Self::Yielding { .. }
            | Self::Cordoned { .. }
            | Self::Backoff
            | Self::ExclusiveNode { .. }
            | Self::ReservedNode { .. }
            | Self::Capacity => true,
            Self::NoNodeHasModel { .. } | Self::NoNodeUp | Self::Unusable { .. } => false,
        }
    }
}

impl fmt::Display for PendingReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodeHasModel { model } => write!(f, "waits: no running node has the model {model}"),
            Self::NoNodeUp => f.write_str("waits: no node is running"),
            Self::Loading { model } => write!(f, "waits: {model} is not loaded yet"),
            Self::Unusable { reasons } => write!(f, "waits: {}", join_by_node(reasons)),
            Self::Yielding { programs, unusable } => {
                let yielding = programs.iter().map(|(node, program)| format!("{node} yields to {program}"));
                let unusable = unusable.iter().map(|(node, reason)| format!("{node}: {reason}"));
                let all: Vec<String> = yielding.chain(unusable).collect();
                write!(f, "waits: {} (see yield_bytes and yield_ignores under [node])", all.join("; "))
            }
            Self::Backoff => f.write_str("waits before the next attempt"),
            Self::Cordoned { nodes, others } => {
                let cordoned = nodes.iter().map(|node| format!("{node} is cordoned"));
                let others = others.iter().map(|(node, reason)| format!("{node}: {reason}"));
                let all: Vec<String> = cordoned.chain(others).collect();
                write!(f, "waits: {} (`cfq machines uncordon NAME` ends this)", all.join("; "))
            }
            Self::ExclusiveNode { lost_or_unaccepted } => write!(
                f,
                "waits for a node that runs nothing else: it may have stopped its nodes ({lost_or_unaccepted} attempts \
                 were lost with their node or not accepted)"
            ),
            Self::ReservedNode { node } => {
                write!(
                    f,
                    "waits for room on {node}, which is reserved for it: it is too large for the room that is free"
                )
            }
            Self::Capacity => f.write_str("waits for free capacity on a node"),
        }
    }
}

/// Joins the reasons to `a: reason; b: reason`, in the order of the nodes' names.
pub fn join_by_node(reasons: &BTreeMap<NodeId, String>) -> String {
    let reasons: Vec<String> = reasons.iter().map(|(node, reason)| format!("{node}: {reason}")).collect();
    reasons.join("; ")
}
