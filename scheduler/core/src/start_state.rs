//! State of a task that no runner has had yet, computed from what it waits for. A submit, the end of a predecessor and a
//! resume use the same function, so that the result does not depend on the order in which these happen.

use cfq_proto::ids::TaskNumber;
use cfq_proto::task::TaskState;

/// Maximum number of tasks that a reason names.
const MAX_NAMED: usize = 5;

/// A predecessor of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Predecessor {
    /// Number of the predecessor.
    pub number: TaskNumber,
    /// State of the predecessor.
    pub state: TaskState,
}

/// State in which a task waits, with the reason for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartState {
    /// The time of the task has not come.
    Queued,
    /// Predecessors have not ended, or have failed.
    Blocked {
        /// Names the predecessors.
        reason: String,
        /// True if a predecessor has failed or was cancelled, so that the task cannot start without a user.
        needs_user: bool,
    },
    /// The task may start.
    Ready,
}

impl StartState {
    /// The task's state.
    pub fn state(&self) -> TaskState {
        match self {
            Self::Queued => TaskState::Queued,
            Self::Blocked { .. } => TaskState::Blocked,
            Self::Ready => TaskState::Ready,
        }
    }

    /// The predecessors because of which the task may not start; empty if there are none.
    pub fn reason(&self) -> &str {
        match self {
            Self::Blocked { reason, .. } => reason,
            Self::Queued | Self::Ready => "",
        }
    }
}

/// Computes the state in which a task waits: it is queued until its time has come (`may_run`), then blocked until all
/// predecessors have ended as merged, accepted or reviewed, and then ready.
pub fn start_state(predecessors: &[Predecessor], may_run: bool) -> StartState {
    if !may_run {
        return StartState::Queued;
    }
    let mut failed: Vec<Predecessor> = Vec::new();
    let mut open: Vec<Predecessor> = Vec::new();
    for predecessor in predecessors {
        match predecessor.state {
            TaskState::Merged | TaskState::Accepted | TaskState::Reviewed => {}
            TaskState::Failed | TaskState::Cancelled => failed.push(*predecessor),
            TaskState::Queued
            | TaskState::Blocked
            | TaskState::Ready
            | TaskState::Running
            | TaskState::WaitingOnHuman
            | TaskState::Paused
            | TaskState::Escalated => open.push(*predecessor),
        }
    }
    if let Some(first) = failed.first() {
        let each: Vec<String> =
            failed.iter().take(MAX_NAMED).map(|task| format!("{} is {}", task.number, task.state)).collect();
        let reason = format!(
            "blocked because {}{}: run `cfq retry {}`, or cancel this task",
            each.join(", "),
            and_more(failed.len()),
            first.number
        );
        return StartState::Blocked { reason, needs_user: true };
    }
    if open.is_empty() {
        return StartState::Ready;
    }
    let each: Vec<String> = open.iter().take(MAX_NAMED).map(|task| task.number.to_string()).collect();
    StartState::Blocked { reason: format!("waits for {}{}", each.join(", "), and_more(open.len())), needs_user: false }
}

fn and_more(count: usize) -> String {
    match count.saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tasks(states: &[TaskState]) -> Vec<Predecessor> {
        states.iter().zip(1..).map(|(state, n)| Predecessor { number: TaskNumber(n), state: *state }).collect()
    }

    #[test]
    fn task_waits_for_open_predecessors_and_names_failed_ones_first() {
        use TaskState::{Accepted, Cancelled, Failed, Merged, Ready, Running};
        assert_eq!(start_state(&[], true), StartState::Ready);
        assert_eq!(start_state(&tasks(&[Merged, Accepted]), true), StartState::Ready);
        assert_eq!(start_state(&tasks(&[Merged, Running, Ready]), true).reason(), "waits for t2, t3");
        let failed = start_state(&tasks(&[Running, Failed, Cancelled]), true);
        assert_eq!(
            failed.reason(),
            "blocked because t2 is failed, t3 is cancelled: run `cfq retry t2`, or cancel this task"
        );
        assert!(matches!(failed, StartState::Blocked { needs_user: true, .. }));
        assert_eq!(start_state(&tasks(&[Ready; 7]), true).reason(), "waits for t1, t2, t3, t4, t5 and 2 more");
    }

    proptest! {
        #[test]
        fn task_is_ready_only_if_all_predecessors_ended_well(
            states in proptest::collection::vec(proptest::sample::select(TaskState::ALL.to_vec()), 0..6),
            may_run in any::<bool>(),
        ) {
            let all_done = states.iter().all(|state| matches!(state, TaskState::Merged | TaskState::Accepted | TaskState::Reviewed));
            let start = start_state(&tasks(&states), may_run);
            prop_assert_eq!(start.state() == TaskState::Ready, all_done && may_run);
            prop_assert_eq!(start.state() == TaskState::Queued, !may_run);
            prop_assert_eq!(start.reason().is_empty(), all_done || !may_run);
        }
    }
}
