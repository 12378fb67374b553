//! Legal transitions between task states (Q15). The store checks them before every write, so a state machine bug in any
//! component leads to a refused write and never restarts a task that has ended.

use cfq_proto::task::TaskState;

/// Returns whether a task may change from `from` to `to`. Staying in a state is not a transition.
///
/// `Merged`, `Accepted`, `Reviewed`, `Failed` and `Cancelled` are terminal: a retry creates a new task. An escalated task
/// holds no lease, so any human decision that needs more work leads to `Ready`. A ready task escalates when its deadline
/// passes while no runner holds it.
pub fn task_transition_allowed(from: TaskState, to: TaskState) -> bool {
    use TaskState::{
        Accepted, Blocked, Cancelled, Escalated, Failed, Merged, Paused, Queued, Ready, Reviewed, Running,
        WaitingOnHuman,
    };
    match from {
        Queued => matches!(to, Blocked | Ready | Paused | Failed | Cancelled),
        Blocked => matches!(to, Ready | Paused | Failed | Cancelled),
        Ready => matches!(to, Running | Paused | Escalated | Failed | Cancelled),
        Running => {
            matches!(
                to,
                Ready | WaitingOnHuman | Paused | Escalated | Merged | Accepted | Reviewed | Failed | Cancelled
            )
        }
        WaitingOnHuman => matches!(to, Ready | Paused | Escalated | Failed | Cancelled),
        Paused => matches!(to, Queued | Blocked | Ready | WaitingOnHuman | Failed | Cancelled),
        Escalated => matches!(to, Ready | Failed | Cancelled),
        Merged | Accepted | Reviewed | Failed | Cancelled => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The complete table: rows are `from`, columns `to`, both in the order of `TaskState::ALL`
    /// (queued, blocked, ready, running, waiting_on_human, paused, escalated, merged, accepted, reviewed,
    /// failed, cancelled).
    const TABLE: [&str; 12] = [
        ". B R . . P . . . . F C", // queued
        ". . R . . P . . . . F C", // blocked
        ". . . X . P E . . . F C", // ready
        ". . R . W P E M A V F C", // running
        ". . R . . P E . . . F C", // waiting_on_human
        "Q B R . W . . . . . F C", // paused
        ". . R . . . . . . . F C", // escalated
        ". . . . . . . . . . . .", // merged
        ". . . . . . . . . . . .", // accepted
        ". . . . . . . . . . . .", // reviewed
        ". . . . . . . . . . . .", // failed
        ". . . . . . . . . . . .", // cancelled
    ];

    #[test]
    fn every_transition_matches_the_table() {
        for (from, row) in TaskState::ALL.into_iter().zip(TABLE) {
            let cells: Vec<&str> = row.split(' ').collect();
            assert_eq!(cells.len(), TaskState::ALL.len());
            for (to, cell) in TaskState::ALL.into_iter().zip(cells) {
                assert_eq!(task_transition_allowed(from, to), cell != ".", "{from} -> {to}");
            }
        }
    }

    #[test]
    fn terminal_states_never_change() {
        for from in TaskState::ALL.into_iter().filter(|s| s.is_terminal()) {
            for to in TaskState::ALL {
                assert!(!task_transition_allowed(from, to), "{from} -> {to}");
            }
        }
    }
}
