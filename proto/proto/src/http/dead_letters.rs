//! Types for dead letters: jobs that are not retried any more, and what happened in each of their attempts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AttemptView;
use crate::ids::{JobId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobRole};
use crate::model::ModelId;
use crate::task::TaskState;

/// A job that is a dead letter. Its task has not ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeadLetter {
    /// Id of the job.
    pub job: JobId,
    /// Id of the job's task.
    pub task: TaskId,
    /// Number of the job's task.
    pub number: TaskNumber,
    /// State of the job's task.
    pub task_state: TaskState,
    /// Role that makes the call.
    pub role: JobRole,
    /// Model of the call.
    pub model: ModelId,
    /// Number of attempts.
    pub attempts: i32,
    /// Number of attempts lost with their node after it had accepted them.
    pub losses: i32,
    /// Number of attempts that ended before a node accepted them.
    pub unaccepted: i32,
    /// Number of failed attempts.
    pub failures: i32,
    /// The last failure, with the list of the latest attempts.
    pub failure: Option<JobFailure>,
    /// Time at which the job became a dead letter, in seconds since 1970.
    pub died_at: f64,
}

/// Reply to `GET /dead-letters`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeadLetterList {
    /// Dead letters, the job that was created last first.
    pub dead_letters: Vec<DeadLetter>,
    /// The value of `after` that lists the next ones; `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<JobId>,
}

/// Reply to `GET /dead-letters/{key}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeadLetterDetail {
    /// The job.
    pub summary: DeadLetter,
    /// All attempts of the job, in order.
    pub attempts: Vec<AttemptView>,
}

/// Reply to `POST /dead-letters/{key}/requeue`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequeueReply {
    /// The job, which is queued now.
    pub job: JobId,
    /// Number of the job's task.
    pub number: TaskNumber,
    /// State of the task after the request.
    pub state: TaskState,
}
