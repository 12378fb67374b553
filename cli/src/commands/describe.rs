//! Events of tasks as lines of text, for `cfq watch` and `cfq logs`.

use cfq_proto::blob::Payload;
use cfq_proto::event::{EventBody, RunnerChange};
use cfq_proto::ids::JobId;
use cfq_proto::job::JobState;
use cfq_proto::loop_step::{Decision, EscalationAction, Step};
use cfq_proto::pr::PrState;

use crate::output;

/// How much the lines say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    Short,
    /// Also why a call was placed on its node, and the steps of the hand-off.
    Verbose,
}

impl Detail {
    pub fn of(is_verbose: bool) -> Self {
        if is_verbose { Self::Verbose } else { Self::Short }
    }
}

/// One line that describes the event for display; `None` for events that are not displayed.
pub fn describe(body: &EventBody, detail: Detail) -> Option<String> {
    match body {
        EventBody::TaskSubmitted => Some("submitted".to_owned()),
        EventBody::TaskStateChanged { to, reason, .. } if reason.is_empty() => Some(format!("is {to}")),
        EventBody::TaskStateChanged { to, reason, .. } => Some(format!("is {to}: {reason}")),
        EventBody::StepCommitted { step, .. } if detail == Detail::Short && is_covered_by_state(step) => None,
        EventBody::StepCommitted { step, .. } => describe_step(step),
        EventBody::JobChanged { role, model, state, node, reason, failure, usage, .. } => match state {
            JobState::Queued if reason.is_empty() => None,
            JobState::Queued => Some(format!("{role} queued: {reason}")),
            JobState::Placed => {
                let node = node.as_ref().map_or("?", |n| n.as_str());
                Some(match detail {
                    Detail::Short => format!("{role} runs on {node} ({model})"),
                    Detail::Verbose => format!("{role} ({model}) placed on {node}: {reason}"),
                })
            }
            JobState::Running => None,
            JobState::Done => usage.map(|u| {
                let resumed = match u.resumed_tokens {
                    0 => String::new(),
                    resumed => format!(", {resumed} of them from a lost attempt"),
                };
                format!(
                    "{role} done: {} tokens in {}, {:.0} tokens/s{resumed}",
                    u.output_tokens,
                    output::duration(u.total_ms),
                    u.tokens_per_second()
                )
            }),
            JobState::Failed | JobState::Dead | JobState::Cancelled => {
                let reason = failure.as_ref().map_or_else(|| reason.clone(), ToString::to_string);
                let reason = if reason.is_empty() { reason } else { format!(": {reason}") };
                Some(format!("{role} {state}{reason}"))
            }
        },
        EventBody::PriorityChanged { from, to, reason } => {
            Some(format!("priority changed from {from} to {to}: {reason}"))
        }
        // The change of the task's state has the same reason.
        EventBody::QuestionOpened { .. } if detail == Detail::Short => None,
        EventBody::QuestionOpened { text, .. } => Some(format!("question: {text}")),
        EventBody::QuestionAnswered { answer, by, .. } => Some(format!("answered by {by}: {answer}")),
        // The change of the task's state says that it runs.
        EventBody::RunnerChanged { change: RunnerChange::Granted, .. } if detail == Detail::Short => None,
        EventBody::RunnerChanged { runner, change, .. } => Some(format!("{change} ({runner})")),
        EventBody::RunnerActivity { activity, .. } => Some(format!("is {activity}")),
    }
}

/// Whether the step is a part of a hand-off without an incident, of which the last event names the result, or says the
/// same as the change of the task's state that follows it.
fn is_covered_by_state(step: &Step) -> bool {
    match step {
        Step::Decided { decided, .. } => matches!(decided.decision, Decision::Escalate { .. }),
        Step::PrOpened { .. } | Step::Merged { .. } | Step::Delivered { .. } => true,
        Step::PrMoved { to, .. } => !matches!(to, PrState::QcRejected | PrState::Closed),
        Step::Started { .. }
        | Step::Generated { .. }
        | Step::Checked { .. }
        | Step::Reviewed { .. }
        | Step::Resolved { .. }
        | Step::MergeIntent { .. }
        | Step::HandOffHeld { .. }
        | Step::HandedOff { .. }
        | Step::Cancelled { .. } => false,
    }
}

fn describe_step(step: &Step) -> Option<String> {
    Some(match step {
        Step::Started { base, .. } => format!("started from {}", base.get(..12).unwrap_or(base)),
        Step::Generated { artifact } => match artifact {
            Payload::Inline(a) => {
                let paths: Vec<&str> = a.files.iter().map(|f| f.path.as_str()).collect();
                match paths.is_empty() {
                    _ if a.job == JobId::NONE => format!("read the change of {}", paths.join(", ")),
                    true => format!("iteration {}: wrote no usable files", a.iteration),
                    false => format!("iteration {}: wrote {}", a.iteration, paths.join(", ")),
                }
            }
            Payload::Blob(_) => "wrote a large artifact".to_owned(),
        },
        Step::Checked { findings, ran, .. } if findings.is_empty() => {
            if ran.is_empty() {
                "checks passed".to_owned()
            } else {
                format!("checks: {}", output::check_runs(ran))
            }
        }
        Step::Checked { findings, .. } => {
            let all: Vec<String> = findings.iter().map(ToString::to_string).collect();
            format!("checks found {}", all.join("; "))
        }
        Step::Reviewed { review, .. } => {
            format!("reviewed: {:.0}/100, {}", review.quality_score, output::count(review.defects.len(), "defect"))
        }
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Converged => format!("converged: {}", decided.explanation),
            Decision::ReviewComplete => format!("reviewed: {}", decided.explanation),
            Decision::Revise => format!("revising: {}", decided.explanation),
            Decision::Escalate { reason, .. } => format!("escalated ({reason}): {}", decided.explanation),
            Decision::Fail { reason } => format!("failed: {reason}"),
        },
        Step::Resolved { action: EscalationAction::RetryWithConstraints { additional_constraints }, by } => {
            format!("resolved by {by}: retry_with_constraints: {}", additional_constraints.join("; "))
        }
        Step::Resolved { action, by } => format!("resolved by {by}: {}", action.kind().as_str()),
        Step::PrOpened { branch, .. } => format!("opened an internal pull request from {branch}"),
        Step::PrMoved { to, reason } => format!("pull request {to}: {reason}"),
        Step::MergeIntent { ran, .. } if ran.is_empty() => return None,
        Step::MergeIntent { ran, .. } => format!("merge checks: {}", output::check_runs(ran)),
        Step::Merged { commit } => format!("merged as {}", commit.get(..12).unwrap_or(commit)),
        Step::Delivered { branch, .. } => format!("delivered as branch {branch}"),
        // The change of the task's state is displayed instead.
        Step::HandOffHeld { .. } | Step::HandedOff { .. } => return None,
        Step::Cancelled { by } => format!("cancelled by {by}"),
    })
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::JobRole;
    use cfq_proto::model::ModelId;

    use super::*;

    #[test]
    fn placement_is_short_and_its_numbers_are_verbose() {
        let placed = EventBody::JobChanged {
            job: JobId::NONE,
            role: JobRole::Alpha,
            model: "openai:box/m".parse::<ModelId>().unwrap(),
            attempt: 1,
            state: JobState::Placed,
            node: Some("gpu1".parse().unwrap()),
            reason: "prefill 92 tokens 1.8 s".into(),
            failure: None,
            usage: None,
        };
        assert_eq!(describe(&placed, Detail::Short).unwrap(), "alpha runs on gpu1 (openai:box/m)");
        let verbose = describe(&placed, Detail::Verbose).unwrap();
        assert_eq!(verbose, "alpha (openai:box/m) placed on gpu1: prefill 92 tokens 1.8 s");
    }

    #[test]
    fn hand_off_has_one_line() {
        let moved = |to| Step::PrMoved { to, reason: "checks failed".into() };
        let line = |step| {
            let body = EventBody::StepCommitted { seq: 1, step, loop_state: cfq_proto::loop_step::LoopState::Idle };
            (describe(&body, Detail::Short).is_some(), describe(&body, Detail::Verbose).is_some())
        };
        assert_eq!(line(moved(PrState::Approved)), (false, true));
        assert_eq!(line(moved(PrState::QcRejected)), (true, true));
        assert_eq!(line(Step::Merged { commit: "c".into() }), (false, true));
    }
}
