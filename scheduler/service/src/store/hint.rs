//! What others should hear once a transaction is committed. All of it may be lost: the same is found by asking.

use cfq_proto::ids::{JobId, NodeId, RunnerId, TaskId};
use cfq_proto::messages::{JobFence, TaskFence};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    Leader(LeaderHint),
    /// A task became ready.
    WorkWaits,
    JobChanged {
        runner: RunnerId,
        task: TaskId,
        job: JobId,
    },
    CancelJob {
        node: NodeId,
        fence: JobFence,
    },
    CancelTask {
        runner: RunnerId,
        fence: TaskFence,
    },
}

/// Which row the leader's cache should read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", content = "id", rename_all = "snake_case")]
pub enum LeaderHint {
    Job(JobId),
    Node(NodeId),
}
