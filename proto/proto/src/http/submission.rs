//! Submission of tasks, and the references between them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{TaskId, TaskNumber};
use crate::task::{TaskSpec, TaskState};

/// Body of `POST /tasks`, with an optional `Idempotency-Key` header.
pub type SubmitRequest = TaskSpec;

/// Reply to `POST /tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SubmitReply {
    /// Id of the task.
    #[serde(rename = "task", alias = "id")]
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// State of the task.
    pub state: TaskState,
    /// False if a request with the same idempotency key already created this task.
    pub created: bool,
    /// Reasons why the task may wait although it was accepted, for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Reply to `POST /tasks:check`, whose body is that of `POST /tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckReply {
    /// The task with all defaults, and the models that its agents would have now.
    #[serde(rename = "spec", alias = "task")]
    pub task: TaskSpec,
    /// Reasons why the task would wait, for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Body of `POST /tasks:batch`, with an optional `Idempotency-Key` header: all tasks are created, or none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// The tasks. `after` may contain the names of other tasks of the batch.
    pub tasks: Vec<TaskSpec>,
}

/// Reply to `POST /tasks:batch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BatchReply {
    /// One reply for each task, in the order of the request.
    pub tasks: Vec<SubmitReply>,
}

/// A task that another one depends on, or that depends on another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkedTask {
    /// Number of the task.
    pub number: TaskNumber,
    /// State of the task.
    pub state: TaskState,
}
