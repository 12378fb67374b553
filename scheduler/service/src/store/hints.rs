//! Notifications to send after a transaction is committed. Each may be lost: the receiver finds the same change by
//! polling.

use cfq_proto::ids::{JobId, LeaseId, NodeId, RunnerId, TaskId};
use cfq_proto::messages::{JobFence, TaskFence};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StoreError;
use super::columns::parse;
use super::tasks::TaskRow;

/// One notification, with its receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// For the leader: a row changed.
    Leader(LeaderHint),
    /// For all runners: a task became ready, or may be able to continue.
    TaskReady,
    /// For the runner that holds the task: one of its jobs changed.
    JobChanged { runner: RunnerId, task: TaskId, job: JobId },
    /// For the node that holds the attempt: stop the attempt.
    CancelJob { node: NodeId, fence: JobFence },
    /// For the runner that held the task: stop working on the task.
    CancelTask { runner: RunnerId, fence: TaskFence },
}

/// The row that the leader should read into its cache again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", content = "id", rename_all = "snake_case")]
pub enum LeaderHint {
    Job(JobId),
    Node(NodeId),
}

/// Hints about a changed job, to the leader and to the runner that holds its task. If no runner holds the task, all
/// runners are notified, because the task may wait for this job. No runner waits for the job of an API client's call.
pub(super) fn for_changed_job(task: &TaskRow, job: JobId) -> Vec<Hint> {
    if task.is_call {
        return vec![Hint::Leader(LeaderHint::Job(job))];
    }
    let for_runner = match (&task.runner, task.lease) {
        (Some(runner), Some(_)) => Hint::JobChanged { runner: runner.clone(), task: task.id, job },
        _ => Hint::TaskReady,
    };
    vec![Hint::Leader(LeaderHint::Job(job)), for_runner]
}

/// Hints about a cancelled job, to the leader and, if a node held the job, to that node. The arguments are from the
/// job's row before the cancellation.
pub(super) fn for_cancelled_job(
    job: JobId,
    attempt: i32,
    lease: Option<Uuid>,
    node: Option<&str>,
) -> Result<Vec<Hint>, StoreError> {
    let mut hints = vec![Hint::Leader(LeaderHint::Job(job))];
    if let (Some(lease), Some(node)) = (lease, node) {
        let fence = JobFence { job, attempt, lease: LeaseId(lease) };
        hints.push(Hint::CancelJob { node: parse("node", node)?, fence });
    }
    Ok(hints)
}

/// The hint to stop working on a task, for the runner that held it; `None` if no runner held it. `task` is the row as
/// it was before the runner lost the task.
pub(super) fn for_cancelled_task(task: &TaskRow) -> Option<Hint> {
    task.runner.clone().zip(task.fence()).map(|(runner, fence)| Hint::CancelTask { runner, fence })
}
