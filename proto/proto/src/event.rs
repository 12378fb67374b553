//! The append-only record. One line of it is an [`Event`]; the feed delivers all of them, in order, skipping nothing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{JobId, NodeId, QuestionId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobState, Usage};
use crate::looping::{LoopState, Step};
use crate::model::ModelId;
use crate::task::{Agent, TaskState};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    TaskSubmitted,
    TaskStateChanged {
        from: TaskState,
        to: TaskState,
        reason: String,
    },
    /// A step of the loop was committed. Large artifacts are shortened here; ask for the artifact.
    StepCommitted {
        seq: i32,
        step: Step,
        loop_state: LoopState,
    },
    JobChanged {
        job: JobId,
        role: Agent,
        model: ModelId,
        attempt: i32,
        state: JobState,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<NodeId>,
        /// Why it was placed there, or why it went back to the queue.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<JobFailure>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    QuestionOpened {
        question: QuestionId,
        text: String,
    },
    QuestionAnswered {
        question: QuestionId,
        answer: String,
        by: String,
    },
    /// A runner took the task, or lost it.
    RunnerChanged {
        runner: String,
        attempt: i32,
        what: String,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Position in the global feed; grows, with gaps.
    pub id: i64,
    pub task: TaskId,
    pub number: TaskNumber,
    /// Position among the task's events, from 1, without gaps.
    pub task_seq: i64,
    /// Seconds since 1970 with fractions, on the database's clock.
    pub at: f64,
    pub body: EventBody,
}
