//! Types of the HTTP API under `/api/v1`. The paths are in the scheduler's router and in [`crate::client`].

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::Event;
use crate::ids::{ArtifactId, BootId, JobId, NodeId, QuestionId, RunnerId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobState, Usage};
use crate::loop_step::{ActionKind, Decided, EscalationAction, EscalationReason, LoopState};
use crate::messages::ModelReply;
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::pr::PrState;
use crate::review::{Finding, Quarantine, ReviewFeedback};
use crate::task::{Agent, TaskSpec, TaskState};

/// Body of `POST /tasks`, with an optional `Idempotency-Key` header.
pub type SubmitRequest = TaskSpec;

/// Reply to `POST /tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SubmitReply {
    /// Id of the task.
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// Its state.
    pub state: TaskState,
    /// False if a request with the same idempotency key already created this task.
    pub created: bool,
}

/// Summary of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskSummary {
    /// Id of the task.
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// Its state.
    pub state: TaskState,
    /// State of its loop.
    pub loop_state: LoopState,
    /// Short title, made from the description.
    pub title: String,
    /// Scheduling priority.
    pub priority: crate::task::Priority,
    /// Current iteration, from 1; 0 before the first one.
    pub iteration: u32,
    /// Maximum number of reviews.
    pub max_iterations: u32,
    /// Best score so far, out of 100.
    pub best_score: Option<f64>,
    /// Score out of 100 at which the loop converges.
    pub threshold: f64,
    /// Time of submission, in seconds since 1970.
    pub created_at: f64,
    /// Time of the last change, in seconds since 1970.
    pub updated_at: f64,
    /// Task that this one repeats.
    pub retry_of: Option<TaskId>,
}

/// One iteration of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IterationView {
    /// Number of the iteration, from 1.
    pub iteration: u32,
    /// The creator's result.
    pub artifact: ArtifactId,
    /// Its commit; `None` if the creator's reply could not be parsed.
    pub commit: Option<String>,
    /// Hash of its files, see [`crate::loop_step::Artifact`].
    pub content_hash: String,
    /// Model of the creator.
    pub model: String,
    /// Files that it changes.
    pub paths: Vec<String>,
    /// Findings of cfq's own checks.
    pub findings: Vec<Finding>,
    /// Why it may not be used, if so.
    pub quarantine: Option<Quarantine>,
    /// The critic's review, once there is one.
    pub review: Option<ReviewFeedback>,
    /// Model of the critic.
    pub reviewer_model: Option<String>,
    /// Decision after the review.
    pub decided: Option<Decided>,
    /// Tokens of the creator's prompt.
    pub prompt_tokens: u32,
    /// Tokens of the creator's reply.
    pub output_tokens: u32,
}

/// Why a task waits for a human, and the actions available.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EscalationView {
    /// The open question.
    pub question: QuestionId,
    /// Why the loop escalated.
    pub reason: EscalationReason,
    /// The reason as text, with its figures.
    pub why: String,
    /// Actions that `resolve` accepts.
    pub available_actions: Vec<ActionKind>,
    /// The last review.
    pub final_critique: Option<ReviewFeedback>,
    /// Suggested action, as text.
    pub recommendation: String,
}

/// All details of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskDetail {
    /// Summary.
    pub summary: TaskSummary,
    /// Specification, with defaults filled in.
    pub spec: TaskSpec,
    /// Why it is in its state: the failure, the escalation, or the client that cancelled it.
    pub reason: String,
    /// All iterations, in order.
    pub iterations: Vec<IterationView>,
    /// Iteration of the best artifact that may be returned.
    pub best_iteration: Option<u32>,
    /// The open question, if there is one.
    pub escalation: Option<EscalationView>,
    /// Number of its pull request.
    pub pr: Option<i64>,
    /// Branch in the user's repository, once delivered.
    pub delivered_branch: Option<String>,
    /// Commit at the head of that branch.
    pub delivered_commit: Option<String>,
    /// All jobs, in order.
    pub jobs: Vec<JobSummary>,
    /// Runner that holds its lease.
    pub runner: Option<RunnerId>,
    /// Number of the runner's attempt, from 1; 0 before the first.
    pub attempt: i32,
    /// Working time, in milliseconds.
    pub active_ms: u64,
}

/// Summary of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobSummary {
    /// Id of the job.
    pub id: JobId,
    /// Role of the call.
    pub role: Agent,
    /// Model of the call.
    pub model: ModelId,
    /// Its state.
    pub state: JobState,
    /// Number of the current attempt, from 1; 0 before the first placement.
    pub attempt: i32,
    /// Node of the current attempt.
    pub node: Option<NodeId>,
    /// Number of attempts lost with their node.
    pub losses: i32,
    /// Number of failures of the work itself.
    pub failures: i32,
    /// The last failure.
    pub failure: Option<JobFailure>,
    /// Token counts and times, once it is done.
    pub usage: Option<Usage>,
    /// Why it was placed where it is, or why it waits, as text.
    pub placement: String,
}

/// Reply to `GET /tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskList {
    /// Tasks, newest first.
    pub tasks: Vec<TaskSummary>,
}

/// Body of `POST /tasks/{key}/cancel`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CancelRequest {
    /// Why, as text; may be empty.
    #[serde(default)]
    pub reason: String,
}

/// Body of `POST /tasks/{key}/resolve`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResolveRequest {
    /// Answer to the open question.
    pub action: EscalationAction,
}

/// Reply to cancel and resolve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StateReply {
    /// Id of the task.
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// State after the request.
    pub state: TaskState,
}

/// Reply to `GET /tasks/{key}/artifacts/{iteration}`: the artifact with its ancestors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactChain {
    /// Number of the task.
    pub number: TaskNumber,
    /// Commit that the oldest artifact is based on.
    pub base: String,
    /// Artifacts, oldest first; the last one is the requested one.
    pub artifacts: Vec<crate::loop_step::Artifact>,
}

/// A pull request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrView {
    /// Its number.
    pub number: i64,
    /// Number of its task.
    pub task: TaskNumber,
    /// Title.
    pub title: String,
    /// State.
    pub state: PrState,
    /// Branch to merge.
    pub branch: String,
    /// Commit at the head of the branch.
    pub head: String,
    /// Commit the branch is based on.
    pub base: String,
    /// Commit of the merge, once merged.
    pub merge_commit: Option<String>,
    /// All state changes, in order.
    pub history: Vec<PrMove>,
}

/// One state change of a pull request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrMove {
    /// State after the change.
    pub to: PrState,
    /// Why, as text.
    pub why: String,
    /// Seconds since 1970.
    pub at: f64,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeView {
    /// Name.
    pub id: NodeId,
    /// Current boot.
    pub boot: BootId,
    /// cfq version.
    pub version: String,
    /// True if its heartbeats arrive.
    pub alive: bool,
    /// Devices.
    pub devices: Vec<Device>,
    /// Latest ledger.
    pub ledger: Ledger,
    /// Time of the last heartbeat, in seconds since 1970.
    pub last_seen: f64,
    /// Number of jobs that run on it.
    pub running: u32,
}

/// Body of `POST /models/load` and `POST /models/unload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelRequest {
    /// The model.
    pub model: ModelId,
    /// Node; optional if only one is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// Reply to [`ModelRequest`]; the node's ledger shows how a load ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelAnswer {
    /// The node.
    pub node: NodeId,
    /// Its boot.
    pub boot: BootId,
    /// The model.
    pub model: ModelId,
    /// The node's reply.
    pub reply: ModelReply,
}

/// Reply to `GET /tasks/{key}/events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventList {
    /// Events, in order.
    pub events: Vec<Event>,
}

/// Data of an `event: tokens` frame of a task's feed; it has no id and is never repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensData {
    /// The job.
    pub job: JobId,
    /// Number of its attempt.
    pub attempt: i32,
    /// Role of the call.
    pub role: Agent,
    /// Offset of `text` in the output, in bytes.
    pub offset: u64,
    /// The new text.
    pub text: String,
}

/// Body of every error response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorReply {
    /// The error.
    pub error: ErrorBody,
}

/// An error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// Kind of the error.
    pub code: ErrorCode,
    /// What is wrong, where, and the next step.
    pub message: String,
    /// Field of the request that is at fault, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Seconds after which to retry, if a retry can help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u32>,
}

/// Kind of an error, with its HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: the request is invalid.
    Invalid,
    /// 401: the API token is missing or wrong.
    Unauthorized,
    /// 403: the client may not do this.
    Forbidden,
    /// 404: there is no such thing.
    NotFound,
    /// 409: the idempotency key was used with another body.
    KeyReused,
    /// 409: the task's state does not allow it.
    Conflict,
    /// 413: the body is too large.
    TooLarge,
    /// 429 or 503: retry later.
    Busy,
    /// 500: an error on the server.
    Internal,
}
