//! Next action of a task: a function of the committed steps and the limits, nothing else. A runner that takes over a
//! task thus continues exactly where the previous one stopped.

use cfq_convergence::{History, LoopLimits, MergeIntent};
use cfq_proto::loop_step::LoopState;
use cfq_proto::pr::PrState;
use cfq_proto::task::ReviewDepth;

/// Next action of a runner for a task.
#[derive(Debug, Clone, PartialEq)]
pub enum NextAction {
    /// Record base commit and branch.
    Start,
    /// End the task, which has no base commit.
    FailStart,
    /// Request an artifact from the creator.
    Create,
    /// Read the change that the critic reviews.
    ReadChange,
    /// Run the built-in static checks on the last artifact.
    Check,
    /// Request a review of the last artifact from the critic.
    Review,
    /// Decide with `cfq-convergence` whether the last artifact is good enough, must be revised or is escalated.
    Decide,
    /// Escalate, or fail a review, because the working time is used up before the next model call.
    EscalateTimeout,
    /// Open the internal pull request.
    OpenPr,
    /// Move the pull request to another state.
    MovePr { to: PrState, reason: String },
    /// Compute the merge and record it as an intent.
    PlanMerge,
    /// Carry out the recorded merge intent.
    Merge(MergeIntent),
    /// Create the branch in the user's repository.
    Deliver,
    /// Hold the hand-off: the result is delivered, but a human must accept it unmerged.
    HoldHandOff { reason: String },
    /// End the hand-off.
    FinishHandOff,
    /// No action for a runner: the task waits for a human, or it has ended.
    NothingToDo,
}

/// Returns the next action of a task. The wall-clock deadline is not considered here: the scheduler enforces it by the
/// database's clock.
pub fn next_action(history: &History, limits: &LoopLimits) -> NextAction {
    match history.state {
        LoopState::Idle if history.next_seq == 0 => NextAction::Start,
        LoopState::Idle | LoopState::Escalated | LoopState::Failed => NextAction::NothingToDo,
        // The runner stopped between the two steps of a start that failed.
        LoopState::Generating if history.base.as_ref().is_some_and(|base| base.commit.is_empty()) => {
            NextAction::FailStart
        }
        LoopState::Generating | LoopState::Revising => {
            if history.facts.unchecked {
                NextAction::Check
            } else if history.facts.dangerous {
                NextAction::Decide
            } else if history.facts.review_depth.is_some() {
                NextAction::ReadChange
            } else {
                timeout_escalation(history, limits).unwrap_or(NextAction::Create)
            }
        }
        LoopState::Reviewing => {
            let passes = history.facts.review_depth.map_or(1, ReviewDepth::passes);
            let unreviewed = history.last().is_some_and(|i| i.quarantine.is_none() && i.review_passes < passes);
            match unreviewed {
                true => timeout_escalation(history, limits).unwrap_or(NextAction::Review),
                false => NextAction::Decide,
            }
        }
        LoopState::Converged => hand_off_action(history),
    }
}

/// Returns the action that replaces a model call if the working time is used up.
fn timeout_escalation(history: &History, limits: &LoopLimits) -> Option<NextAction> {
    let worked = history.active_ms.saturating_sub(history.window_active_ms);
    (worked >= limits.timeout_ms).then_some(NextAction::EscalateTimeout)
}

/// Returns the next action of the hand-off. The pull request is not reviewed again: the review in the loop serves as
/// its quality control, and the coordinator (the runner that executes the hand-off) approves every result that
/// converged or that a human accepted.
fn hand_off_action(history: &History) -> NextAction {
    let hand_off = &history.hand_off;
    if hand_off.done || history.facts.hand_off_held {
        return NextAction::NothingToDo;
    }
    if let Some((branch, _)) = &hand_off.delivered {
        if history.facts.can_end_hand_off() {
            return NextAction::FinishHandOff;
        }
        let closed = hand_off.closed.as_deref().unwrap_or("the pull request is not merged");
        return NextAction::HoldHandOff {
            reason: format!(
                "delivered as branch {branch}, which you can merge with git, but not merged by cfq: {closed}"
            ),
        };
    }
    let moved = |to, reason: &str| NextAction::MovePr { to, reason: reason.to_owned() };
    let accepted = history.facts.best_effort;
    match hand_off.pr_state {
        None => NextAction::OpenPr,
        Some(PrState::PendingQc) => {
            let score = history.result().and_then(|i| i.score());
            let reason = match (accepted, score) {
                (true, Some(score)) => format!("accepted by a human with a score of {score:.0}"),
                (true, None) => "accepted by a human, unreviewed".to_owned(),
                (false, Some(score)) => format!("the critic's score is {score:.0}, no critical defect is open"),
                (false, None) => "the loop converged".to_owned(),
            };
            NextAction::MovePr { to: PrState::QcApproved, reason }
        }
        Some(PrState::QcRejected) => moved(PrState::PendingQc, "resubmitted"),
        Some(PrState::QcApproved) => moved(PrState::PendingCoordinator, "quality control passed"),
        Some(PrState::PendingCoordinator) if accepted => moved(PrState::Approved, "a human accepted the best effort"),
        Some(PrState::PendingCoordinator) => moved(PrState::Approved, "the loop converged"),
        Some(PrState::Approved) => match &hand_off.merge_intent {
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
    use cfq_proto::loop_step::{Decision, EscalationAction, EscalationReason, Step};
    use cfq_proto::review::Quarantine;

    fn next(steps: &Steps) -> NextAction {
        next_action(&steps.history(), &LoopLimits::default())
    }

    /// Returns the name of the next action before each step, and after the last.
    fn actions(steps: &Steps) -> Vec<String> {
        (0..=steps.0.len())
            .map(|n| {
                let action = format!("{:?}", next(&Steps(steps.0[..n].to_vec())));
                action.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
            })
            .collect()
    }

    const HAND_OFF: [&str; 9] =
        ["OpenPr", "MovePr", "MovePr", "MovePr", "PlanMerge", "Merge", "Deliver", "FinishHandOff", "NothingToDo"];

    #[test]
    fn start_that_failed_is_ended_by_the_next_runner() {
        let failed = Steps(vec![]).then(Step::Started {
            base: String::new(),
            branch: "worker-1/task-1".into(),
            review_depth: None,
        });
        assert_eq!(next(&failed), NextAction::FailStart);
        let ended = cfq_convergence::fail(&failed.history(), "no commits".into());
        let iteration = failed.history().current_iteration();
        assert_eq!(next(&failed.then(Step::Decided { iteration, decided: ended })), NextAction::NothingToDo);
    }

    #[test]
    fn converged_first_iteration_is_handed_off() {
        let steps = Steps::started().made(1, "a", None).reviewed(1, 90.0).decided().handed_off();
        assert_eq!(actions(&steps), [&["Start", "Create", "Check", "Review", "Decide"][..], &HAND_OFF].concat());
    }

    #[test]
    fn review_of_a_change_calls_only_the_critic_and_ends() {
        for (depth, reviews) in [(ReviewDepth::Quick, 1), (ReviewDepth::Standard, 1), (ReviewDepth::Comprehensive, 3)] {
            let started = Step::Started { base: "base".into(), branch: "b".into(), review_depth: Some(depth) };
            let mut steps = Steps(vec![]).then(started).made(1, "a", None);
            for n in 0..reviews {
                assert_eq!(next(&steps), NextAction::Review, "{depth} {n}");
                steps = steps.reviewed(1, 20.0);
            }
            let steps = steps.decided();
            let expected: Vec<&str> = ["Start", "ReadChange", "Check"]
                .into_iter()
                .chain(std::iter::repeat_n("Review", reviews))
                .chain(["Decide", "NothingToDo"])
                .collect();
            assert_eq!(actions(&steps), expected);
            let Some(Step::Decided { decided, .. }) = steps.0.last().map(|record| &record.step) else { panic!() };
            assert_eq!(decided.decision, Decision::ReviewComplete);
            assert_eq!((decided.best_iteration, decided.explanation.as_str()), (None, "score 20, no defects"));
            assert_eq!(steps.history().state, LoopState::Idle);
        }
    }

    #[test]
    fn failed_review_and_syntax_error_are_followed_by_a_revision() {
        let steps = Steps::started().made(1, "a", None).reviewed(1, 50.0).decided();
        let steps =
            steps.made(2, "b", Some(Quarantine::Syntax)).decided().made(3, "c", None).reviewed(3, 95.0).decided();
        let expected = [
            "Start", "Create", "Check", "Review", "Decide", "Create", "Check", "Decide", "Create", "Check", "Review",
            "Decide", "OpenPr",
        ];
        assert_eq!(actions(&steps), expected);
    }

    #[test]
    fn dangerous_output_is_decided_without_review() {
        let steps = Steps::started().made(1, "a", Some(Quarantine::Dangerous));
        assert_eq!(next(&steps), NextAction::Decide);
        let steps = steps.decided();
        assert_eq!(next(&steps), NextAction::NothingToDo);
        let retried = steps.resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
        assert_eq!(next(&retried), NextAction::Create);
        assert_eq!(retried.history().state, LoopState::Revising);
    }

    #[test]
    fn each_answer_to_an_escalation_has_its_action() {
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
        assert_eq!(next(&stagnant()), NextAction::NothingToDo);
        let switch = EscalationAction::SwitchLlm { target_agent: cfq_proto::task::Agent::Alpha, suggested_model: None };
        assert_eq!(next(&stagnant().resolved(switch)), NextAction::Create);
        assert_eq!(next(&stagnant().resolved(EscalationAction::Abort)), NextAction::NothingToDo);
        assert_eq!(next(&stagnant().resolved(EscalationAction::Fail { reason: None })), NextAction::NothingToDo);
        let accepted = stagnant().resolved(EscalationAction::AcceptBestEffort);
        assert_eq!(next(&accepted), NextAction::OpenPr);
        assert_eq!(accepted.history().result().unwrap().artifact.iteration, 3, "the best iteration, not the last");
        assert!(actions(&accepted.handed_off()).ends_with(&HAND_OFF.map(str::to_owned)));
    }

    #[test]
    fn retry_before_any_artifact_generates_again() {
        let steps = Steps::started();
        let decided = cfq_convergence::escalate(&steps.history(), EscalationReason::AgentError, "down".into());
        let steps = steps.then(Step::Decided { iteration: 1, decided });
        let steps = steps.resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
        assert_eq!(steps.history().state, LoopState::Generating);
        assert_eq!(next(&steps), NextAction::Create);
    }

    #[test]
    fn timeout_prevents_model_calls_but_not_decisions() {
        let limits = LoopLimits { timeout_ms: 100, ..LoopLimits::default() };
        let at = |steps: &Steps| next_action(&steps.history(), &limits);
        let late = Steps::started().then_at(Step::Generated { artifact: artifact(1, "a") }, 100);
        assert_eq!(at(&late), NextAction::Check);
        let checked = Step::Checked { iteration: 1, findings: vec![], quarantine: None, ran: vec![] };
        let late = late.then_at(checked, 100);
        assert_eq!(at(&late), NextAction::EscalateTimeout);
        let reviewed = Steps(late.0.clone()).reviewed_at(1, 90.0, 150);
        assert_eq!(at(&reviewed), NextAction::Decide);
        assert_eq!(decide(&limits, &reviewed.history()).unwrap().decision, Decision::Converged);
    }

    #[test]
    fn cancelled_or_failed_task_has_no_action() {
        let cancelled = Steps::started().then(Step::Cancelled { by: "me".into() });
        assert_eq!(next(&cancelled), NextAction::NothingToDo);
        let decided = cfq_convergence::fail(&Steps::started().history(), "down".into());
        assert_eq!(next(&Steps::started().then(Step::Decided { iteration: 1, decided })), NextAction::NothingToDo);
    }

    #[test]
    fn closed_pull_request_is_delivered_and_then_held() {
        let closed = |open: Steps| {
            open.approved()
                .then(Step::PrMoved { to: PrState::Closed, reason: "conflict in a.py".into() })
                .then(Step::Delivered { branch: "cfq/t1".into(), commit: "c".into() })
        };
        let converged = Steps::started().made(1, "a", None).reviewed(1, 90.0).decided();
        let delivered = closed(converged);
        let NextAction::HoldHandOff { reason } = next(&delivered) else { panic!("held") };
        assert!(reason.contains("cfq/t1") && reason.contains("conflict in a.py"), "{reason}");
        let held = delivered.then(Step::HandOffHeld { reason, available_actions: vec![] });
        assert_eq!(next(&held), NextAction::NothingToDo);
        assert_eq!(next(&held.resolved(EscalationAction::AcceptBestEffort)), NextAction::FinishHandOff);
        // A human who accepted the best effort is not asked again.
        let decided = cfq_convergence::escalate(&History::default(), EscalationReason::AgentError, "down".into());
        let accepted = Steps::started().made(1, "a", None).then(Step::Decided { iteration: 1, decided });
        assert_eq!(next(&closed(accepted.resolved(EscalationAction::AcceptBestEffort))), NextAction::FinishHandOff);
    }

    #[test]
    fn new_merge_intent_replaces_the_old_one() {
        let open = || Steps::started().made(1, "a", None).reviewed(1, 90.0).decided().approved();
        let closed = open().then(Step::PrMoved { to: PrState::Closed, reason: "conflict".into() });
        assert_eq!(next(&closed), NextAction::Deliver);
        let intent = |new: &str| Step::MergeIntent {
            old: "o".into(),
            new: new.into(),
            commit_time: 1,
            repository: String::new(),
            message: String::new(),
            ran: vec![],
        };
        let NextAction::Merge(now) = next(&open().then(intent("n1")).then(intent("n2"))) else { panic!("a merge") };
        assert_eq!(now.new, "n2");
    }
}
