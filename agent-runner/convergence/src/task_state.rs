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
        Step::HandedOff => {
            // What is not in the mirror's main is not merged, however good it is.
            if facts.best_effort || facts.unmerged { TaskState::Accepted } else { TaskState::Merged }
        }
        Step::Cancelled { .. } => TaskState::Cancelled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transition::tests::{decided, escalate, every_step, resolved, started};
    use cfq_proto::pr::PrState;

    #[test]
    fn the_ends_of_a_task() {
        let plain = Facts::of(&[started()]);
        let after = |step: &Step| task_state_after(plain, step);
        assert_eq!(after(&decided(1, escalate())), TaskState::Escalated);
        assert_eq!(after(&decided(1, Decision::Fail { reason: "down".into() })), TaskState::Failed);
        assert_eq!(after(&decided(1, Decision::Converged)), TaskState::Running);
        assert_eq!(after(&Step::HandedOff), TaskState::Merged);
        assert_eq!(after(&Step::Cancelled { by: "me".into() }), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Abort)), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Fail { reason: None })), TaskState::Failed);
        assert_eq!(after(&resolved(EscalationAction::AcceptBestEffort)), TaskState::Ready);
        let accepted = plain.after(&resolved(EscalationAction::AcceptBestEffort));
        assert_eq!(task_state_after(accepted, &Step::HandedOff), TaskState::Accepted);
        let closed = plain.after(&Step::PrMoved { to: PrState::Closed, why: "overtaken".into() });
        assert_eq!(task_state_after(closed, &Step::HandedOff), TaskState::Accepted, "no merge, not merged");
    }

    #[test]
    fn no_step_makes_a_state_that_only_the_scheduler_may_give() {
        for step in every_step() {
            let state = task_state_after(Facts::default(), &step);
            assert!(
                !matches!(
                    state,
                    TaskState::Queued | TaskState::Blocked | TaskState::Paused | TaskState::WaitingOnHuman
                ),
                "{}",
                step.kind()
            );
        }
    }
}
