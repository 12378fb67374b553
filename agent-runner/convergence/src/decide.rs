//! Decides after an iteration whether the loop converges, revises or escalates. No other part of cfq makes this
//! decision. A task that only reviews a change ends when the change is reviewed.
//!
//! The guards are evaluated in this order; the first that holds gives the decision. A window consists of the iterations
//! since the loop started, or since a human last answered.
//!
//! 1. Dangerous output: escalate. It takes precedence over everything else.
//! 2. Threshold met and no critical defect, on an artifact that is not quarantined: converged. It precedes every limit,
//!    because a good result is not discarded for being late.
//! 3. Iteration cap of the window reached: escalate.
//! 4. Oscillation (an earlier iteration of the window has the same content): escalate. It precedes stagnation, because
//!    it is the more specific reason.
//! 5. Stagnation (two consecutive reviewed iterations that did not raise the window's best score by two points):
//!    escalate. After the first such iteration, the decision is still to revise.
//! 6. Working time of the window used up: escalate.
//! 7. Otherwise revise. An artifact that does not parse, or whose project's checks fail, is revised with the checks'
//!    findings, without a review, and counts towards the cap. It has no score, so it neither ends nor prolongs a stagnation.

use cfq_proto::loop_step::{ActionKind, Decided, Decision, EscalationReason, LoopState, Step};
use cfq_proto::review::{Quarantine, ReviewFeedback, Severity};
use cfq_proto::task::ReviewDepth;

use crate::history::History;
use crate::iteration::{Iteration, score_of};
use crate::limits::LoopLimits;

/// Error: the last iteration is not ready for a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotDecidable {
    /// The history has no artifact.
    #[error("there is no artifact to decide about")]
    NoArtifact,
    /// The iteration with this number is not checked.
    #[error("iteration {0} is not checked yet")]
    Unchecked(u32),
    /// The iteration with this number is neither quarantined nor reviewed.
    #[error("iteration {0} is not reviewed yet")]
    Unreviewed(u32),
}

/// Returns the decision about the last iteration of `history`, which must be checked, and reviewed unless it is
/// quarantined. Of a task that reviews a change, all passes of its depth must be recorded.
///
/// # Errors
/// [`NotDecidable`] if there is no artifact, or if the last one is not checked or not reviewed.
pub fn decide(limits: &LoopLimits, history: &History) -> Result<Decided, NotDecidable> {
    let last = history.last().ok_or(NotDecidable::NoArtifact)?;
    let number = last.artifact.iteration;
    if !last.checked {
        return Err(NotDecidable::Unchecked(number));
    }
    if let Some(depth) = history.facts.review_depth {
        let review = last.review.as_ref().filter(|_| last.review_passes >= depth.passes());
        let review = review.ok_or(NotDecidable::Unreviewed(number))?;
        return Ok(with_best(history, Decision::ReviewComplete, summary(review, last.findings.len())));
    }
    let window = history.window();
    let used = window.len();
    let score = match (last.quarantine, last.score()) {
        (Some(Quarantine::Dangerous), _) => {
            let finding = last.findings.first();
            let explanation = finding.map_or_else(|| "the change is dangerous".to_owned(), |f| f.message.clone());
            return Ok(escalate(history, EscalationReason::DangerousOutputDetected, explanation));
        }
        (Some(Quarantine::Unparsable | Quarantine::Syntax | Quarantine::FailedChecks), _) => None,
        (None, None) => return Err(NotDecidable::Unreviewed(number)),
        (None, Some(score)) => Some(score),
    };
    let critical = last.review.as_ref().is_some_and(|r| r.has_critical());

    if let Some(score) = score.filter(|s| *s >= limits.threshold && !critical) {
        let threshold = limits.threshold;
        let explanation = format!("score {score:.0} meets the threshold of {threshold:.0} and no defect is critical");
        return Ok(with_best(history, Decision::Converged, explanation));
    }
    if used >= limits.max_iterations as usize {
        let unmet = match score {
            Some(score) if critical && score >= limits.threshold => "a critical defect is open".to_owned(),
            None => "the last result does not pass the checks".to_owned(),
            Some(_) => format!("the threshold of {:.0} is not met", limits.threshold),
        };
        let explanation = format!("{used} of {} iterations are used, {unmet}", limits.max_iterations);
        return Ok(escalate(history, EscalationReason::MaxIterationsReached, explanation));
    }
    if let Some(earlier) = repeated_iteration(window) {
        let explanation = format!("iteration {number} has the same content as iteration {earlier}");
        return Ok(escalate(history, EscalationReason::OscillationDetected, explanation));
    }
    if stagnant_iterations(window, limits.min_gain) >= limits.stagnation_after && score.is_some() {
        let explanation = format!(
            "the best score did not rise by {:.0} points in {} consecutive iterations",
            limits.min_gain, limits.stagnation_after
        );
        return Ok(escalate(history, EscalationReason::StagnationDetected, explanation));
    }
    let worked = history.active_ms.saturating_sub(history.window_active_ms);
    if worked >= limits.timeout_ms {
        let (worked_s, limit_s) = (worked / 1000, limits.timeout_ms / 1000);
        let explanation = format!("{worked_s} s of working time are used, the limit is {limit_s} s");
        return Ok(escalate(history, EscalationReason::TimeoutExceeded, explanation));
    }
    let explanation = match score {
        None => "the findings of the checks must be fixed first".to_owned(),
        Some(score) if critical && score >= limits.threshold => {
            format!("score {score:.0}, but a critical defect is open")
        }
        Some(score) if critical => {
            format!("score {score:.0} is below the threshold of {:.0}, and a critical defect is open", limits.threshold)
        }
        Some(score) => format!("score {score:.0} is below the threshold of {:.0}", limits.threshold),
    };
    Ok(with_best(history, Decision::Revise, explanation))
}

/// The score of a review, the number of defects of each severity, and the number of findings of the checks.
fn summary(review: &ReviewFeedback, findings: usize) -> String {
    let count = |severity: Severity| {
        let count = review.defects.iter().filter(|defect| defect.severity == severity).count();
        (count > 0).then(|| format!("{count} {}", severity.as_str()))
    };
    let counts: Vec<String> = Severity::ALL.into_iter().filter_map(count).collect();
    let defects = if counts.is_empty() { "no defects".to_owned() } else { format!("defects: {}", counts.join(", ")) };
    let found = match findings {
        0 => String::new(),
        1 => ", 1 finding of the checks".to_owned(),
        n => format!(", {n} findings of the checks"),
    };
    format!("score {:.0}, {defects}{found}", score_of(review))
}

/// Returns an escalation with the actions that may answer it (L7). Also used for reasons outside an iteration, such as
/// a job that took too long or a model that cannot answer. A task that only reviews a change has nothing that a human
/// could decide about, so it fails instead.
pub fn escalate(history: &History, reason: EscalationReason, explanation: String) -> Decided {
    if history.facts.review_depth.is_some() {
        return fail(history, explanation);
    }
    let mut available_actions = vec![ActionKind::SwitchLlm, ActionKind::RetryWithConstraints];
    if history.best().is_some() {
        available_actions.push(ActionKind::AcceptBestEffort);
    }
    available_actions.extend([ActionKind::Abort, ActionKind::Fail]);
    with_best(history, Decision::Escalate { reason, available_actions }, explanation)
}

/// Returns the escalation that replaces the next model call once the task's wall-clock deadline has passed. `None` if
/// the next action is not a model call: an existing artifact is checked and decided first, because a good result is not
/// discarded for being late, and a hand-off that has begun is finished.
pub fn overdue(history: &History) -> Option<Decided> {
    let calls_a_model = match history.state {
        LoopState::Generating | LoopState::Revising => !history.facts.unchecked && !history.facts.dangerous,
        LoopState::Reviewing => {
            let passes = history.facts.review_depth.map_or(1, ReviewDepth::passes);
            history.last().is_some_and(|i| i.quarantine.is_none() && i.review_passes < passes)
        }
        LoopState::Idle | LoopState::Converged | LoopState::Escalated | LoopState::Failed => false,
    };
    calls_a_model
        .then(|| escalate(history, EscalationReason::TimeoutExceeded, "the deadline of the task has passed".to_owned()))
}

/// Returns the step that stops a task that no runner can continue. `None` if no loop is running, or if the task already
/// waits for a human. Existing results are kept: a hand-off is held, an artifact can still be accepted, and only a task
/// without an artifact fails.
pub fn abandoned(history: &History, reason: String) -> Option<Step> {
    let decided = |decided| Some(Step::Decided { iteration: history.current_iteration(), decided });
    match history.state {
        LoopState::Idle | LoopState::Escalated | LoopState::Failed => None,
        LoopState::Generating | LoopState::Reviewing | LoopState::Revising => {
            match history.facts.dangerous || !history.iterations.is_empty() {
                true => decided(escalate(history, EscalationReason::WorkflowError, reason)),
                false => decided(fail(history, reason)),
            }
        }
        LoopState::Converged if history.facts.hand_off_held => None,
        LoopState::Converged if history.facts.can_end_hand_off() => Some(Step::HandedOff { reason }),
        LoopState::Converged => Some(Step::HandOffHeld { reason, available_actions: history.facts.held_actions() }),
    }
}

/// Returns the decision that fails the task, for example because an endpoint stayed down beyond the retry ceiling.
pub fn fail(history: &History, reason: String) -> Decided {
    with_best(history, Decision::Fail { reason: reason.clone() }, reason)
}

fn with_best(history: &History, decision: Decision, explanation: String) -> Decided {
    let best = history.best();
    let (best_iteration, best_score) = (best.map(|b| b.iteration), best.and_then(|b| b.score));
    Decided { decision, explanation, best_iteration, best_score }
}

/// Returns the number of an earlier iteration of the window whose content equals that of the last iteration.
fn repeated_iteration(window: &[Iteration]) -> Option<u32> {
    let (last, earlier) = window.split_last()?;
    earlier.iter().find(|i| i.artifact.content_hash == last.artifact.content_hash).map(|i| i.artifact.iteration)
}

/// Returns the number of consecutive reviewed iterations at the end of the window that did not raise the window's best
/// score by at least `min_gain`.
fn stagnant_iterations(window: &[Iteration], min_gain: f64) -> u32 {
    let mut best: Option<f64> = None;
    let mut stagnant = 0;
    for score in window.iter().filter(|i| i.quarantine.is_none()).filter_map(Iteration::score) {
        match best {
            Some(highest) if score < highest + min_gain => {
                stagnant += 1;
                best = Some(highest.max(score));
            }
            Some(_) | None => {
                stagnant = 0;
                best = Some(score);
            }
        }
    }
    stagnant
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::tests::{Records, artifact, review};
    use crate::transition::tests::resolved;
    use cfq_proto::ids::JobId;
    use cfq_proto::loop_step::{EscalationAction, Step, StepRecord};
    use proptest::prelude::*;
    use uuid::Uuid;

    fn reason(decided: &Decided) -> Option<EscalationReason> {
        match &decided.decision {
            Decision::Escalate { reason, .. } => Some(*reason),
            Decision::Converged | Decision::ReviewComplete | Decision::Revise | Decision::Fail { .. } => None,
        }
    }

    /// Records the iterations, given as (content, quarantine, score), one after the other, each with its decision,
    /// until a decision is not `Revise` or no iteration is left. Returns the records and the last decision.
    fn run(limits: &LoopLimits, iterations: &[(&str, Option<Quarantine>, f64)]) -> (Records, Decided) {
        let mut records = Records::started();
        let mut number = 0;
        loop {
            let (content, quarantine, score) = iterations[number];
            number += 1;
            let n = u32::try_from(number).unwrap();
            records = records.made(n, content, quarantine);
            if quarantine.is_none() {
                records = records.reviewed(n, score);
            }
            let decided = decide(limits, &records.history()).unwrap();
            records = records.decided(n, decided.clone());
            if decided.decision != Decision::Revise || number == iterations.len() {
                return (records, decided);
            }
        }
    }

    #[test]
    fn converges_in_the_first_iteration_or_after_two_revisions() {
        let limits = LoopLimits::default();
        let (_, decided) = run(&limits, &[("a", None, 85.0)]);
        assert_eq!(decided.decision, Decision::Converged);
        let (records, decided) = run(&limits, &[("a", None, 60.0), ("b", None, 70.0), ("c", None, 90.0)]);
        assert_eq!(decided.decision, Decision::Converged);
        assert_eq!((decided.best_iteration, decided.best_score), (Some(3), Some(90.0)));
        assert_eq!(records.history().iterations.len(), 3);
    }

    #[test]
    fn critical_defect_prevents_convergence_despite_a_high_score() {
        let records = Records::started().made(1, "a", None).then(Step::Reviewed {
            iteration: 1,
            review: review(99.0, true),
            job: JobId(Uuid::nil()),
            model: "b".into(),
        });
        let decided = decide(&LoopLimits::default(), &records.history()).unwrap();
        assert_eq!(decided.decision, Decision::Revise);
        assert!(decided.explanation.contains("critical"), "{}", decided.explanation);
    }

    #[test]
    fn stagnation_escalates_at_the_second_iteration_without_gain() {
        let limits = LoopLimits::default();
        let (records, decided) = run(&limits, &[("a", None, 60.0), ("b", None, 61.9), ("c", None, 62.0)]);
        assert_eq!(reason(&decided), Some(EscalationReason::StagnationDetected));
        assert_eq!(records.history().iterations.len(), 3);
        // A gain of two points resets the count; a lower score is no gain.
        let (_, decided) = run(&limits, &[("a", None, 60.0), ("b", None, 50.0), ("c", None, 62.0), ("d", None, 61.0)]);
        assert_eq!(decided.decision, Decision::Revise);
    }

    #[test]
    fn repeated_content_escalates_as_oscillation() {
        let (_, decided) = run(&LoopLimits::default(), &[("a", None, 50.0), ("b", None, 60.0), ("a", None, 50.0)]);
        assert_eq!(reason(&decided), Some(EscalationReason::OscillationDetected));
        assert_eq!(decided.best_iteration, Some(2));
    }

    #[test]
    fn iteration_cap_counts_quarantined_iterations() {
        let limits = LoopLimits { max_iterations: 3, ..LoopLimits::default() };
        let broken = Some(Quarantine::Syntax);
        let (_, decided) =
            run(&limits, &[("a", broken, 0.0), ("b", broken, 0.0), ("c", Some(Quarantine::Unparsable), 0.0)]);
        let Decision::Escalate { reason, available_actions } = &decided.decision else { panic!("{decided:?}") };
        assert_eq!(*reason, EscalationReason::MaxIterationsReached);
        assert!(!available_actions.contains(&ActionKind::AcceptBestEffort), "quarantined output is never offered");
    }

    #[test]
    fn failed_checks_are_revised_and_may_be_accepted_by_a_human() {
        let limits = LoopLimits { max_iterations: 2, ..LoopLimits::default() };
        let failed = Some(Quarantine::FailedChecks);
        let (_, decided) = run(&limits, &[("a", failed, 99.0)]);
        assert_eq!(decided.decision, Decision::Revise);
        let (_, decided) = run(&limits, &[("a", failed, 99.0), ("b", failed, 99.0)]);
        let Decision::Escalate { available_actions, .. } = &decided.decision else { panic!("{decided:?}") };
        assert!(available_actions.contains(&ActionKind::AcceptBestEffort));
        assert_eq!(decided.best_iteration, Some(2), "the last one, because none was reviewed");
        let (_, decided) = run(
            &LoopLimits { max_iterations: 3, ..limits },
            &[("a", failed, 0.0), ("b", None, 50.0), ("c", failed, 0.0)],
        );
        assert_eq!(decided.best_iteration, Some(2), "one that passed and was reviewed comes first");
    }

    #[test]
    fn syntax_error_is_revised_without_review() {
        let (_, decided) = run(&LoopLimits::default(), &[("a", Some(Quarantine::Syntax), 0.0), ("b", None, 90.0)]);
        assert_eq!(decided.decision, Decision::Converged);
    }

    #[test]
    fn dangerous_output_escalates_and_keeps_an_earlier_result() {
        let (_, decided) = run(&LoopLimits::default(), &[("a", None, 60.0), ("b", Some(Quarantine::Dangerous), 0.0)]);
        let Decision::Escalate { reason, available_actions } = &decided.decision else { panic!("{decided:?}") };
        assert_eq!(*reason, EscalationReason::DangerousOutputDetected);
        assert!(available_actions.contains(&ActionKind::AcceptBestEffort));
        assert_eq!(decided.best_iteration, Some(1));
    }

    #[test]
    fn working_time_is_counted_per_window() {
        let limits = LoopLimits { timeout_ms: 1000, ..LoopLimits::default() };
        let slow = Records::started().made(1, "a", None);
        let reviewed =
            Step::Reviewed { iteration: 1, review: review(50.0, false), job: JobId(Uuid::nil()), model: "b".into() };
        let slow = slow.then_at(reviewed, 1000);
        let decided = decide(&limits, &slow.history()).unwrap();
        assert_eq!(reason(&decided), Some(EscalationReason::TimeoutExceeded));
    }

    #[test]
    fn answered_escalation_resets_the_budget_and_keeps_the_best() {
        let limits = LoopLimits { max_iterations: 2, ..LoopLimits::default() };
        let (records, decided) = run(&limits, &[("a", None, 50.0), ("b", None, 60.0)]);
        assert_eq!(reason(&decided), Some(EscalationReason::MaxIterationsReached));
        let retry = resolved(EscalationAction::RetryWithConstraints { additional_constraints: vec!["shorter".into()] });
        let records = records.then(retry).made(3, "a", None).reviewed(3, 40.0);
        let history = records.history();
        assert_eq!(history.constraints, ["shorter"]);
        let decided = decide(&limits, &history).unwrap();
        assert_eq!(decided.decision, Decision::Revise, "the new window has one iteration and no repetition");
        assert_eq!((decided.best_iteration, decided.best_score), (Some(2), Some(60.0)));
    }

    #[test]
    fn deadline_replaces_a_model_call_but_never_a_decision() {
        let overdue_at = |records: &Records| overdue(&records.history()).as_ref().and_then(reason);
        let timeout = Some(EscalationReason::TimeoutExceeded);
        assert_eq!(overdue_at(&Records::default()), None, "nothing has started");
        assert_eq!(overdue_at(&Records::started()), timeout);
        let generated = Step::Generated { artifact: cfq_proto::blob::Payload::Inline(artifact(1, "a")) };
        assert_eq!(overdue_at(&Records::started().then(generated)), None, "the artifact is checked first");
        let made = Records::started().made(1, "a", None);
        assert_eq!(overdue_at(&made), timeout, "unreviewed");
        assert!(matches!(overdue(&made.history()).unwrap().best_iteration, Some(1)), "the artifact may be accepted");
        let broken = Records::started().made(1, "a", Some(Quarantine::Syntax));
        assert_eq!(overdue_at(&broken), None, "the iteration is decided without a model call");
        assert_eq!(overdue_at(&Records::started().made(1, "a", Some(Quarantine::Dangerous))), None);
        let good = made.reviewed(1, 90.0);
        assert_eq!(overdue_at(&good), None);
        let decided = decide(&LoopLimits::default(), &good.history()).unwrap();
        assert_eq!(overdue_at(&good.decided(1, decided)), None, "the hand-off has no deadline");
    }

    #[test]
    fn unfinished_iteration_is_not_decided() {
        let limits = LoopLimits::default();
        assert_eq!(decide(&limits, &Records::started().history()), Err(NotDecidable::NoArtifact));
        assert_eq!(decide(&limits, &Records::started().made(1, "a", None).history()), Err(NotDecidable::Unreviewed(1)));
    }

    fn any_iteration() -> impl Strategy<Value = (String, Option<Quarantine>, f64)> {
        let quarantine = prop_oneof![
            4 => Just(None),
            1 => Just(Some(Quarantine::Syntax)),
            1 => Just(Some(Quarantine::Unparsable)),
            1 => Just(Some(Quarantine::Dangerous)),
            1 => Just(Some(Quarantine::FailedChecks)),
        ];
        ("[a-z]{1,2}", quarantine, -20.0..130.0f64)
    }

    proptest! {
        /// Every run ends within the iteration cap and converges only if the last score is at least the threshold.
        /// Equal records give equal decisions, and the best score never falls.
        #[test]
        fn every_run_ends_within_its_limits_and_is_replayable(
            made in proptest::collection::vec(any_iteration(), 12..13),
            max_iterations in 1u32..8,
            threshold in 10.0..100.0f64,
        ) {
            let limits = LoopLimits { threshold, max_iterations, ..LoopLimits::default() };
            let made: Vec<_> = made.iter().map(|(c, q, s)| (c.as_str(), *q, *s)).collect();
            let (records, decided) = run(&limits, &made);
            prop_assert_ne!(&decided.decision, &Decision::Revise);
            let history = records.history();
            prop_assert!(history.iterations.len() <= max_iterations as usize);
            if decided.decision == Decision::Converged {
                let last = history.last().unwrap();
                prop_assert!(last.quarantine.is_none() && last.score().unwrap() >= threshold);
                prop_assert!(!last.review.as_ref().unwrap().has_critical());
            }
            if let Decision::Escalate { available_actions, .. } = &decided.decision {
                prop_assert_eq!(available_actions.contains(&ActionKind::AcceptBestEffort), history.best().is_some());
            }
            let mut highest = None;
            for cut in 0..=records.0.len() {
                let partial = History::of(&records.0[..cut]).unwrap();
                let best = partial.best().and_then(|b| b.score);
                prop_assert!(best >= highest, "{best:?} after {highest:?}");
                highest = best;
                if let Some(StepRecord { step: Step::Decided { decided, .. }, .. }) = records.0.get(cut) {
                    prop_assert_eq!(&decide(&limits, &partial).unwrap(), decided);
                }
            }
        }
    }
}
