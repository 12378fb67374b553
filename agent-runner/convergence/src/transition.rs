//! State machine of the loop (L1): the legal steps in each state. A step that the table does not list for a state is
//! refused.
//!
//! | state      | step                                | next                                         |
//! |------------|-------------------------------------|----------------------------------------------|
//! | idle       | started                             | generating                                   |
//! | generating, revising | generated                 | unchanged                                    |
//! |            | checked                             | reviewing; unchanged if dangerous            |
//! |            | decided: escalate, fail             | escalated, failed                            |
//! | reviewing  | reviewed                            | reviewing                                    |
//! |            | decided                             | converged, revising, escalated, failed       |
//! |            | decided: review_complete            | idle, only of a task that reviews a change   |
//! | converged  | pr_opened, pr_moved, merge_intent, merged, delivered, hand_off_held | converged    |
//! |            | handed_off                          | idle, if delivered and merged (or accepted)  |
//! |            | resolved, while held: accept_best_effort, abort | converged, idle                  |
//! | escalated  | resolved: switch_llm, retry_with_constraints | revising; generating without artifact |
//! |            | resolved: accept_best_effort        | converged                                    |
//! |            | resolved: abort, fail               | idle, failed                                 |
//! | all but idle and failed | cancelled              | idle, unless merge or delivery has begun     |
//!
//! An escalated task can be cancelled, which has the same effect as an abort. No step leads out of failed: a user's
//! acknowledgement of the failure (failed -> idle) is not a step, because it concerns only the user's session; the task
//! stays failed.
//!
//! A task that reviews a change has no creator and no question for a human: of the decisions, only review_complete and
//! fail are legal, and the findings of the checks do not prevent the review.
//!
//! A converged loop never returns to generating or revising. A hand-off that cannot end without a human is held: the
//! state stays converged until a human accepts the result as it is. A hand-off ends without a human only if the result
//! is both merged and delivered.

use cfq_proto::loop_step::{Decision, EscalationAction, LoopState, Step};
use cfq_proto::review::Quarantine;

use crate::facts::Facts;

/// Error: the step is not legal in the loop's current state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a task whose loop is {state} cannot take the step {step}: {reason}")]
pub struct IllegalTransition {
    /// State of the loop before the step.
    pub state: LoopState,
    /// Kind of the refused step.
    pub step: &'static str,
    /// Reason in words.
    pub reason: &'static str,
}

/// Reason for the decisions that a task which only reviews a change cannot take.
const NO_DECISION_OF_A_REVIEW: &str = "the task only reviews a change";

/// Returns the loop's state once `step` is committed. `facts` are the facts after the steps committed before it.
///
/// # Errors
/// [`IllegalTransition`] if the step is not legal in `state` with `facts`.
pub fn transition(state: LoopState, facts: Facts, step: &Step) -> Result<LoopState, IllegalTransition> {
    let refuse = |reason| Err(IllegalTransition { state, step: step.kind(), reason });
    match state {
        LoopState::Idle => match step {
            Step::Started { .. } => Ok(LoopState::Generating),
            Step::Generated { .. }
            | Step::Checked { .. }
            | Step::Reviewed { .. }
            | Step::Decided { .. }
            | Step::Resolved { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. }
            | Step::HandOffHeld { .. }
            | Step::HandedOff { .. }
            | Step::Cancelled { .. } => refuse("no loop is running"),
        },
        LoopState::Generating | LoopState::Revising => match step {
            Step::Generated { .. } => match facts {
                Facts { dangerous: true, .. } => refuse("the last reply is dangerous: only an escalation may follow"),
                Facts { unchecked: true, .. } => refuse("the last reply is not checked yet"),
                _ => Ok(state),
            },
            Step::Checked { quarantine, .. } => match (facts.unchecked, quarantine) {
                (false, _) => refuse("there is no new reply to check"),
                (true, Some(_)) if facts.review_depth.is_some() => refuse("a change under review is not quarantined"),
                (true, Some(Quarantine::Dangerous)) => Ok(state),
                (true, Some(Quarantine::Unparsable | Quarantine::Syntax | Quarantine::FailedChecks) | None) => {
                    Ok(LoopState::Reviewing)
                }
            },
            Step::Decided { decided, .. } => match decided.decision {
                Decision::Escalate { .. } if facts.review_depth.is_some() => refuse(NO_DECISION_OF_A_REVIEW),
                Decision::Escalate { .. } => Ok(LoopState::Escalated),
                Decision::Fail { .. } if facts.dangerous => {
                    refuse("the last reply is dangerous: only an escalation may follow")
                }
                Decision::Fail { .. } => Ok(LoopState::Failed),
                Decision::Converged | Decision::Revise | Decision::ReviewComplete => {
                    refuse("no iteration has been reviewed")
                }
            },
            Step::Cancelled { .. } => Ok(LoopState::Idle),
            Step::Started { .. }
            | Step::Reviewed { .. }
            | Step::Resolved { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. }
            | Step::HandOffHeld { .. }
            | Step::HandedOff { .. } => refuse("the creator has not finished"),
        },
        LoopState::Reviewing => match step {
            Step::Reviewed { .. } => Ok(LoopState::Reviewing),
            Step::Decided { decided, .. } => match (&decided.decision, facts.review_depth) {
                (Decision::ReviewComplete, Some(_)) => Ok(LoopState::Idle),
                (Decision::ReviewComplete, None) => refuse("the task does more than to review a change"),
                (Decision::Fail { .. }, _) => Ok(LoopState::Failed),
                (Decision::Converged | Decision::Revise | Decision::Escalate { .. }, Some(_)) => {
                    refuse(NO_DECISION_OF_A_REVIEW)
                }
                (Decision::Converged, None) => Ok(LoopState::Converged),
                (Decision::Revise, None) => Ok(LoopState::Revising),
                (Decision::Escalate { .. }, None) => Ok(LoopState::Escalated),
            },
            Step::Cancelled { .. } => Ok(LoopState::Idle),
            Step::Started { .. }
            | Step::Generated { .. }
            | Step::Checked { .. }
            | Step::Resolved { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. }
            | Step::HandOffHeld { .. }
            | Step::HandedOff { .. } => refuse("the review has not finished"),
        },
        LoopState::Converged => match step {
            Step::Resolved { action, .. } if facts.hand_off_held => match action {
                EscalationAction::AcceptBestEffort => Ok(LoopState::Converged),
                EscalationAction::Abort if !facts.merge_intended => Ok(LoopState::Idle),
                EscalationAction::Abort => refuse("the merge has begun"),
                EscalationAction::SwitchLlm { .. }
                | EscalationAction::RetryWithConstraints { .. }
                | EscalationAction::Fail { .. } => refuse("the loop is over: only the hand-off remains"),
            },
            Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. }
            | Step::HandOffHeld { .. }
            | Step::HandedOff { .. }
                if facts.hand_off_held =>
            {
                refuse("the hand-off waits for a human")
            }
            Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. } => Ok(LoopState::Converged),
            Step::HandOffHeld { .. } if facts.can_end_hand_off() => refuse("the hand-off can end without a human"),
            Step::HandOffHeld { .. } => Ok(LoopState::Converged),
            Step::HandedOff { .. } if !facts.can_end_hand_off() => {
                refuse("the result is not both merged and delivered, and no human accepted it as it is")
            }
            Step::HandedOff { .. } => Ok(LoopState::Idle),
            Step::Cancelled { .. } if facts.merge_intended => refuse("the merge has begun"),
            Step::Cancelled { .. } if facts.pr_closed && !facts.hand_off_held => refuse("the delivery has begun"),
            Step::Cancelled { .. } => Ok(LoopState::Idle),
            Step::Started { .. }
            | Step::Generated { .. }
            | Step::Checked { .. }
            | Step::Reviewed { .. }
            | Step::Decided { .. }
            | Step::Resolved { .. } => refuse("the loop is over: only the hand-off remains"),
        },
        LoopState::Escalated => match step {
            Step::Resolved { action, .. } => match action {
                EscalationAction::SwitchLlm { .. } | EscalationAction::RetryWithConstraints { .. } => {
                    Ok(if facts.has_artifact { LoopState::Revising } else { LoopState::Generating })
                }
                EscalationAction::AcceptBestEffort if facts.has_artifact => Ok(LoopState::Converged),
                EscalationAction::AcceptBestEffort => refuse("there is no artifact to accept"),
                EscalationAction::Abort => Ok(LoopState::Idle),
                EscalationAction::Fail { .. } => Ok(LoopState::Failed),
            },
            Step::Cancelled { .. } => Ok(LoopState::Idle),
            Step::Started { .. }
            | Step::Generated { .. }
            | Step::Checked { .. }
            | Step::Reviewed { .. }
            | Step::Decided { .. }
            | Step::PrOpened { .. }
            | Step::PrMoved { .. }
            | Step::MergeIntent { .. }
            | Step::Merged { .. }
            | Step::Delivered { .. }
            | Step::HandOffHeld { .. }
            | Step::HandedOff { .. } => refuse("the escalation has not been answered"),
        },
        LoopState::Failed => refuse("the task has failed: submit a new task to retry"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use cfq_proto::blob::{BlobHash, BlobRef, Payload};
    use cfq_proto::ids::JobId;
    use cfq_proto::loop_step::{ActionKind, Decided, EscalationReason};
    use cfq_proto::pr::PrState;
    use cfq_proto::review::ReviewFeedback;

    pub fn started() -> Step {
        Step::Started { base: "b".into(), branch: "worker-1/task-42".into(), review_depth: None }
    }

    pub fn generated(n: u8) -> Step {
        Step::Generated { artifact: Payload::Blob(BlobRef { hash: BlobHash::of(&[n]), size: 1 }) }
    }

    pub fn checked(iteration: u32, quarantine: Option<Quarantine>) -> Step {
        Step::Checked { iteration, findings: vec![], quarantine, ran: vec![] }
    }

    pub fn decided(iteration: u32, decision: Decision) -> Step {
        let decided = Decided { decision, explanation: String::new(), best_iteration: None, best_score: None };
        Step::Decided { iteration, decided }
    }

    pub fn escalate() -> Decision {
        Decision::Escalate { reason: EscalationReason::AgentError, available_actions: vec![ActionKind::Abort] }
    }

    pub fn merge_intent() -> Step {
        let (repository, message) = (String::new(), String::new());
        Step::MergeIntent { old: "o".into(), new: "n".into(), commit_time: 0, repository, message, ran: vec![] }
    }

    pub fn held() -> Step {
        Step::HandOffHeld { reason: "a conflict".into(), available_actions: vec![ActionKind::Abort] }
    }

    pub fn handed_off() -> Step {
        Step::HandedOff { reason: "".into() }
    }

    pub fn resolved(action: EscalationAction) -> Step {
        Step::Resolved { action, by: "human".into() }
    }

    fn fail() -> Decision {
        Decision::Fail { reason: "endpoint down".into() }
    }

    /// Every kind of step, with every variant that the table distinguishes.
    pub fn every_step() -> Vec<Step> {
        let retry = EscalationAction::RetryWithConstraints { additional_constraints: vec![] };
        let switch = EscalationAction::SwitchLlm { target_agent: cfq_proto::task::Agent::Alpha, suggested_model: None };
        let review =
            ReviewFeedback { quality_score: 70.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
        vec![
            started(),
            generated(1),
            checked(1, None),
            checked(1, Some(Quarantine::Unparsable)),
            checked(1, Some(Quarantine::Syntax)),
            checked(1, Some(Quarantine::Dangerous)),
            Step::Reviewed { iteration: 1, review, job: JobId(uuid::Uuid::nil()), model: "m".into() },
            decided(1, Decision::Converged),
            decided(1, Decision::Revise),
            decided(1, escalate()),
            decided(1, fail()),
            resolved(switch),
            resolved(retry),
            resolved(EscalationAction::AcceptBestEffort),
            resolved(EscalationAction::Abort),
            resolved(EscalationAction::Fail { reason: None }),
            Step::PrOpened { head: "h".into(), base: "b".into(), branch: "w".into() },
            Step::PrMoved { to: PrState::QcApproved, reason: "".into() },
            merge_intent(),
            Step::Merged { commit: "n".into() },
            Step::Delivered { branch: "cfq/t42-x".into(), commit: "n".into() },
            held(),
            handed_off(),
            Step::Cancelled { by: "me".into() },
        ]
    }

    /// Expected next state for each step of [`every_step`] (rows) in each state of [`LoopState::ALL`] (columns: idle,
    /// generating, reviewing, revising, converged, escalated, failed). `v` is revising, the other states are given by
    /// their first letter, and `.` means that the step is refused. The facts of the test: an artifact exists; it is
    /// unchecked if the step is a check, and merged and delivered if the step ends the hand-off.
    const TABLE: [&str; 24] = [
        "g . . . . . .", // started
        ". g . v . . .", // generated
        ". r . r . . .", // checked
        ". r . r . . .", // checked, unparsable
        ". r . r . . .", // checked, syntax
        ". g . v . . .", // checked, dangerous
        ". . r . . . .", // reviewed
        ". . c . . . .", // decided: converged
        ". . v . . . .", // decided: revise
        ". e e e . . .", // decided: escalate
        ". f f f . . .", // decided: fail
        ". . . . . v .", // resolved: switch_llm
        ". . . . . v .", // resolved: retry_with_constraints
        ". . . . . c .", // resolved: accept_best_effort
        ". . . . . i .", // resolved: abort
        ". . . . . f .", // resolved: fail
        ". . . . c . .", // pr_opened
        ". . . . c . .", // pr_moved
        ". . . . c . .", // merge_intent
        ". . . . c . .", // merged
        ". . . . c . .", // delivered
        ". . . . c . .", // hand_off_held
        ". . . . i . .", // handed_off
        ". i i i i i .", // cancelled
    ];

    #[test]
    fn each_step_in_each_state_follows_the_table() {
        let steps = every_step();
        assert_eq!(steps.len(), TABLE.len());
        for (step, row) in steps.iter().zip(TABLE) {
            let unchecked = matches!(step, Step::Checked { .. });
            let done = matches!(step, Step::HandedOff { .. });
            let facts = Facts { has_artifact: true, unchecked, merged: done, delivered: done, ..Facts::default() };
            for (state, cell) in LoopState::ALL.into_iter().zip(row.split(' ')) {
                let expected = match cell {
                    "i" => Some(LoopState::Idle),
                    "g" => Some(LoopState::Generating),
                    "r" => Some(LoopState::Reviewing),
                    "v" => Some(LoopState::Revising),
                    "c" => Some(LoopState::Converged),
                    "e" => Some(LoopState::Escalated),
                    "f" => Some(LoopState::Failed),
                    _ => None,
                };
                assert_eq!(transition(state, facts, step).ok(), expected, "{state} + {step:?}");
            }
        }
    }

    #[test]
    fn without_an_artifact_retry_generates_and_accept_is_refused() {
        let retry = resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
        assert_eq!(transition(LoopState::Escalated, Facts::default(), &retry), Ok(LoopState::Generating));
        let accept = resolved(EscalationAction::AcceptBestEffort);
        assert!(transition(LoopState::Escalated, Facts::default(), &accept).is_err());
    }

    #[test]
    fn only_escalation_or_cancel_follows_a_dangerous_reply() {
        for state in [LoopState::Generating, LoopState::Revising] {
            let facts = Facts::of(&[started(), generated(1), checked(1, Some(Quarantine::Dangerous))]);
            let legal: Vec<_> =
                every_step().into_iter().filter(|s| transition(state, facts, s).is_ok()).map(|s| s.kind()).collect();
            assert_eq!(legal, ["decided", "cancelled"]);
            assert!(transition(state, facts, &decided(1, fail())).is_err());
        }
    }

    #[test]
    fn cancel_is_refused_once_merge_or_delivery_has_begun() {
        let cancel = Step::Cancelled { by: "me".into() };
        let converged = |facts| transition(LoopState::Converged, facts, &cancel);
        let refused = converged(Facts { merge_intended: true, ..Facts::default() }).unwrap_err();
        assert!(refused.to_string().contains("merge has begun"), "{refused}");
        let closed = Facts { pr_closed: true, ..Facts::default() };
        let refused = converged(closed).unwrap_err();
        assert!(refused.to_string().contains("delivery has begun"), "{refused}");
        assert_eq!(converged(Facts { hand_off_held: true, ..closed }), Ok(LoopState::Idle), "no delivery is under way");
    }

    #[test]
    fn only_a_merged_and_delivered_result_ends_without_a_human() {
        let end = |facts| transition(LoopState::Converged, facts, &handed_off());
        let none = Facts::default();
        for unfinished in [none, Facts { delivered: true, ..none }, Facts { merged: true, ..none }] {
            assert!(end(unfinished).is_err(), "{unfinished:?}");
            assert_eq!(transition(LoopState::Converged, unfinished, &held()), Ok(LoopState::Converged));
        }
        for done in [
            Facts { merged: true, delivered: true, ..none },
            Facts { accepted_as_is: true, ..none },
            Facts { delivered: true, best_effort: true, ..none },
        ] {
            assert_eq!(end(done), Ok(LoopState::Idle), "{done:?}");
            assert!(transition(LoopState::Converged, done, &held()).is_err(), "{done:?}");
        }
    }

    #[test]
    fn held_hand_off_accepts_only_an_answer_or_a_cancel() {
        let facts = Facts { hand_off_held: true, has_artifact: true, ..Facts::default() };
        let legal = |facts| -> Vec<Step> {
            every_step().into_iter().filter(|s| transition(LoopState::Converged, facts, s).is_ok()).collect()
        };
        let cancelled = Step::Cancelled { by: "me".into() };
        let (accept, abort) = (resolved(EscalationAction::AcceptBestEffort), resolved(EscalationAction::Abort));
        assert_eq!(legal(facts), [accept.clone(), abort, cancelled]);
        assert_eq!(legal(Facts { merge_intended: true, ..facts }), [accept], "a merged result is not cancelled");
    }

    #[test]
    fn each_reply_is_checked_exactly_once() {
        let facts = Facts::of(&[started(), generated(1)]);
        assert!(transition(LoopState::Generating, facts, &generated(2)).is_err());
        let facts = facts.after(&checked(1, None));
        assert!(transition(LoopState::Generating, facts, &checked(1, None)).is_err());
    }
}
