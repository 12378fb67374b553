//! State of the task (Q15) after a committed step, as distinct from the state of its loop.

use cfq_proto::loop_step::{Decision, EscalationAction, Step};
use cfq_proto::task::TaskState;

use crate::facts::Facts;

/// Returns the state of the task once `step` is committed. `facts` are the facts after the steps before it; the step
/// must be legal after those steps ([`crate::transition()`]). If a human answers an escalation with a retry or by
/// accepting the best artifact, the state is `Ready`: the task's lease ended with the escalation, so a runner must
/// lease the task again.
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
            Decision::ReviewComplete => TaskState::Reviewed,
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
    fn each_ending_step_gives_its_task_state() {
        let plain = Facts::of(&[started()]);
        let after = |step: &Step| task_state_after(plain, step);
        assert_eq!(after(&decided(1, escalate())), TaskState::Escalated);
        assert_eq!(after(&decided(1, Decision::Fail { reason: "down".into() })), TaskState::Failed);
        assert_eq!(after(&decided(1, Decision::Converged)), TaskState::Running);
        assert_eq!(after(&decided(1, Decision::ReviewComplete)), TaskState::Reviewed);
        assert_eq!(after(&held()), TaskState::WaitingOnHuman);
        assert_eq!(after(&Step::Cancelled { by: "me".into() }), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Abort)), TaskState::Cancelled);
        assert_eq!(after(&resolved(EscalationAction::Fail { reason: None })), TaskState::Failed);
        assert_eq!(after(&resolved(EscalationAction::AcceptBestEffort)), TaskState::Ready);
    }

    #[test]
    fn only_a_merged_and_delivered_result_is_merged() {
        let end = |facts: Facts| task_state_after(facts, &handed_off());
        let merged = Facts { merged: true, delivered: true, ..Facts::default() };
        assert_eq!(end(merged), TaskState::Merged);
        let accepted = Facts { accepted_as_is: true, ..Facts::default() };
        assert_eq!(end(Facts { accepted_as_is: true, ..merged }), TaskState::Merged, "the delivery succeeded later");
        for facts in [
            Facts { best_effort: true, ..merged },
            Facts { delivered: true, ..accepted },
            Facts { merged: true, ..accepted },
        ] {
            assert_eq!(end(facts), TaskState::Accepted, "{facts:?}");
        }
    }

    #[test]
    fn no_step_leads_to_a_state_only_the_scheduler_sets() {
        for step in every_step() {
            let state = task_state_after(Facts::default(), &step);
            assert!(!matches!(state, TaskState::Queued | TaskState::Blocked | TaskState::Paused), "{}", step.kind());
        }
    }
}
