//! Types that explain why a task or a job waits, or where it runs.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AttemptView;
use crate::ids::{JobId, NodeId, QuestionId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobRole, JobState};
use crate::model::ModelId;
use crate::task::{Priority, TaskState};

/// Reply to `GET /explain/{key}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The task, or the task of the job.
    #[serde(rename = "summary", alias = "task")]
    pub task: TaskExplanation,
    /// The job that the key names. For a task: its jobs that have not ended, or the last one if all have.
    pub jobs: Vec<JobExplanation>,
    /// Why the leader's plan is missing, as text for users; empty if it answered or was not needed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub warning: String,
}

/// What a task waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskExplanation {
    /// Id of the task.
    #[serde(rename = "task", alias = "id")]
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// State of the task.
    pub state: TaskState,
    /// Scheduling priority.
    pub priority: Priority,
    /// Why the task is in its state, as text.
    pub reason: String,
    /// What the task waits for; `None` if it runs or has ended.
    pub waits_for: Option<TaskWait>,
    /// Task of P0 that gets this task's slot after the next step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preempted_by: Option<TaskNumber>,
}

/// What a task waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TaskWait {
    /// A slot of a runner.
    RunnerSlot {
        /// Number of ready tasks that get a slot before this one.
        before: u64,
        /// Number of slots of the live runners.
        slots: u64,
        /// Number of these slots that are free.
        free: u64,
        /// Number of live runners.
        runners: u64,
        /// Maximum number of running tasks of the task's API token, if that many run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        running_tasks_limit: Option<u32>,
    },
    /// A job of the task, which has to be placed on a node first.
    Job {
        /// The job.
        job: JobId,
    },
    /// A human's answer.
    Human {
        /// The open question.
        question: Option<QuestionId>,
    },
    /// Predecessor tasks; the task's reason names them.
    Predecessor,
    /// The time at which it may start.
    Time,
    /// A human who resumes it.
    Resume,
}

/// Where a job runs, or what it waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobExplanation {
    /// Id of the job.
    #[serde(rename = "job", alias = "id")]
    pub id: JobId,
    /// Role that makes the call.
    pub role: JobRole,
    /// Model of the call.
    pub model: ModelId,
    /// Scheduling priority.
    pub priority: Priority,
    /// State of the job.
    pub state: JobState,
    /// Number of the current attempt, from 1; 0 before the first placement.
    pub attempt: i32,
    /// Node of the current attempt.
    pub node: Option<NodeId>,
    /// The recorded reason: why the job was placed on its node, or why it waits.
    pub placement: String,
    /// The last failure, also while the job waits for a retry.
    pub failure: Option<JobFailure>,
    /// All attempts, oldest first.
    pub attempts: Vec<AttemptView>,
    /// What the leader plans for the job. `None` if the job has ended, or if the leader did not answer.
    pub plan: Option<JobPlan>,
}

/// What the leader plans for a job that has not ended, computed with the functions that place jobs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobPlan {
    /// Position of a queued job.
    pub position: Option<QueuePosition>,
    /// Nodes that have the job's model, cheapest first, and then the others; for a queued job only.
    pub nodes: Vec<NodePlan>,
    /// Number of other nodes, which are not listed.
    #[serde(default)]
    pub omitted_nodes: u64,
    /// The node that is reserved for a large job of this model.
    pub reservation: Option<ReservationView>,
    /// When the job is expected to start and end; `None` if no node can run it now.
    pub estimate: Option<JobEstimate>,
}

/// Position of a job in the order of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct QueuePosition {
    /// Number of queued jobs of the model that come before it.
    pub before: u64,
    /// Number of queued jobs of the model.
    pub queued: u64,
}

/// A node that is reserved for a job that is too large for the room that is free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReservationView {
    /// The job that it is reserved for.
    pub job: JobId,
    /// The reserved node.
    pub node: NodeId,
    /// Time since the reservation, in milliseconds.
    pub age_ms: u64,
    /// Time until that job was expected to start when the node was reserved, in milliseconds; 0 if it has passed.
    pub start_in_ms: u64,
}

/// When a job is expected to start and end. Calls end when they have generated their maximum number of tokens, with the
/// measured rates of the node, and jobs that may be submitted later are not considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobEstimate {
    /// Node on which it is expected to start first.
    pub node: NodeId,
    /// Time until the start, in milliseconds; 0 if the job has started, or may start now.
    pub start_in_ms: u64,
    /// Time until the end, in milliseconds.
    pub end_in_ms: u64,
    /// False if the estimate depends on something that the scheduler does not know, such as sequences of other programs
    /// or the room of a model that is not loaded.
    pub is_certain: bool,
}

/// A node, compared with the others for a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodePlan {
    /// The node.
    pub node: NodeId,
    /// Whether the job can be placed there now, or why not.
    pub verdict: NodeVerdict,
    /// Terms of the placement cost; `None` if the node does not have the model.
    pub cost: Option<CostTerms>,
    /// Time until the node is expected to have room for the job, in milliseconds, without the jobs before it; `None` if
    /// that is not known.
    pub start_in_ms: Option<u64>,
}

/// Terms of the cost of a placement. The sum of the times is the cost by which nodes are compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CostTerms {
    /// Estimated length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the node is assumed to have cached.
    pub cached_tokens: u64,
    /// Tokens of the KV cache that the job reserves.
    pub reserved_tokens: u64,
    /// Free tokens of the KV cache.
    pub free_tokens: u64,
    /// Free sequence slots.
    pub free_slots: u32,
    /// Number of other sequences on the model.
    pub other_sequences: u32,
    /// Time until the prompts that were placed before are computed, in milliseconds.
    pub earlier_prefills_ms: u64,
    /// Time to compute the tokens of the prompt that are not cached, in milliseconds.
    pub prefill_ms: u64,
    /// Time to generate the maximum number of tokens, in milliseconds; it grows with the number of other sequences.
    pub decode_ms: u64,
    /// Time that it costs later to compute again what the prompt evicts from the prefix cache, in milliseconds.
    pub eviction_ms: u64,
    /// Time to load the model, in milliseconds; 0 if it is loaded.
    pub load_ms: u64,
}

impl CostTerms {
    /// The cost, in milliseconds.
    pub fn total_ms(&self) -> u64 {
        let terms = [self.earlier_prefills_ms, self.prefill_ms, self.decode_ms, self.eviction_ms, self.load_ms];
        terms.into_iter().fold(0, u64::saturating_add)
    }
}

/// Whether a job can be placed on a node now, or why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeVerdict {
    /// The node has room for the job.
    HasRoom,
    /// The node has room, but is reserved for another job.
    Reserved {
        /// The job that it is reserved for.
        job: JobId,
    },
    /// No sequence slot is free.
    NoFreeSlot,
    /// Too few tokens of the KV cache are free.
    TooFewFreeTokens,
    /// The KV cache is too small for the job, even when nothing else runs.
    TooLarge,
    /// The node runs a job that must run alone, or this job must run alone and the node is not empty.
    Isolated,
    /// The model is on disk.
    NotLoaded,
    /// The model is being loaded.
    Loading,
    /// The model is being unloaded.
    Unloading,
    /// The node reports that it cannot use the model.
    Unusable {
        /// The node's report.
        reason: String,
    },
    /// The node does not have the model.
    NoModel,
    /// The node sends no heartbeats.
    NotAlive {
        /// Time since the last heartbeat, in milliseconds.
        silent_ms: u64,
    },
    /// The node is stopping.
    Draining,
    /// The node is cordoned: it gets no new work.
    Cordoned,
    /// The node yields its GPU to another program.
    Yielding {
        /// The program.
        program: String,
    },
    /// The node refused the job permanently.
    Refused {
        /// The node's reason.
        reason: String,
    },
    /// The job failed on the node, and the backoff is not over.
    Backoff {
        /// Time until it is over, in milliseconds.
        left_ms: u64,
    },
    /// The node refused work for the model a moment ago, until its free room changes.
    RefusedForNow,
    /// The node sends heartbeats but accepts no work.
    Unresponsive,
}

impl fmt::Display for NodeVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HasRoom => f.write_str("has room"),
            Self::Reserved { job } => write!(f, "has room, but is reserved for job {job}"),
            Self::NoFreeSlot => f.write_str("no free sequence slot"),
            Self::TooFewFreeTokens => f.write_str("too few free tokens in the KV cache"),
            Self::TooLarge => f.write_str("the job is too large for its KV cache"),
            Self::Isolated => f.write_str("a job that must run alone needs the whole node"),
            Self::NotLoaded => f.write_str("the model is not loaded"),
            Self::Loading => f.write_str("the model is being loaded"),
            Self::Unloading => f.write_str("the model is being unloaded"),
            Self::Unusable { reason } => write!(f, "cannot use the model: {reason}"),
            Self::NoModel => f.write_str("does not have the model"),
            Self::NotAlive { silent_ms } => write!(f, "sent no heartbeat for {:.0} s", *silent_ms as f64 / 1000.0),
            Self::Draining => f.write_str("is stopping"),
            Self::Cordoned => f.write_str("is cordoned"),
            Self::Yielding { program } => write!(f, "yields its GPU to {program}"),
            Self::Refused { reason } => write!(f, "refused the job permanently: {reason}"),
            Self::Backoff { left_ms } => {
                write!(f, "failed to run it, tried again in {:.0} s at the earliest", *left_ms as f64 / 1000.0)
            }
            Self::RefusedForNow => f.write_str("refused work for the model, until its free room changes"),
            Self::Unresponsive => f.write_str("sends heartbeats, but accepts no work"),
        }
    }
}
