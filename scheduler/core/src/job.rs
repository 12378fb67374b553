//! A job as the planner sees it: the Postgres row of a job that has not ended.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobFailure, JobRole};
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;

use crate::backoff::NodeFailures;
use crate::suspicion::{LOSSES_BEFORE_ISOLATION, SUSPICIONS_BEFORE_ISOLATION};

/// One model call that is queued, placed or running.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Id of the job.
    pub id: JobId,
    /// Task that the job belongs to.
    pub task: TaskId,
    /// Who makes the call.
    pub role: JobRole,
    /// Model to call.
    pub model: ModelId,
    /// Priority class of the task.
    pub priority: Priority,
    /// Deadline of the task, in ms.
    pub deadline_ms: Option<i64>,
    /// Time at which the task was submitted, in ms. A task does not wait again at each model call, and a requeued job
    /// keeps its age.
    pub created_ms: i64,
    /// Size of the prompt, in bytes.
    pub prompt_bytes: u64,
    /// Prefix hash chain of the prompt ([`cfq_proto::prefix`]).
    pub prefix: Vec<u64>,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// Exact number of tokens for prompt and output, counted by a node that refused the job; `None` if no node counted
    /// them.
    pub counted_tokens: Option<u64>,
    /// Nodes that can never run the job, with the reason each gave.
    pub refused_by: BTreeMap<NodeId, String>,
    /// Failed attempts and the backoff after them, by node.
    pub node_failures: NodeFailures,
    /// Start of the time that is compared with the retry ceiling, in ms: the first failure of an attempt since the job
    /// last generated a token; if no attempt failed, the time at which every node that has the model reported that it
    /// cannot serve the model. `None` if neither happened.
    pub first_failure_ms: Option<i64>,
    /// Total recorded time in which nodes were live but none had the model, in ms.
    pub no_node_ms: u64,
    /// Whether the caller calls another model if the job fails. Then the job does not wait for the retry ceiling.
    pub has_fallback: bool,
    /// Number of attempts that were lost together with their node after it had accepted them.
    pub losses: u32,
    /// Number of attempts that ended before a node accepted them, because the node was lost or did not accept them.
    pub unaccepted: u32,
    /// Number of these attempts whose end the job may have caused ([`is_suspect`](crate::is_suspect)).
    pub suspicions: u32,
    /// Last failure, if there was one.
    pub last_failure: Option<JobFailure>,
    /// Number of the current attempt; 0 before the first.
    pub attempt: i32,
    /// Phase of the job: queued, placed or running.
    pub phase: JobPhase,
}

/// Phase of a job that has not ended.
#[derive(Debug, Clone, PartialEq)]
pub enum JobPhase {
    /// Waiting for placement.
    Queued,
    /// Published to a node, which has not accepted it yet.
    Placed {
        /// Node it was published to.
        node: NodeId,
        /// Boot (process start) of that node.
        boot: BootId,
        /// Lease of the attempt.
        lease: LeaseId,
        /// Time of the placement, in ms.
        placed_ms: i64,
        /// Time of the node's last report that it is preparing the prompt, in ms; `None` if there was none.
        preparing_ms: Option<i64>,
    },
    /// Accepted by a node.
    Running {
        /// Node that runs it.
        node: NodeId,
        /// Boot (process start) of that node.
        boot: BootId,
        /// Time of the acceptance, in ms.
        accepted_ms: i64,
    },
}

impl JobPhase {
    /// Whether both are the same phase of the same attempt, whatever its node has reported of it meanwhile.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Placed { lease, .. }, Self::Placed { lease: other, .. }) => lease == other,
            (Self::Queued | Self::Placed { .. } | Self::Running { .. }, _) => self == other,
        }
    }
}

impl Job {
    /// Returns whether the job may be a poison job: it is suspected to have stopped its node more than once, or very
    /// many of its attempts were lost. The job may be the cause, or may only have run concurrently with the cause.
    /// Running the job alone shows whether it is the cause, and puts no other job at risk.
    pub fn may_be_poison(&self) -> bool {
        self.suspicions >= SUSPICIONS_BEFORE_ISOLATION
            || self.losses.saturating_add(self.unaccepted) >= LOSSES_BEFORE_ISOLATION
    }

    /// Returns whether the time until the retry ceiling runs because every node that has the model reported that it
    /// cannot serve the model, and not because an attempt failed.
    pub fn is_unavailable_everywhere(&self) -> bool {
        self.first_failure_ms.is_some() && self.node_failures.0.is_empty()
    }

    /// Whether the job's failures on the node prevent a placement there now. A job with a fallback is tried once on each
    /// node.
    pub fn is_blocked_on(&self, node: &NodeId, now_ms: i64) -> bool {
        match self.has_fallback {
            true => self.node_failures.0.contains_key(node),
            false => self.node_failures.blocks(node, now_ms),
        }
    }

    /// Node that the job is placed on or runs on, with its boot. `None` while the job is queued.
    pub fn holder(&self) -> Option<(&NodeId, BootId)> {
        match &self.phase {
            JobPhase::Queued => None,
            JobPhase::Placed { node, boot, .. } | JobPhase::Running { node, boot, .. } => Some((node, *boot)),
        }
    }
}
