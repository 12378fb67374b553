use cfq_proto::looping::{ActionKind, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::{Quarantine, ReviewFeedback};
use cfq_proto::task::TaskState;

use super::super::{Hint, Resolution};
use super::*;

const PASSED: &str = "update tasks set deadline = now() - interval '1 second'";

async fn made(lab: &Lab, fence: TaskFence, quarantine: Option<Quarantine>) {
    committed(lab, fence, 0, started()).await;
    committed(lab, fence, 1, generated(artifact(1))).await;
    committed(lab, fence, 2, Step::Checked { iteration: 1, findings: vec![], quarantine }).await;
}

async fn states(lab: &Lab, fence: TaskFence) -> (TaskState, LoopState, String) {
    let detail = lab.store.task_detail(fence.task).await.unwrap().unwrap();
    (detail.summary.state, detail.summary.loop_state, detail.reason)
}

#[tokio::test]
async fn a_running_task_escalates_with_what_is_there_and_everybody_is_told() {
    let r = running().await;
    made(&r.lab, r.task, None).await;
    assert_eq!(r.lab.store.sweep_deadlines(r.lead).await.unwrap(), vec![], "none is set");
    r.lab.store.raw("update tasks set deadline = now() + interval '1 hour'").await;
    assert_eq!(r.lab.store.sweep_deadlines(r.lead).await.unwrap(), vec![], "it is not over");
    r.lab.store.raw(PASSED).await;
    let hints = r.lab.store.sweep_deadlines(r.lead).await.unwrap();
    assert!(hints.contains(&Hint::CancelJob { node: node(), fence: r.job }), "{hints:?}");
    assert!(hints.contains(&Hint::CancelTask { runner: runner(), fence: r.task }), "{hints:?}");
    let (state, looping, reason) = states(&r.lab, r.task).await;
    assert_eq!((state, looping), (TaskState::Escalated, LoopState::Escalated));
    assert!(reason.contains("deadline"), "{reason}");
    let detail = r.lab.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!((detail.best_iteration, detail.runner), (Some(1), None));
    let escalation = detail.escalation.unwrap();
    assert_eq!(escalation.reason, EscalationReason::TimeoutExceeded);
    assert!(escalation.available_actions.contains(&ActionKind::AcceptBestEffort));
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Cancelled);
    // Its runner was in the middle of something: too late.
    let review = ReviewFeedback { quality_score: 99.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
    let late = Step::Reviewed { iteration: 1, review, job: r.job.job, model: MODEL.into() };
    assert_eq!(step(&r.lab, r.task, 3, late).await, StepReply::Stale);
    assert_eq!(r.lab.store.sweep_deadlines(r.lead).await.unwrap(), vec![], "once");
}

#[tokio::test]
async fn an_answer_that_comes_later_lifts_the_deadline() {
    let r = running().await;
    made(&r.lab, r.task, None).await;
    r.lab.store.raw(PASSED).await;
    r.lab.store.sweep_deadlines(r.lead).await.unwrap();
    let retry = EscalationAction::RetryWithConstraints { additional_constraints: vec!["be quick".into()] };
    let resolved = r.lab.store.resolve(r.task.task, &retry, "me").await.unwrap();
    assert!(matches!(resolved, Resolution::Done { state: TaskState::Ready, .. }), "{resolved:?}");
    let next = grant(&r.lab, r.runner).await.fence;
    assert_eq!(r.lab.store.sweep_deadlines(r.lead).await.unwrap(), vec![]);
    assert_eq!(states(&r.lab, next).await.0, TaskState::Running);
}

#[tokio::test]
async fn one_that_no_runner_holds_ends_too() {
    let lab = Lab::new().await;
    let (boot, lead) = (lab.join_runner().await, lab.lead().await);
    lab.submit().await;
    let begun = grant(&lab, boot).await.fence;
    made(&lab, begun, None).await;
    lab.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    lab.store.sweep(lead).await.unwrap();
    assert_eq!(states(&lab, begun).await.0, TaskState::Ready);
    let (waiting, _) = lab.submit().await;
    lab.store.raw(PASSED).await;
    lab.store.sweep_deadlines(lead).await.unwrap();
    assert_eq!(states(&lab, begun).await.0, TaskState::Escalated);
    let detail = lab.store.task_detail(waiting).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("before a runner began it"), "{}", detail.reason);
}

#[tokio::test]
async fn what_is_there_is_decided_first_and_an_unreadable_task_keeps_no_other_from_its_end() {
    let lab = Lab::new().await;
    let (boot, lead) = (lab.join_runner().await, lab.lead().await);
    let mut fences = Vec::new();
    for quarantine in [Some(Quarantine::Syntax), None, None] {
        lab.submit().await;
        let fence = grant(&lab, boot).await.fence;
        made(&lab, fence, quarantine).await;
        fences.push(fence);
    }
    let review = ReviewFeedback { quality_score: 99.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
    lab.store.raw(&format!("update steps set seq = 7 where seq = 2 and task = '{}'", fences[1].task)).await;
    lab.store.raw(PASSED).await;
    lab.store.sweep_deadlines(lead).await.unwrap();
    assert_eq!(states(&lab, fences[0]).await.0, TaskState::Running, "it goes back without a model");
    assert_eq!(states(&lab, fences[1]).await.0, TaskState::Running, "a gap in its steps");
    assert_eq!(states(&lab, fences[2]).await.0, TaskState::Escalated);
    // Reviewed before the deadline, decided after it: good work counts.
    lab.submit().await;
    let good = grant(&lab, boot).await.fence;
    made(&lab, good, None).await;
    committed(&lab, good, 3, Step::Reviewed { iteration: 1, review, job: JobId::fresh(), model: MODEL.into() }).await;
    lab.store.raw(PASSED).await;
    lab.store.sweep_deadlines(lead).await.unwrap();
    assert_eq!(states(&lab, good).await.0, TaskState::Running);
}
