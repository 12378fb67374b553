//! Types for the list of model calls.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{JobId, NodeId, TaskKey, TaskNumber};
use crate::job::{JobFailure, JobRole, JobState};
use crate::model::ModelId;
use crate::task::Priority;

/// Which jobs `GET /jobs` returns. All conditions that are given must hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobFilter {
    /// Only jobs of this task.
    pub task: Option<TaskKey>,
    /// States of the listed jobs; empty: all.
    pub states: Vec<JobState>,
    /// Only jobs whose current or last attempt is on this node.
    pub node: Option<NodeId>,
    /// Only calls of this model.
    pub model: Option<ModelId>,
    /// Only jobs that come after this one in the list: [`JobList::next`] of the page before.
    pub after: Option<JobId>,
    /// Maximum number of jobs in the reply.
    pub limit: u32,
}

/// Reply to `GET /jobs`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobList {
    /// Jobs, newest first.
    pub jobs: Vec<JobListItem>,
    /// Last job of this page, if there are more: the next page begins after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<JobId>,
}

/// One model call in the list of jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobListItem {
    /// Id of the job.
    #[serde(rename = "job", alias = "id")]
    pub id: JobId,
    /// Number of its task; shown as in `c5` for a call of a client of the OpenAI-compatible API.
    #[serde(rename = "number", alias = "task")]
    pub task: TaskNumber,
    /// Role that makes the call.
    pub role: JobRole,
    /// Model of the call.
    pub model: ModelId,
    /// Scheduling priority, taken from the task.
    pub priority: Priority,
    /// State of the job.
    pub state: JobState,
    /// Number of the current attempt, from 1; 0 before the first placement.
    pub attempt: i32,
    /// Node of the current attempt, or of the last one of a job that is done or failed.
    pub node: Option<NodeId>,
    /// Time at which the runner asked for the call, in seconds since 1970.
    pub created_at: f64,
    /// Time until the current attempt, or the last one, was accepted by its node, in milliseconds; until now or the end
    /// of the job if it was not. Earlier attempts are included.
    pub waiting_ms: u64,
    /// Time since the node accepted the current attempt, or until the last one ended, in milliseconds; 0 if none was
    /// accepted.
    pub running_ms: u64,
    /// Length of the prompt in tokens, once the job is done.
    pub prompt_tokens: Option<u32>,
    /// Length of the output in tokens, once the job is done.
    pub output_tokens: Option<u32>,
    /// Why a queued job waits, as text; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The last failure, also while the job waits for a retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<JobFailure>,
}

/// One attempt of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AttemptView {
    /// Number of the attempt, from 1.
    pub attempt: i32,
    /// Node of the attempt.
    pub node: NodeId,
    /// Why the job was placed there.
    pub placement: String,
    /// How it ended: `done`, `failed`, `released`, `refused`, `unplaced`, `lost` or `cancelled`; `None` if it has not.
    pub outcome: Option<String>,
    /// Why it ended, as text.
    pub detail: String,
    /// Why the job may have caused the end: `node_lost`, `stalled` or `not_accepted`; `None` if it is not suspected.
    pub suspicion: Option<String>,
    /// Whether the attempt generated text.
    pub has_first_token: bool,
    /// Time at which the job was placed on the node, in seconds since 1970.
    pub placed_at: f64,
    /// Time at which the node accepted it, in seconds since 1970.
    pub accepted_at: Option<f64>,
    /// Time of the end, in seconds since 1970.
    pub ended_at: Option<f64>,
}
