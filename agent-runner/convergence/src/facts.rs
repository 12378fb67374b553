//! Facts about a task that, together with the loop's state, determine which next steps are legal.
//!
//! The state alone is not enough: an escalation answered with a retry leads to revising only if there is an artifact to
//! revise, and a cancel is legal only until the merge intent is recorded. Facts are folded from all committed steps,
//! oldest first. They do not depend on the content of artifacts, so the scheduler can compute them from the step rows
//! alone.

use cfq_proto::loop_step::{ActionKind, EscalationAction, Step};
use cfq_proto::pr::PrState;
use cfq_proto::review::Quarantine;
use cfq_proto::task::ReviewDepth;

/// Facts folded from the committed steps of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts {
    /// Depth of the review, if the task only reviews a change.
    pub review_depth: Option<ReviewDepth>,
    /// At least one reply of the creator is recorded, even one that could not be parsed.
    pub has_artifact: bool,
    /// The last recorded reply has not been checked.
    pub unchecked: bool,
    /// The checks found the last reply dangerous: only an escalation may follow.
    pub dangerous: bool,
    /// A human accepted the best artifact although the loop did not converge.
    pub best_effort: bool,
    /// The merge intent is recorded: from here on the task ends as merged or accepted, not as cancelled.
    pub merge_intended: bool,
    /// The pull request was closed unmerged, so the result can only be delivered as a branch of the user's repository.
    pub pr_closed: bool,
    /// The result is merged into the mirror's main branch.
    pub merged: bool,
    /// The result is a branch in the user's repository.
    pub delivered: bool,
    /// The hand-off waits for a human.
    pub hand_off_held: bool,
    /// A human accepted the result of a held hand-off as it is.
    pub accepted_as_is: bool,
}

impl Facts {
    /// Returns the facts after `steps`, which must be all committed steps of the task, oldest first.
    pub fn of<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Self {
        steps.into_iter().fold(Self::default(), Self::after)
    }

    /// Returns the facts once `step` is also committed.
    pub fn after(self, step: &Step) -> Self {
        match step {
            Step::Started { review_depth, .. } => Self { review_depth: *review_depth, ..Self::default() },
            Step::Generated { .. } => Self { has_artifact: true, unchecked: true, dangerous: false, ..self },
            Step::Checked { quarantine, .. } => {
                Self { unchecked: false, dangerous: *quarantine == Some(Quarantine::Dangerous), ..self }
            }
            Step::Decided { .. } => Self { dangerous: false, unchecked: false, ..self },
            // The loop had converged: accepting its held hand-off does not make the result a best effort.
            Step::Resolved { action, .. } if self.hand_off_held => Self {
                hand_off_held: false,
                accepted_as_is: matches!(action, EscalationAction::AcceptBestEffort),
                ..self
            },
            Step::Resolved { action, .. } => {
                Self { best_effort: matches!(action, EscalationAction::AcceptBestEffort), ..self }
            }
            Step::MergeIntent { .. } => Self { merge_intended: true, ..self },
            // The merge intent was not carried out, so it no longer prevents a cancel.
            Step::PrMoved { to: PrState::Closed, .. } => Self { pr_closed: true, merge_intended: false, ..self },
            Step::Merged { .. } => Self { merged: true, ..self },
            Step::Delivered { .. } => Self { delivered: true, ..self },
            Step::HandOffHeld { .. } => Self { hand_off_held: true, ..self },
            Step::Reviewed { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::HandedOff { .. }
            | Step::Cancelled { .. } => self,
        }
    }

    /// Whether the hand-off can end: a human accepted the result of the held hand-off as it is, or the result is
    /// delivered and is either merged or was accepted by a human as a best effort.
    pub fn can_end_hand_off(self) -> bool {
        self.accepted_as_is || self.delivered && (self.merged || self.best_effort)
    }

    /// Returns the actions offered for a held hand-off. Once the merge intent is recorded, the result may already be
    /// merged, so an abort is no longer offered.
    pub fn held_actions(self) -> Vec<ActionKind> {
        match self.merge_intended {
            true => vec![ActionKind::AcceptBestEffort],
            false => vec![ActionKind::AcceptBestEffort, ActionKind::Abort],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transition::tests::{checked, decided, generated, merge_intent, resolved, started};
    use cfq_proto::loop_step::Decision;

    #[test]
    fn dangerous_reply_stays_dangerous_until_escalated() {
        let facts = Facts::of(&[started(), generated(1), checked(1, Some(Quarantine::Dangerous))]);
        assert!(facts.dangerous && facts.has_artifact && !facts.unchecked);
        assert!(!facts.after(&decided(1, Decision::Converged)).dangerous);
    }

    #[test]
    fn accepting_a_held_hand_off_does_not_make_it_best_effort() {
        let held = Step::HandOffHeld { reason: "conflict".into(), available_actions: vec![] };
        let closed = Step::PrMoved { to: PrState::Closed, reason: "conflict".into() };
        let facts = Facts::of(&[started(), generated(1), merge_intent(), closed, held]);
        assert!(facts.hand_off_held && facts.pr_closed && !facts.merge_intended && !facts.can_end_hand_off());
        assert_eq!(facts.held_actions(), [ActionKind::AcceptBestEffort, ActionKind::Abort]);
        let accepted = facts.after(&resolved(EscalationAction::AcceptBestEffort));
        assert!(accepted.accepted_as_is && accepted.can_end_hand_off());
        assert!(!accepted.hand_off_held && !accepted.best_effort);
        assert_eq!(Facts::of(&[started(), merge_intent()]).held_actions(), [ActionKind::AcceptBestEffort]);
    }

    #[test]
    fn best_effort_follows_the_last_answer() {
        let accepted = Facts::of(&[started(), generated(1), resolved(EscalationAction::AcceptBestEffort)]);
        assert!(accepted.best_effort);
        let retried =
            accepted.after(&resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] }));
        assert!(!retried.best_effort && retried.has_artifact);
    }
}
