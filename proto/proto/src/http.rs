//! Types of the HTTP API under `/api/v1`. The paths are in the scheduler's router and in [`crate::client`].

mod agents;
mod control;
mod dead_letters;
mod defects;
mod explain;
mod jobs;
mod list;
mod machines;
mod prs;
mod retention;
mod schedule;
mod status;
mod submission;
mod tokens;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::Event;
use crate::ids::{ArtifactId, BootId, JobId, NodeId, QuestionId, RunnerId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobRole, JobState, Usage};
use crate::loop_step::{ActionKind, Decided, EscalationReason, LoopState};
use crate::messages::ModelReply;
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::review::{CheckRun, Finding, Quarantine, ReviewFeedback};
use crate::task::{TaskSpec, TaskState};

pub use agents::{AgentList, AgentPatch, AgentPatchReply, AgentView, MAX_INSTRUCTIONS_BYTES};
pub use control::{
    BulkOutcome, BulkPosition, BulkReply, BulkRequest, BulkResult, CancelRequest, MAX_TASKS_PER_BULK_REQUEST,
    PauseRequest, ResolveRequest, StateReply, TaskAction, TaskPatch,
};
pub use dead_letters::{DeadLetter, DeadLetterDetail, DeadLetterList, RequeueReply};
pub use defects::{DefectReply, DefectReport, MAX_DEFECT_TEXT_BYTES, MAX_REPORTED_DEFECTS, ReportedDefect};
pub use explain::{
    CostTerms, Explanation, JobEstimate, JobExplanation, JobPlan, NodePlan, NodeVerdict, QueuePosition,
    ReservationView, TaskExplanation, TaskWait,
};
pub use jobs::{AttemptView, JobFilter, JobList, JobListItem};
#[cfg(feature = "client")]
pub(crate) use list::query_value;
pub use list::{ListPosition, TaskList, TaskQuery, TaskSort};
pub use machines::{
    JoinReply, JoinRequest, JoinTokenList, JoinTokenRemoval, JoinTokenReply, JoinTokenRequest, JoinTokenView,
    JoinTokensRemoved, MachineList, MachineView,
};
pub use prs::{PrFilter, PrList, PrMove, PrView};
pub use retention::{FeedReset, FeedResetReason, GcReply, GcRequest};
pub use schedule::{ScheduleList, ScheduleRemoved, ScheduleRequest, ScheduleView};
pub use status::{ClusterStatus, QueuedJob};
pub use submission::{BatchReply, BatchRequest, CheckReply, LinkedTask, SubmitReply, SubmitRequest};
pub use tokens::{
    ApiTokenLimits, ApiTokenList, ApiTokenReply, ApiTokenRequest, ApiTokenRevoked, ApiTokenRole, ApiTokenView,
};

/// Summary of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskSummary {
    /// Id of the task.
    #[serde(rename = "task", alias = "id")]
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// State of the task.
    pub state: TaskState,
    /// State of the task's loop.
    pub loop_state: LoopState,
    /// Short title, made from the description.
    pub title: String,
    /// Path of the task's repository.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub repo: String,
    /// Commit from which the task starts, as it was submitted; `None`: HEAD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Scheduling priority.
    pub priority: crate::task::Priority,
    /// Current iteration, from 1; 0 before the first one.
    pub iteration: u32,
    /// Maximum number of reviews.
    pub max_iterations: u32,
    /// Best score so far, out of 100.
    pub best_score: Option<f64>,
    /// Minimum score, out of 100, for convergence.
    pub threshold: f64,
    /// Time of submission, in seconds since 1970.
    pub created_at: f64,
    /// Time of the last change, in seconds since 1970.
    pub updated_at: f64,
    /// Labels of the task.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<crate::label::Label>,
    /// Earlier task that this task retries.
    pub retry_of: Option<TaskId>,
    /// Why the task may not start yet, as text; `None` unless it is queued or blocked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// Why the task needs a human, is paused, or failed: the first line of its reason; `None` in other states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// True if the task was raised by one priority class because three or more tasks wait for it, directly or
    /// indirectly, and it has not ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_bottleneck: bool,
    /// True if the task failed and a user has acknowledged or retried it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_acknowledged: bool,
}

/// One iteration of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IterationView {
    /// Number of the iteration, from 1.
    pub iteration: u32,
    /// Id of the artifact, the creator's result.
    pub artifact: ArtifactId,
    /// Commit of the artifact; `None` if the creator's reply could not be parsed.
    pub commit: Option<String>,
    /// Hash of the artifact's files, see [`crate::loop_step::Artifact`].
    pub content_hash: String,
    /// Model of the creator; `commit ID` for a change under review.
    pub model: String,
    /// Paths of the files that the artifact changes.
    pub paths: Vec<String>,
    /// Findings of cfq's own checks and of those of the project.
    pub findings: Vec<Finding>,
    /// Why the artifact is neither reviewed nor merged; `None` if it may be.
    pub quarantine: Option<Quarantine>,
    /// True until the checks have run to their end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
    /// The checks of the project that ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ran: Vec<CheckRun>,
    /// The critic's review; `None` before the review.
    pub review: Option<ReviewFeedback>,
    /// Model of the critic.
    pub reviewer_model: Option<String>,
    /// Decision after the review; `None` before it.
    pub decided: Option<Decided>,
    /// Length of the creator's prompt, in tokens.
    pub prompt_tokens: u32,
    /// Length of the creator's reply, in tokens.
    pub output_tokens: u32,
}

/// Why a task waits for a human, and the actions available.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EscalationView {
    /// Id of the open question.
    pub question: QuestionId,
    /// Why the loop escalated.
    pub reason: EscalationReason,
    /// The reason as text, with the numbers behind it.
    #[serde(alias = "why")]
    pub explanation: String,
    /// Actions that `resolve` accepts.
    pub available_actions: Vec<ActionKind>,
    /// The critic's last review.
    pub final_critique: Option<ReviewFeedback>,
    /// Suggested action, as text.
    pub recommendation: String,
}

/// All details of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskDetail {
    /// Summary of the task.
    pub summary: TaskSummary,
    /// Specification of the task, with defaults filled in.
    pub spec: TaskSpec,
    /// Why the task is in its state, as text: the failure, the escalation, the client that cancelled the task, or what
    /// its queued job waits for.
    pub reason: String,
    /// All iterations of the task, in order.
    pub iterations: Vec<IterationView>,
    /// Iteration of the best artifact that is committed, checked, and not quarantined except by failed checks of the
    /// project; `None` if there is none.
    pub best_iteration: Option<u32>,
    /// The open question and its actions, if the task waits for a human.
    pub escalation: Option<EscalationView>,
    /// Number of the task's internal pull request.
    pub pr: Option<i64>,
    /// The project's checks that ran on the merge, once the result is merged; none if its files were checked before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merge_checks: Vec<CheckRun>,
    /// Branch in the user's repository that holds the result, once it is delivered.
    pub delivered_branch: Option<String>,
    /// Commit at the head of the delivered branch.
    pub delivered_commit: Option<String>,
    /// All jobs of the task, in order.
    pub jobs: Vec<JobSummary>,
    /// Runner that holds the task's lease.
    pub runner: Option<RunnerId>,
    /// What the runner does, if it is no model call and takes longer than about two seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<ActivityView>,
    /// Number of the runner's attempt, from 1; 0 before the first.
    pub attempt: i32,
    /// Working time of the task, in milliseconds, without waits for placement or a human.
    pub active_ms: u64,
    /// Tasks that must end well before this one starts, in the order of their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub predecessors: Vec<LinkedTask>,
    /// Tasks that wait for this one directly and have not ended, in the order of their numbers; at most 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependents: Vec<LinkedTask>,
    /// Defects that users reported of the result, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reported_defects: Vec<ReportedDefect>,
}

/// What a runner does for a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ActivityView {
    /// What it does, as text that continues a sentence: `running the check ...`.
    pub text: String,
    /// Time for which this has been known, in milliseconds.
    pub elapsed_ms: u64,
}

/// Summary of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobSummary {
    /// Id of the job.
    #[serde(rename = "job", alias = "id")]
    pub id: JobId,
    /// Role that makes the call.
    pub role: JobRole,
    /// Model of the call.
    pub model: ModelId,
    /// State of the job.
    pub state: JobState,
    /// Number of the current attempt, from 1; 0 before the first placement.
    pub attempt: i32,
    /// Node of the current attempt.
    pub node: Option<NodeId>,
    /// Number of attempts lost with their node after it had accepted them.
    pub losses: i32,
    /// Number of attempts that ended before a node accepted them, because the node was lost or did not accept them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unaccepted: i32,
    /// Number of failed attempts, not counting those lost with their node.
    pub failures: i32,
    /// The last failure.
    pub failure: Option<JobFailure>,
    /// Token counts and times, once the job is done.
    pub usage: Option<Usage>,
    /// Why the job was placed on its node, or why it waits, as text.
    pub placement: String,
}

fn is_zero<T: Default + PartialEq>(count: &T) -> bool {
    *count == T::default()
}

/// Reply to `GET /tasks/{key}/artifacts/{iteration}`: the artifact and the earlier artifacts it is based on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactChain {
    /// Number of the task.
    pub number: TaskNumber,
    /// Commit that the oldest artifact is based on.
    pub base: String,
    /// Artifacts, oldest first; the last one is the requested one.
    pub artifacts: Vec<crate::loop_step::Artifact>,
}

/// A registered node with its latest ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeView {
    /// Name of the node.
    pub id: NodeId,
    /// Id of the node's current process start.
    pub boot: BootId,
    /// cfq version that the node runs.
    pub version: String,
    /// True if the node's heartbeats arrive.
    pub alive: bool,
    /// True if the node gets no new work because an operator cordoned it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// Devices of the node.
    pub devices: Vec<Device>,
    /// Latest ledger (capacity report) of the node.
    pub ledger: Ledger,
    /// Time of the last heartbeat, in seconds since 1970.
    pub last_seen: f64,
    /// Number of jobs that run on the node.
    pub running: u32,
    /// Number of jobs that are placed on the node and not accepted yet.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub placed: u32,
}

/// Reply to `GET /nodes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeList {
    /// All registered nodes, in the order of their names.
    pub nodes: Vec<NodeView>,
}

/// Body of `POST /models/load` and `POST /models/unload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelRequest {
    /// Model to load or unload.
    pub model: ModelId,
    /// Node that receives the request. Optional if only one node is alive, or if only one live node serves the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// Reply to [`ModelRequest`]. It is sent before a load finishes; the result of the load appears later in the node's
/// ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelAnswer {
    /// Node that replied.
    pub node: NodeId,
    /// Id of the process start (boot) of the node that replied.
    pub boot: BootId,
    /// Model of the request.
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

/// Data of an `event: tokens` frame of a task's feed; the frame has no id and is never sent again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensData {
    /// Id of the job.
    pub job: JobId,
    /// Number of the job's attempt that generates the text.
    pub attempt: i32,
    /// Role that makes the call.
    pub role: JobRole,
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

/// Details of an error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// Kind of the error.
    pub code: ErrorCode,
    /// Message for the user: what is wrong, where, and what to do next.
    pub message: String,
    /// Invalid field of the request, if the error concerns a field.
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
    /// 403: the client may not make this request.
    Forbidden,
    /// 404: the requested resource does not exist.
    NotFound,
    /// 409: the idempotency key was used with another body.
    KeyReused,
    /// 409: the task's state does not allow the request.
    Conflict,
    /// 413: the body is too large.
    TooLarge,
    /// 429: a limit of this API token is reached; close or end something, or retry later.
    TooManyRequests,
    /// 503: the server cannot handle the request now; retry later.
    Busy,
    /// 500: an error on the server.
    Internal,
}
