//! The effects that a plan proposes.

use std::collections::BTreeMap;
use std::fmt;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;

use crate::pending_reason::PendingReason;

/// One step of a plan. Each effect except `Load` is one compare-and-set on (job, attempt) in Postgres; the resulting
/// row is fed back into the state.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Change the job from queued to placed, then publish the attempt to the node.
    Place {
        /// Job to place.
        job: JobId,
        /// Number of the new attempt: one higher than in the job's row.
        attempt: i32,
        /// Node to place it on.
        node: NodeId,
        /// Boot (process start) of that node.
        boot: BootId,
        /// Numbers behind the decision, stored with the job and shown to users.
        reason: String,
    },
    /// Publish the current attempt again, because the first message may be lost.
    Resend {
        /// Placed job.
        job: JobId,
        /// Number of the current attempt.
        attempt: i32,
        /// Lease of the attempt.
        lease: LeaseId,
        /// Node it is placed on.
        node: NodeId,
        /// Boot (process start) of that node.
        boot: BootId,
    },
    /// Change the job from placed back to queued, or end it as a dead letter if this happened too often. The node did
    /// not accept the job, so no failure is counted.
    Unplace {
        /// Placed job.
        job: JobId,
        /// Number of the current attempt.
        attempt: i32,
        /// Lease of the attempt.
        lease: LeaseId,
        /// Node it was placed on.
        node: NodeId,
        /// Why the placement ends.
        reason: UnplaceReason,
    },
    /// Change the job from queued to failed.
    Fail {
        /// Job to fail.
        job: JobId,
        /// Number of the current attempt.
        attempt: i32,
        /// Failure to store.
        failure: JobFailure,
    },
    /// Record that every node that has the model reports that it cannot serve the model. The time of the record is the
    /// start of the time that is compared with the retry ceiling.
    NoteUnavailable {
        /// Queued job.
        job: JobId,
        /// Number of the current attempt.
        attempt: i32,
        /// Reason that each of these nodes reports.
        reports: BTreeMap<NodeId, String>,
    },
    /// Ask the node to load the model that the job waits for; the node evicts idle models if it has to. Writes no row.
    Load {
        /// Job that waits for the model.
        job: JobId,
        /// Node that should load it.
        node: NodeId,
        /// Boot (process start) of that node.
        boot: BootId,
        /// Model to load.
        model: ModelId,
        /// Numbers behind the decision, for the log.
        reason: String,
    },
    /// Store why the job waits, for users. Written when the reason changes, and at intervals while `no_node_ms` grows.
    Explain {
        /// Queued job.
        job: JobId,
        /// Number of the current attempt.
        attempt: i32,
        /// Why it is not placed.
        pending: PendingReason,
        /// New value of [`Job::no_node_ms`](crate::Job::no_node_ms).
        no_node_ms: u64,
    },
}

impl Effect {
    /// Whether the effect only records why a job waits.
    pub fn is_record(&self) -> bool {
        match self {
            Self::Explain { .. } => true,
            Self::Place { .. }
            | Self::Resend { .. }
            | Self::Unplace { .. }
            | Self::Fail { .. }
            // Starts the time until the retry ceiling.
            | Self::NoteUnavailable { .. }
            | Self::Load { .. } => false,
        }
    }

    /// The job that the effect is for.
    pub fn job(&self) -> JobId {
        match self {
            Self::Place { job, .. }
            | Self::Resend { job, .. }
            | Self::Unplace { job, .. }
            | Self::Fail { job, .. }
            | Self::NoteUnavailable { job, .. }
            | Self::Load { job, .. }
            | Self::Explain { job, .. } => *job,
        }
    }
}

/// Why a placement ends before the node accepted it. The text continues a sentence that starts with the node's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnplaceReason {
    /// The node was lost or restarted.
    NodeLost,
    /// The node sends heartbeats but does not accept work.
    NodeUnresponsive,
}

impl fmt::Display for UnplaceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NodeLost => "was lost before it accepted the job",
            Self::NodeUnresponsive => "is alive but did not accept the job",
        })
    }
}
