//! Types for the control of one or many tasks: cancel, pause, resume, answer, retry, change of the
//! priority.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{QuestionId, TaskId, TaskNumber};
use crate::label::Label;
use crate::loop_step::EscalationAction;
use crate::task::{Priority, TaskState};

/// Maximum number of tasks that one [`BulkRequest`] names.
pub const MAX_TASKS_PER_BULK_REQUEST: usize = 100;

/// Body of `POST /tasks/{key}/cancel`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CancelRequest {
    /// Reason for the cancellation, as text; may be empty.
    #[serde(default)]
    pub reason: String,
}

/// Body of `POST /tasks/{key}/resolve`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResolveRequest {
    /// The answer.
    pub action: EscalationAction,
    /// The question that this answers. With it, the request can be repeated: an answer that was recorded before is not
    /// recorded again, and never answers a later question. Without it, the answer is for the open question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub question: Option<QuestionId>,
}

impl From<EscalationAction> for ResolveRequest {
    /// An answer to whichever question is open.
    fn from(action: EscalationAction) -> Self {
        Self { action, question: None }
    }
}

/// Reply to `POST /tasks/{key}/cancel`, `pause`, `resume` and `resolve`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StateReply {
    /// Id of the task.
    #[serde(rename = "task", alias = "id")]
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// State after the request.
    pub state: TaskState,
    /// What will still happen because of the request, as text; empty if it has taken effect.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// Body of `POST /tasks/{key}/pause`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct PauseRequest {
    /// Reason for the pause, as text; may be empty.
    #[serde(default)]
    pub reason: String,
}

/// Body of `PATCH /tasks/{key}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskPatch {
    /// New scheduling priority.
    pub priority: Priority,
}

/// Change of a task by a user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TaskAction {
    /// Cancel the task.
    Cancel {
        /// Reason, as text; may be empty.
        #[serde(default)]
        reason: String,
    },
    /// Pause the task, at once or after the running step.
    Pause {
        /// Reason, as text; may be empty.
        #[serde(default)]
        reason: String,
    },
    /// Resume the paused task.
    Resume,
    /// Create a new task with the specification of the ended task.
    Retry,
    /// Change the task's priority.
    SetPriority {
        /// The new priority.
        priority: Priority,
    },
}

impl TaskAction {
    /// The states of the tasks that the action applies to.
    pub fn states(&self) -> Vec<TaskState> {
        let open = |state: &TaskState| !state.is_terminal();
        match self {
            Self::Cancel { .. } | Self::SetPriority { .. } => TaskState::ALL.into_iter().filter(open).collect(),
            Self::Pause { .. } => {
                let pausable =
                    |state: &TaskState| open(state) && !matches!(state, TaskState::Paused | TaskState::Escalated);
                TaskState::ALL.into_iter().filter(pausable).collect()
            }
            Self::Resume => vec![TaskState::Paused],
            Self::Retry => vec![TaskState::Failed, TaskState::Cancelled],
        }
    }
}

/// Body of `POST /tasks/actions`. It names tasks, or selects them by state and labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BulkRequest {
    /// The change.
    pub action: TaskAction,
    /// Numbers or ids of the tasks; at most [`MAX_TASKS_PER_BULK_REQUEST`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<String>,
    /// Selects the tasks in this state, instead of named ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<TaskState>,
    /// Selects only tasks that have all these labels; without `state`, those that the action applies to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<Label>,
    /// Selects all tasks that the action applies to, instead of named ones.
    #[serde(default, skip_serializing_if = "is_false")]
    pub all: bool,
    /// Whether nothing is changed, and the reply says what would be.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dry_run: bool,
    /// Position after which a selection continues: [`BulkReply::next`] of the reply before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<BulkPosition>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Position in a selection of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BulkPosition {
    /// Number of the last task that was processed.
    pub task: TaskNumber,
    /// Number of the last task that existed when the selection began; later tasks are not selected.
    pub until: TaskNumber,
}

/// Reply to [`BulkRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BulkReply {
    /// What happened, in the order of the request or of the tasks' numbers. Named tasks after the last of these were
    /// not processed yet: send them again.
    pub results: Vec<BulkResult>,
    /// Where a selection continues; `None` if it is complete.
    pub next: Option<BulkPosition>,
}

/// What happened to one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BulkResult {
    /// Id of the task; `None` if there is no such task.
    #[serde(rename = "task", alias = "id")]
    pub id: Option<TaskId>,
    /// Number of the task; `None` if there is no such task.
    pub number: Option<TaskNumber>,
    /// State of the task after the action; `None` if it is not known.
    pub state: Option<TaskState>,
    /// Number of the task that retries this one, after [`TaskAction::Retry`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retried_by: Option<TaskNumber>,
    /// The kind of result.
    pub outcome: BulkOutcome,
    /// The result as text, for users.
    pub message: String,
}

/// Kind of the result for one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BulkOutcome {
    /// The task was changed.
    Done,
    /// The task would be changed; `state` is the state that it would have.
    WouldChange,
    /// The task is as requested already.
    Unchanged,
    /// The task does not exist, or its state does not allow the action.
    Refused,
    /// The server could not process the task; the other tasks are not affected.
    Failed,
}
