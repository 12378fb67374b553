//! What a committed step makes of the task itself (Q15), apart from the loop's state.

use cfq_proto::looping::{Decision, EscalationAction, Step};
use cfq_proto::task::TaskState;

use crate::facts::Facts;

/// The task's state once `step` is committed on top of the steps that gave `facts`. The step must be legal there
/// ([`crate::transition()`]). `Ready` after an answered escalation: its lease ended with the escalation, so a runner
/// has to take it again.
pub fn task_state_after(facts: Facts, step: &Step) -> TaskState {
    match step {
        Step::Started { .. }
        | Step::Generated { .. }
        | Step::Checked { .. }
        | Step::Reviewed { .. }
        | Step::PrOpened { .. }
        | Step::PrMoved { .. }
        | Step::MergeIntent { .. }
        | Step::Merged { .. }
        | Step::Delivered { .. } => TaskState::Running,
        Step::Decided { decided, .. } => match decided.decision {
            Decision::Converged | Decision::Revise => TaskState::Running,
            Decision::Escalate { .. } => TaskState::Escalated,
            Decision::Fail { .. } => TaskState::Failed,
        },
        Step::Resolved { action, .. } => match action {
            EscalationAction::SwitchLlm { .. }
            | EscalationAction::RetryWithConstraints { .. }
            | EscalationAction::AcceptBestEffort => TaskState::Ready,
            EscalationAction::Abort => TaskState::Cancelled,
            EscalationAction::Fail { .. } => TaskState::Failed,
        },
        Step::HandOffHeld { .. } => TaskState::WaitingOnHuman,
        Step::HandedOff { .. } => {
            if facts.merged && facts.delivered && !facts.best_effort {
                TaskState::Merged
            } else {
                TaskState::Accepted
            }
        }
        Step::Cancelled { .. } => TaskState::Cancelled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transition::tests::{decided, escalate, every_step, handed_off, held, resolved, started};

    #[test]
    fn the_ends_of_a_task() {
        let plain = Facts::of(&[started()]);
        let after = |step: &Step| task_state_after(plain, step);
        assert_eq!(after(&decided(1, escalate())), TaskState::Escalated);
        assert_eq!(after(&decided(1, Decision::Fail { reason: "down".into() })), TaskState::Failed);
        assert_eq!(after(&decided(1, Decision::Converged)), TaskState::Running);
        assert_eq!(after(&held()), TaskState::WaitingOnHuman);
        assert_eq!(after(&Step::Cancelled { by: "me".into() }), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Abort)), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Fail { reason: None })), TaskState::Failed);
        assert_eq!(after(&resolved(EscalationAction::AcceptBestEffort)), TaskState::Ready);
    }

    #[test]
    fn merged_is_only_what_was_merged_and_delivered() {
        let end = |facts: Facts| task_state_after(facts, &handed_off());
        let merged = Facts { merged: true, delivered: true, ..Facts::default() };
        assert_eq!(end(merged), TaskState::Merged);
        let released = Facts { released: true, ..Facts::default() };
        assert_eq!(end(Facts { released: true, ..merged }), TaskState::Merged, "in the end it could be delivered");
        for facts in [
            Facts { best_effort: true, ..merged },
            Facts { delivered: true, ..released },
            Facts { merged: true, ..released },
        ] {
            assert_eq!(end(facts), TaskState::Accepted, "{facts:?}");
        }
    }

    #[test]
    fn no_step_makes_a_state_that_only_the_scheduler_may_give() {
        for step in every_step() {
            let state = task_state_after(Facts::default(), &step);
            assert!(!matches!(state, TaskState::Queued | TaskState::Blocked | TaskState::Paused), "{}", step.kind());
        }
    }
}
