//! Where a task stands and what comes next: a function of the committed steps and the limits, nothing else. Whoever takes
//! a task over asks it, and goes on exactly there.

use cfq_convergence::{History, Limits, MergeIntent};
use cfq_proto::looping::LoopState;
use cfq_proto::pr::PrState;

#[derive(Debug, Clone, PartialEq)]
pub enum NextAction {
    /// Record base and branch.
    Start,
    /// Ask the creator, and record what it made.
    Create,
    /// Run the engine's own checks on the last artifact.
    Check,
    /// Ask the critic about the last artifact.
    Review,
    /// Let `cfq-convergence` decide about the last artifact.
    Decide,
    /// The working time is used up before the next model call.
    TimeIsUp,
    OpenPr,
    MovePr {
        to: PrState,
        why: String,
    },
    /// Look what merging would do, and record it as an intent.
    PlanMerge,
    /// Carry out the recorded intent.
    Merge(MergeIntent),
    /// Put the result on a branch of the user's repository.
    Deliver,
    /// It is delivered, but a human must say that it will do unmerged.
    Hold {
        why: String,
    },
    HandOff,
    /// Nothing for a runner: it waits for a human, or it is over.
    Rest,
}

/// A wall-clock deadline is not asked here: the scheduler ends the task by its own clock, and this one decides nothing.
pub fn next_action(history: &History, limits: &Limits) -> NextAction {
    match history.state {
        LoopState::Idle if history.next_seq == 0 => NextAction::Start,
        LoopState::Idle | LoopState::Escalated | LoopState::Failed => NextAction::Rest,
        LoopState::Generating | LoopState::Revising => {
            if history.facts.unchecked {
                NextAction::Check
            } else if history.facts.dangerous {
                NextAction::Decide
            } else {
                within_limits(history, limits).unwrap_or(NextAction::Create)
            }
        }
        LoopState::Reviewing => {
            let to_review = history.last().is_some_and(|i| i.quarantine.is_none() && i.review.is_none());
            if to_review { within_limits(history, limits).unwrap_or(NextAction::Review) } else { NextAction::Decide }
        }
        LoopState::Converged => hand_off(history),
    }
}

/// What comes instead of another model call, if there is no time for one.
fn within_limits(history: &History, limits: &Limits) -> Option<NextAction> {
    let worked = history.active_ms.saturating_sub(history.window_active_ms);
    (worked >= limits.timeout_ms).then_some(NextAction::TimeIsUp)
}

/// From converged to handed off. The loop's own review is the quality control for now, and the coordinator's rule lets pass
/// what converged or what a human accepted.
fn hand_off(history: &History) -> NextAction {
    let hand_off = &history.hand_off;
    if hand_off.done || history.facts.held {
        return NextAction::Rest;
    }
    if let Some((branch, _)) = &hand_off.delivered {
        if history.facts.may_end() {
            return NextAction::HandOff;
        }
        let closed = hand_off.closed.as_deref().unwrap_or("its pull request is not merged");
        return NextAction::Hold { why: format!("delivered as branch {branch}, not merged: {closed}") };
    }
    let moved = |to, why: &str| NextAction::MovePr { to, why: why.to_owned() };
    let accepted = history.facts.best_effort;
    match hand_off.pr_state {
        None => NextAction::OpenPr,
        Some(PrState::PendingQc) => {
            let score = history.result().and_then(|i| i.score());
            let why = match (accepted, score) {
                (true, Some(score)) => format!("accepted by a human with a score of {score:.0}"),
                (true, None) => "accepted by a human, unreviewed".to_owned(),
                (false, Some(score)) => format!("the critic's score is {score:.0}, no critical defect is open"),
                (false, None) => "the loop converged".to_owned(),
            };
            NextAction::MovePr { to: PrState::QcApproved, why }
        }
        Some(PrState::QcRejected) => moved(PrState::PendingQc, "resubmitted"),
        Some(PrState::QcApproved) => moved(PrState::PendingCoordinator, "quality control passed"),
        Some(PrState::PendingCoordinator) if accepted => moved(PrState::Approved, "a human accepted the best effort"),
        Some(PrState::PendingCoordinator) => moved(PrState::Approved, "the loop converged"),
        Some(PrState::Approved) => match &hand_off.intent {
            None => NextAction::PlanMerge,
            Some(intent) => NextAction::Merge(intent.clone()),
        },
        Some(PrState::Merged | PrState::Closed) => NextAction::Deliver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::testing::{Steps, artifact};
    use cfq_convergence::decide;
    use cfq_proto::looping::{Decision, EscalationAction, EscalationReason, Step};
    use cfq_proto::review::Quarantine;

    fn next(steps: &Steps) -> NextAction {
        next_action(&steps.history(), &Limits::default())
    }

    /// Walks a history step by step and notes the action before each.
    fn walk(steps: &Steps) -> Vec<String> {
        (0..=steps.0.len())
            .map(|n| {
                let action = format!("{:?}", next(&Steps(steps.0[..n].to_vec())));
                action.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
            })
            .collect()
    }

    const HAND_OFF: [&str; 9] =
        ["OpenPr", "MovePr", "MovePr", "MovePr", "PlanMerge", "Merge", "Deliver", "HandOff", "Rest"];

    #[test]
    fn converging_at_once() {
        let steps = Steps::started().made(1, "a", None).reviewed(1, 90.0).decided().handed_off();
        assert_eq!(walk(&steps), [&["Start", "Create", "Check", "Review", "Decide"][..], &HAND_OFF].concat());
    }

    #[test]
    fn revising_after_a_review_and_after_a_syntax_error() {
        let steps = Steps::started().made(1, "a", None).reviewed(1, 50.0).decided();
        let steps =
            steps.made(2, "b", Some(Quarantine::Syntax)).decided().made(3, "c", None).reviewed(3, 95.0).decided();
        let expected = [
            "Start", "Create", "Check", "Review", "Decide", "Create", "Check", "Decide", "Create", "Check", "Review",
            "Decide", "OpenPr",
        ];
        assert_eq!(walk(&steps), expected);
    }

    #[test]
    fn dangerous_output_is_decided_without_review_and_rests() {
        let steps = Steps::started().made(1, "a", Some(Quarantine::Dangerous));
        assert_eq!(next(&steps), NextAction::Decide);
        let steps = steps.decided();
        assert_eq!(next(&steps), NextAction::Rest);
        let retried = steps.resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
        assert_eq!(next(&retried), NextAction::Create);
        assert_eq!(retried.history().state, LoopState::Revising);
    }

    #[test]
    fn each_answer_to_an_escalation() {
        let stagnant = || {
            let steps = Steps::started().made(1, "a", None).reviewed(1, 60.0).decided();
            let steps =
                steps.made(2, "b", None).reviewed(2, 70.0).decided().made(3, "c", None).reviewed(3, 70.5).decided();
            steps.made(4, "d", None).reviewed(4, 69.0).decided()
        };
        let Some(Step::Decided { decided, .. }) = stagnant().0.last().map(|r| r.step.clone()) else {
            panic!("a decision")
        };
        assert!(matches!(decided.decision, Decision::Escalate { reason: EscalationReason::StagnationDetected, .. }));
        assert_eq!(next(&stagnant()), NextAction::Rest);
        let switch = EscalationAction::SwitchLlm { target_agent: cfq_proto::task::Agent::Alpha, suggested_model: None };
        assert_eq!(next(&stagnant().resolved(switch)), NextAction::Create);
        assert_eq!(next(&stagnant().resolved(EscalationAction::Abort)), NextAction::Rest);
        assert_eq!(next(&stagnant().resolved(EscalationAction::Fail { reason: None })), NextAction::Rest);
        let accepted = stagnant().resolved(EscalationAction::AcceptBestEffort);
        assert_eq!(next(&accepted), NextAction::OpenPr);
        assert_eq!(accepted.history().result().unwrap().artifact.iteration, 3, "the best, not the last");
        assert!(walk(&accepted.handed_off()).ends_with(&HAND_OFF.map(str::to_owned)));
    }

    #[test]
    fn an_escalation_before_any_artifact_generates_again() {
        let steps = Steps::started();
        let decided = cfq_convergence::escalate(&steps.history(), EscalationReason::AgentError, "down".into());
        let steps = steps.then(Step::Decided { iteration: 1, decided });
        let steps = steps.resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
        assert_eq!(steps.history().state, LoopState::Generating);
        assert_eq!(next(&steps), NextAction::Create);
    }

    #[test]
    fn no_model_is_asked_without_time_but_what_is_there_is_decided() {
        let limits = Limits { timeout_ms: 100, ..Limits::default() };
        let at = |steps: &Steps| next_action(&steps.history(), &limits);
        let late = Steps::started().then_at(Step::Generated { artifact: artifact(1, "a") }, 100);
        assert_eq!(at(&late), NextAction::Check);
        let checked = Step::Checked { iteration: 1, findings: vec![], quarantine: None };
        let late = late.then_at(checked, 100);
        assert_eq!(at(&late), NextAction::TimeIsUp);
        let reviewed = Steps(late.0.clone()).reviewed_at(1, 90.0, 150);
        assert_eq!(at(&reviewed), NextAction::Decide);
        assert_eq!(decide(&limits, &reviewed.history()).unwrap().decision, Decision::Converged);
    }

    #[test]
    fn a_cancelled_or_failed_task_rests() {
        let cancelled = Steps::started().then(Step::Cancelled { by: "me".into() });
        assert_eq!(next(&cancelled), NextAction::Rest);
        let decided = cfq_convergence::fail(&Steps::started().history(), "down".into());
        assert_eq!(next(&Steps::started().then(Step::Decided { iteration: 1, decided })), NextAction::Rest);
    }

    #[test]
    fn a_closed_request_is_delivered_all_the_same_and_then_a_human_is_asked() {
        let closed = |open: Steps| {
            open.approved()
                .then(Step::PrMoved { to: PrState::Closed, why: "conflict in a.py".into() })
                .then(Step::Delivered { branch: "cfq/t1".into(), commit: "c".into() })
        };
        let converged = Steps::started().made(1, "a", None).reviewed(1, 90.0).decided();
        let delivered = closed(converged);
        let NextAction::Hold { why } = next(&delivered) else { panic!("held") };
        assert!(why.contains("cfq/t1") && why.contains("conflict in a.py"), "{why}");
        let held = delivered.then(Step::HandOffHeld { why, available_actions: vec![] });
        assert_eq!(next(&held), NextAction::Rest);
        assert_eq!(next(&held.resolved(EscalationAction::AcceptBestEffort)), NextAction::HandOff);
        // Somebody who accepted it as best effort has been asked already.
        let decided = cfq_convergence::escalate(&History::default(), EscalationReason::AgentError, "down".into());
        let accepted = Steps::started().made(1, "a", None).then(Step::Decided { iteration: 1, decided });
        assert_eq!(next(&closed(accepted.resolved(EscalationAction::AcceptBestEffort))), NextAction::HandOff);
    }

    #[test]
    fn a_new_intent_replaces_the_old() {
        let open = || Steps::started().made(1, "a", None).reviewed(1, 90.0).decided().approved();
        let closed = open().then(Step::PrMoved { to: PrState::Closed, why: "conflict".into() });
        assert_eq!(next(&closed), NextAction::Deliver);
        let intent = |new: &str| Step::MergeIntent { old: "o".into(), new: new.into(), commit_time: 1 };
        let NextAction::Merge(now) = next(&open().then(intent("n1")).then(intent("n2"))) else { panic!("a merge") };
        assert_eq!(now.new, "n2");
    }
}
