//! Event log. Every task has an append-only log; each entry is an [`Event`]. The event feed delivers the entries of
//! all tasks in order and skips none.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::ids::{JobId, NodeId, QuestionId, TaskId, TaskNumber};
use crate::job::{JobFailure, JobRole, JobState, Usage};
use crate::loop_step::{LoopState, Step};
use crate::model::ModelId;
use crate::task::{Priority, TaskState};

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
        role: JobRole,
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
    /// The task's priority changed.
    PriorityChanged {
        /// Priority before.
        from: Priority,
        /// Priority after; the same for a bottleneck that already had the highest one.
        to: Priority,
        /// Reason for the change, as text.
        reason: String,
    },
    /// A runner was granted the task or lost it.
    RunnerChanged {
        /// Name of the runner.
        runner: String,
        /// Number of the runner's attempt, from 1.
        attempt: i32,
        /// Change of the runner's lease of the task. In cfq 0.1 this field was a text named `what`.
        #[serde(alias = "what")]
        change: RunnerChange,
    },
    /// A runner does something for the task that is no model call and takes longer than about two seconds, for example
    /// it runs a check of the project. It lasts until the next event of the task other than a changed priority.
    RunnerActivity {
        /// Name of the runner.
        runner: String,
        /// What it does, as text.
        activity: String,
    },
}

/// Change of a runner's lease of a task. It also loads from the text that cfq 0.1 stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerChange {
    /// The runner was granted the task.
    Granted,
    /// The runner lost the task.
    Lost {
        /// Reason for the loss, as text.
        reason: String,
    },
}

/// Text of [`RunnerChange::Lost`] before the reason.
const LOST: &str = "lost: ";

impl fmt::Display for RunnerChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted => f.write_str("took the task"),
            Self::Lost { reason } => write!(f, "{LOST}{reason}"),
        }
    }
}

/// Stored forms of a [`RunnerChange`].
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredRunnerChange {
    Current(CurrentRunnerChange),
    /// Text of cfq 0.1.
    Text(String),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum CurrentRunnerChange {
    Granted,
    Lost { reason: String },
}

impl<'de> Deserialize<'de> for RunnerChange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match StoredRunnerChange::deserialize(deserializer)? {
            StoredRunnerChange::Current(CurrentRunnerChange::Granted) => Self::Granted,
            StoredRunnerChange::Current(CurrentRunnerChange::Lost { reason }) => Self::Lost { reason },
            StoredRunnerChange::Text(text) => match text.strip_prefix(LOST) {
                Some(reason) => Self::Lost { reason: reason.to_owned() },
                None => Self::Granted,
            },
        })
    }
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
