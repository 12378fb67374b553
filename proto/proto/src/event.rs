//! Event log. Every task has an append-only log; each entry is an [`Event`]. The event feed delivers all entries in
//! order, without gaps.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{JobId, NodeId, QuestionId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobState, Usage};
use crate::loop_step::{LoopState, Step};
use crate::model::ModelId;
use crate::task::{Agent, TaskState};

/// Type and data of an event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    /// The task was created.
    TaskSubmitted,
    /// The task changed its state.
    TaskStateChanged {
        /// State before.
        from: TaskState,
        /// State after.
        to: TaskState,
        /// Reason for the change, as text.
        reason: String,
    },
    /// A step of the loop was committed. Large artifacts are shortened here; the artifact endpoint returns them whole.
    StepCommitted {
        /// Index of the step, from 0.
        seq: i32,
        /// The step.
        step: Step,
        /// State of the loop after the step.
        loop_state: LoopState,
    },
    /// A job changed its state.
    JobChanged {
        /// Id of the job.
        job: JobId,
        /// Role that makes the call.
        role: Agent,
        /// Model of the call.
        model: ModelId,
        /// Number of the attempt, from 1; 0 before the first placement.
        attempt: i32,
        /// State after the change.
        state: JobState,
        /// Node of the attempt, if it is placed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<NodeId>,
        /// Why the job was placed on this node, or why it was requeued.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
        /// Failure of the attempt, if it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<JobFailure>,
        /// Token counts and times of the attempt, if it is done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The task needs an answer from a human.
    QuestionOpened {
        /// Id of the question.
        question: QuestionId,
        /// Text of the question.
        text: String,
    },
    /// A human answered a question.
    QuestionAnswered {
        /// Id of the question.
        question: QuestionId,
        /// Text of the answer.
        answer: String,
        /// The client that answered.
        by: String,
    },
    /// A runner was granted the task or lost it.
    RunnerChanged {
        /// Name of the runner.
        runner: String,
        /// Number of the runner's attempt, from 1.
        attempt: i32,
        /// Change of the runner's lease of the task, as text.
        what: String,
    },
}

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Position in the event feed of all tasks; increases, with gaps.
    pub id: i64,
    /// Task of the event.
    pub task: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// Position among the task's events, from 1, without gaps.
    pub task_seq: i64,
    /// Time of the event, in seconds since 1970 with fractions, on the database's clock.
    pub at: f64,
    /// Type and data of the event.
    pub body: EventBody,
}
