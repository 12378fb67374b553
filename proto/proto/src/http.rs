//! Types of the HTTP API under `/api/v1`. Paths are in [`crate::client`], which is their only other reader.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::Event;
use crate::ids::{ArtifactId, BootId, JobId, NodeId, QuestionId, RunnerId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobState, Usage};
use crate::looping::{ActionKind, Decided, EscalationAction, EscalationReason, LoopState};
use crate::messages::ModelReply;
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::pr::PrState;
use crate::review::{Finding, Quarantine, ReviewFeedback};
use crate::task::{Agent, TaskSpec, TaskState};

/// `POST /tasks`; an `Idempotency-Key` header may come with it.
pub type SubmitRequest = TaskSpec;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SubmitReply {
    pub id: TaskId,
    pub number: TaskNumber,
    pub state: TaskState,
    /// False when the idempotency key had already made this task.
    pub created: bool,
}

/// A task in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskSummary {
    pub id: TaskId,
    pub number: TaskNumber,
    pub state: TaskState,
    pub loop_state: LoopState,
    pub title: String,
    pub priority: crate::task::Priority,
    pub iteration: u32,
    pub max_iterations: u32,
    pub best_score: Option<f64>,
    pub threshold: f64,
    pub created_at: f64,
    pub updated_at: f64,
    pub retry_of: Option<TaskId>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IterationView {
    pub iteration: u32,
    pub artifact: ArtifactId,
    pub commit: Option<String>,
    pub content_hash: String,
    pub model: String,
    pub paths: Vec<String>,
    pub findings: Vec<Finding>,
    pub quarantine: Option<Quarantine>,
    pub review: Option<ReviewFeedback>,
    pub reviewer_model: Option<String>,
    pub decided: Option<Decided>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

/// Why a task stopped and what can be done about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EscalationView {
    pub question: QuestionId,
    pub reason: EscalationReason,
    pub why: String,
    pub available_actions: Vec<ActionKind>,
    pub final_critique: Option<ReviewFeedback>,
    pub recommendation: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskDetail {
    pub summary: TaskSummary,
    pub spec: TaskSpec,
    /// Why it is in its state: the failure, the escalation, who cancelled.
    pub reason: String,
    pub iterations: Vec<IterationView>,
    pub best_iteration: Option<u32>,
    pub escalation: Option<EscalationView>,
    pub pr: Option<i64>,
    /// The branch in the user's repository, once delivered.
    pub delivered_branch: Option<String>,
    pub delivered_commit: Option<String>,
    pub jobs: Vec<JobSummary>,
    pub runner: Option<RunnerId>,
    pub attempt: i32,
    pub active_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobSummary {
    pub id: JobId,
    pub role: Agent,
    pub model: ModelId,
    pub state: JobState,
    pub attempt: i32,
    pub node: Option<NodeId>,
    /// Infrastructure losses: attempts whose node went away.
    pub losses: i32,
    /// Failures of the work itself.
    pub failures: i32,
    pub failure: Option<JobFailure>,
    pub usage: Option<Usage>,
    pub placement: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskList {
    pub tasks: Vec<TaskSummary>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CancelRequest {
    #[serde(default)]
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResolveRequest {
    pub action: EscalationAction,
}

/// The answer to cancel and resolve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StateReply {
    pub id: TaskId,
    pub number: TaskNumber,
    pub state: TaskState,
}

/// `GET /tasks/{key}/artifacts/{iteration}`: the whole artifact and the commits it stands on, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactChain {
    pub number: TaskNumber,
    pub base: String,
    /// Ends with the artifact asked for.
    pub artifacts: Vec<crate::looping::Artifact>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrView {
    pub number: i64,
    pub task: TaskNumber,
    pub title: String,
    pub state: PrState,
    pub branch: String,
    pub head: String,
    pub base: String,
    pub merge_commit: Option<String>,
    pub history: Vec<PrMove>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrMove {
    pub to: PrState,
    pub why: String,
    pub at: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeView {
    pub id: NodeId,
    pub boot: BootId,
    pub version: String,
    pub alive: bool,
    pub devices: Vec<Device>,
    pub ledger: Ledger,
    pub last_seen: f64,
    pub running: u32,
}

/// `POST /models/load` and `/models/unload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelRequest {
    pub model: ModelId,
    /// May be left out where only one can be meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// What the node said to it; how a load ends is told by its ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelAnswer {
    pub node: NodeId,
    pub boot: BootId,
    pub model: ModelId,
    pub reply: ModelReply,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventList {
    pub events: Vec<Event>,
}

/// Data of an `event: tokens` frame of a task's feed; it carries no id and is never repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensData {
    pub job: JobId,
    pub attempt: i32,
    pub role: Agent,
    pub offset: u64,
    pub text: String,
}

/// What every refused request answers with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorReply {
    pub error: ErrorBody,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    pub code: ErrorCode,
    /// What is wrong, where, and the next step.
    pub message: String,
    /// The field of the request, where one is at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Seconds after which to ask again, where that helps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400
    Invalid,
    /// 401
    Unauthorized,
    /// 403
    Forbidden,
    /// 404
    NotFound,
    /// 409: the idempotency key was used with another body.
    KeyReused,
    /// 409: the task is not in a state that allows it.
    Conflict,
    /// 413
    TooLarge,
    /// 429 or 503: try again.
    Busy,
    /// 500
    Internal,
}
