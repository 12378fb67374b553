//! Tasks that wait for a runner slot or hold one, as the decisions about slots compare them.

use cfq_proto::ids::{ApiTokenId, TaskId, TaskNumber};
use cfq_proto::loop_step::LoopState;
use cfq_proto::task::Priority;

/// Position of a task in the order in which runners get tasks; the smallest is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskOrder {
    /// The task's order key, in µs since 1970.
    pub key_us: i64,
    /// Number of the task; breaks ties.
    pub number: TaskNumber,
}

/// A task that waits for a runner slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyTask {
    /// Id of the task.
    pub id: TaskId,
    /// Priority class of the task.
    pub priority: Priority,
    /// Position of the task.
    pub order: TaskOrder,
}

/// A task that holds a runner slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningTask {
    /// Id of the task.
    pub id: TaskId,
    /// Token with which it was submitted.
    pub token: ApiTokenId,
    /// When a task of this token got a slot last, in µs since 1970.
    pub token_granted_us: Option<i64>,
    /// Priority class of the task.
    pub priority: Priority,
    /// Position that the task has once it is ready again.
    pub order: TaskOrder,
    /// State of the task's loop.
    pub loop_state: LoopState,
    /// The waiting task that named this one as its victim.
    pub preempted_by: Option<TaskId>,
}

impl RunningTask {
    /// The task once it is ready again.
    pub(crate) fn as_ready(&self) -> ReadyTask {
        ReadyTask { id: self.id, priority: self.priority, order: self.order }
    }
}
