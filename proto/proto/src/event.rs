//! Append-only log of every task. Each entry is an [`Event`]; the feed delivers all of them, in order, without gaps.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{JobId, NodeId, QuestionId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobState, Usage};
use crate::loop_step::{LoopState, Step};
use crate::model::ModelId;
use crate::task::{Agent, TaskState};

/// What happened.
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
        /// Why, as text.
        reason: String,
    },
    /// A step of the loop was committed. Large artifacts are shortened here; the artifact endpoint has the whole.
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
        /// The job.
        job: JobId,
        /// Role of the call.
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
        /// Why it was placed there, or why it was requeued.
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
        /// The question.
        question: QuestionId,
        /// Its text.
        text: String,
    },
    /// A human answered a question.
    QuestionAnswered {
        /// The question.
        question: QuestionId,
        /// The answer.
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
        /// What happened, as text.
        what: String,
    },
}

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Position in the global feed; increases, with gaps.
    pub id: i64,
    /// Task of the event.
    pub task: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// Position among the task's events, from 1, without gaps.
    pub task_seq: i64,
    /// Seconds since 1970 with fractions, on the database's clock.
    pub at: f64,
    /// What happened.
    pub body: EventBody,
}
