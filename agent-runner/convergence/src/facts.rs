//! What the committed steps say beyond the loop's state: the few facts on which a legal next step depends.
//!
//! The state alone is not enough: "escalated, try again" leads to revising only if there is something to revise, and a
//! cancel is legal until the merge is intended. Facts are folded from all committed steps, oldest first, and need no
//! artifact's content, so whoever holds the step rows can compute them.

use cfq_proto::looping::{ActionKind, EscalationAction, Step};
use cfq_proto::pr::PrState;
use cfq_proto::review::Quarantine;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts {
    /// Some reply of the creator is durable, even one that could not be read.
    pub has_artifact: bool,
    /// A reply is durable that the checks have not seen.
    pub unchecked: bool,
    /// The checks found the last reply dangerous: nothing but an escalation may follow.
    pub dangerous: bool,
    /// A human accepted the best effort.
    pub best_effort: bool,
    /// The merge is recorded as intended: from here the task ends as merged or accepted, not as cancelled.
    pub merge_intended: bool,
    /// The pull request was closed unmerged, and the result is being delivered all the same.
    pub closed: bool,
    pub merged: bool,
    pub delivered: bool,
    /// The hand-off waits for a human.
    pub held: bool,
    /// A human let a held hand-off end as it is.
    pub released: bool,
}

impl Facts {
    /// Of all steps committed so far, oldest first.
    pub fn of<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Self {
        steps.into_iter().fold(Self::default(), Self::after)
    }

    pub fn after(self, step: &Step) -> Self {
        match step {
            Step::Started { .. } => Self::default(),
            Step::Generated { .. } => Self { has_artifact: true, unchecked: true, dangerous: false, ..self },
            Step::Checked { quarantine, .. } => {
                Self { unchecked: false, dangerous: *quarantine == Some(Quarantine::Dangerous), ..self }
            }
            Step::Decided { .. } => Self { dangerous: false, unchecked: false, ..self },
            // What had converged did not become best effort by it.
            Step::Resolved { action, .. } if self.held => {
                Self { held: false, released: matches!(action, EscalationAction::AcceptBestEffort), ..self }
            }
            Step::Resolved { action, .. } => {
                Self { best_effort: matches!(action, EscalationAction::AcceptBestEffort), ..self }
            }
            Step::MergeIntent { .. } => Self { merge_intended: true, ..self },
            // An intent that came to nothing binds nobody.
            Step::PrMoved { to: PrState::Closed, .. } => Self { closed: true, merge_intended: false, ..self },
            Step::Merged { .. } => Self { merged: true, ..self },
            Step::Delivered { .. } => Self { delivered: true, ..self },
            Step::HandOffHeld { .. } => Self { held: true, ..self },
            Step::Reviewed { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::HandedOff { .. }
            | Step::Cancelled { .. } => self,
        }
    }

    /// Whether the hand-off may end: all of it is done, or a human said that it will do.
    pub fn may_end(self) -> bool {
        self.released || self.delivered && (self.merged || self.best_effort)
    }

    /// What a human may answer to a held hand-off. What is merged, or may be, can not be cancelled any more.
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
    use cfq_proto::looping::Decision;

    #[test]
    fn a_dangerous_reply_stays_dangerous_until_it_is_escalated() {
        let facts = Facts::of(&[started(), generated(1), checked(1, Some(Quarantine::Dangerous))]);
        assert!(facts.dangerous && facts.has_artifact && !facts.unchecked);
        assert!(!facts.after(&decided(1, Decision::Converged)).dangerous);
    }

    #[test]
    fn a_held_hand_off_that_is_released_is_no_best_effort() {
        let held = Step::HandOffHeld { why: "conflict".into(), available_actions: vec![] };
        let closed = Step::PrMoved { to: PrState::Closed, why: "conflict".into() };
        let facts = Facts::of(&[started(), generated(1), merge_intent(), closed, held]);
        assert!(facts.held && facts.closed && !facts.merge_intended && !facts.may_end());
        assert_eq!(facts.held_actions(), [ActionKind::AcceptBestEffort, ActionKind::Abort]);
        let released = facts.after(&resolved(EscalationAction::AcceptBestEffort));
        assert!(released.released && released.may_end() && !released.held && !released.best_effort);
        assert_eq!(Facts::of(&[started(), merge_intent()]).held_actions(), [ActionKind::AcceptBestEffort]);
    }

    #[test]
    fn best_effort_is_what_the_last_answer_said() {
        let accepted = Facts::of(&[started(), generated(1), resolved(EscalationAction::AcceptBestEffort)]);
        assert!(accepted.best_effort);
        let retried =
            accepted.after(&resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] }));
        assert!(!retried.best_effort && retried.has_artifact);
    }
}
