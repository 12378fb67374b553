use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskId;
use cfq_proto::loop_step::{ActionKind, Decided, Decision, EscalationAction, EscalationReason, LoopState};
use cfq_proto::pr::PrState;
use cfq_proto::review::{CheckKind, Finding, Quarantine, ReviewFeedback};
use cfq_proto::task::TaskState;

use super::super::{Cancelled, Resolution, Run};
use super::*;

fn review(score: f64) -> ReviewFeedback {
    ReviewFeedback { quality_score: score, defects: vec![], suggestions: vec!["s".into()], required_changes: vec![] }
}

pub(super) fn decided(iteration: u32, decision: Decision, best: Option<u32>) -> Step {
    let decided =
        Decided { decision, explanation: "because".into(), best_iteration: best, best_score: best.map(|_| 70.1) };
    Step::Decided { iteration, decided }
}

pub(super) fn escalate(actions: Vec<ActionKind>) -> Decision {
    Decision::Escalate { reason: EscalationReason::StagnationDetected, available_actions: actions }
}

fn handed_off() -> Step {
    Step::HandedOff { reason: "".into() }
}

fn all_actions() -> Vec<ActionKind> {
    use ActionKind::{Abort, AcceptBestEffort, Fail, RetryWithConstraints, SwitchLlm};
    vec![SwitchLlm, RetryWithConstraints, AcceptBestEffort, Abort, Fail]
}

/// Creates a task, grants it to the runner and commits the steps of one reviewed iteration.
pub(super) async fn reviewed(quarantine: Option<Quarantine>) -> (TestEnv, BootId, TaskFence) {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let fence = reviewed_in(&env, boot, quarantine).await;
    (env, boot, fence)
}

pub(super) async fn reviewed_in(env: &TestEnv, boot: BootId, quarantine: Option<Quarantine>) -> TaskFence {
    env.submit().await;
    let fence = grant(env, boot).await.fence;
    committed(env, fence, 0, started()).await;
    committed(env, fence, 1, generated(artifact(1))).await;
    let finding = Finding { check: CheckKind::Syntax, path: "a.py".into(), line: 1, message: "bad".into() };
    let findings = if quarantine.is_some() { vec![finding] } else { vec![] };
    committed(env, fence, 2, Step::Checked { iteration: 1, findings, quarantine, ran: vec![] }).await;
    let review = Step::Reviewed { iteration: 1, review: review(70.1), job: JobId::fresh(), model: "m".into() };
    committed(env, fence, 3, review).await;
    fence
}

async fn detail(env: &TestEnv, task: TaskId) -> TaskDetail {
    env.store.task_detail(task).await.unwrap().unwrap()
}

#[tokio::test]
async fn loop_runs_from_start_to_merge_and_writes_every_row() {
    let (env, _, fence) = reviewed(None).await;
    committed(&env, fence, 4, decided(1, Decision::Revise, Some(1))).await;
    committed(&env, fence, 5, generated(artifact(2))).await;
    committed(&env, fence, 6, Step::Checked { iteration: 2, findings: vec![], quarantine: None, ran: vec![] }).await;
    let second = Step::Reviewed { iteration: 2, review: review(90.0), job: JobId::fresh(), model: "m".into() };
    committed(&env, fence, 7, second).await;
    committed(&env, fence, 8, decided(2, Decision::Converged, Some(2))).await;
    let open = Step::PrOpened { head: "c2".into(), base: "b0".into(), branch: "worker-1/task-1".into() };
    let pr = committed(&env, fence, 9, open.clone()).await.unwrap();
    assert_eq!(committed(&env, fence, 9, open).await, Some(pr), "repeated, one pull request");
    let refused = step(&env, fence, 10, Step::PrMoved { to: PrState::Approved, reason: "".into() }).await;
    assert!(matches!(refused, StepReply::Illegal { .. }), "{refused:?}");
    let moves = [PrState::QcApproved, PrState::PendingCoordinator, PrState::Approved];
    for (seq, to) in (10..).zip(moves) {
        committed(&env, fence, seq, Step::PrMoved { to, reason: "fine".into() }).await;
    }
    committed(&env, fence, 13, merge_intent("b0", "m1")).await;
    let late = env.store.cancel(fence.task, "me", Run::Commit).await.unwrap();
    assert!(matches!(late, Cancelled::TooLate { .. }), "{late:?}");
    committed(&env, fence, 14, Step::Merged { commit: "m1".into() }).await;
    committed(&env, fence, 15, Step::Delivered { branch: "cfq/t1-x".into(), commit: "m1".into() }).await;
    committed(&env, fence, 16, handed_off()).await;
    committed(&env, fence, 16, handed_off()).await;
    let task = detail(&env, fence.task).await;
    assert_eq!((task.summary.state, task.summary.loop_state), (TaskState::Merged, LoopState::Idle));
    assert_eq!(task.delivered_branch.as_deref(), Some("cfq/t1-x"));
    assert_eq!(task.runner, None);
    assert_eq!(task.iterations.len(), 2);
    assert_eq!(task.iterations[1].review.as_ref().unwrap().quality_score, 90.0);
    assert_eq!(task.summary.best_score, Some(70.1));
    let pr = env.store.pr(pr).await.unwrap().unwrap();
    assert_eq!((pr.state, pr.merge_commit.as_deref(), pr.history.len()), (PrState::Merged, Some("m1"), 5));
    let chain = env.store.artifact_chain(fence.task, None).await.unwrap().unwrap();
    assert_eq!(chain.base, "b0");
    assert_eq!(chain.artifacts.iter().map(|a| a.iteration).collect::<Vec<_>>(), vec![1, 2]);
    assert_eq!(chain.artifacts[0].commit_message, "m\0");
    assert!(env.store.artifact_chain(fence.task, Some(3)).await.unwrap().is_none());
    assert!(matches!(env.store.cancel(fence.task, "me", Run::Commit).await.unwrap(), Cancelled::TooLate { .. }));
}

#[tokio::test]
async fn repeated_step_is_committed_once_and_a_different_one_is_stale() {
    let (env, _, fence) = reviewed(None).await;
    committed(&env, fence, 0, started()).await;
    let other = Step::Started { base: "other".into(), branch: "x".into(), review_depth: None };
    assert_eq!(step(&env, fence, 0, other).await, StepReply::Stale);
    assert_eq!(step(&env, fence, 9, started()).await, StepReply::Stale, "a gap");
    let illegal = step(&env, fence, 4, handed_off()).await;
    assert!(matches!(illegal, StepReply::Illegal { .. }), "{illegal:?}");
    let forged = step(&env, fence, 4, Step::Cancelled { by: "runner".into() }).await;
    assert!(matches!(forged, StepReply::Illegal { .. }), "{forged:?}");
    assert_eq!(env.store.count("select count(*) from steps").await, 4);
    assert_eq!(env.store.count("select count(*) from events where body::text like '%\"step_committed\"%'").await, 4);
}

#[tokio::test]
async fn repeated_answer_is_not_recorded_twice_and_answers_no_later_question() {
    let (env, boot, fence) = reviewed(None).await;
    committed(&env, fence, 4, decided(1, escalate(all_actions()), Some(1))).await;
    let open = async || detail(&env, fence.task).await.escalation.map(|escalation| escalation.question);
    let first = open().await;
    assert!(first.is_some());
    let retry = EscalationAction::RetryWithConstraints { additional_constraints: vec!["no globals".into()] };
    let answer = async |question, action: &EscalationAction| {
        env.store.resolve(fence.task, question, action, "me").await.unwrap()
    };
    assert!(matches!(answer(first, &retry).await, Resolution::Done { state: TaskState::Ready, .. }));
    let repeated = answer(first, &retry).await;
    assert!(matches!(repeated, Resolution::AlreadyDone { state: TaskState::Ready, .. }), "{repeated:?}");
    let next = grant(&env, boot).await;
    assert_eq!(next.steps.len(), 6, "one answer");
    committed(&env, next.fence, 6, decided(1, escalate(all_actions()), Some(1))).await;
    let second = open().await;
    assert!(second.is_some() && second != first, "{second:?}");
    let repeated = answer(first, &retry).await;
    assert!(matches!(repeated, Resolution::AlreadyDone { state: TaskState::Escalated, .. }), "{repeated:?}");
    assert_eq!(open().await, second, "the later question is still open");
    let other = answer(first, &EscalationAction::Abort).await;
    let Resolution::NotOpen { ended: Some(ended), .. } = other else { panic!("{other:?}") };
    assert_eq!((ended.answer, ended.by.as_str()), (Some(retry.clone()), "me"));
    let other_task = reviewed_in(&env, boot, None).await;
    let foreign = env.store.resolve(other_task.task, second, &retry, "me").await.unwrap();
    assert!(matches!(foreign, Resolution::NotOpen { ended: None, .. }), "{foreign:?}");
    assert_eq!(open().await, second);
    env.store.cancel(fence.task, "me", Run::Commit).await.unwrap();
    let late = answer(second, &retry).await;
    let Resolution::NotOpen { ended: Some(ended), .. } = late else { panic!("{late:?}") };
    assert_eq!((ended.answer, ended.by.as_str()), (None, "me"));
}

#[tokio::test]
async fn escalation_opens_a_question_whose_answer_requeues_the_task() {
    let (env, boot, fence) = reviewed(None).await;
    committed(&env, fence, 4, decided(1, escalate(all_actions()), Some(1))).await;
    let task = detail(&env, fence.task).await;
    assert_eq!((task.summary.state, task.runner), (TaskState::Escalated, None));
    let escalation = task.escalation.unwrap();
    assert_eq!(escalation.final_critique.unwrap().quality_score, 70.1);
    assert!(escalation.recommendation.contains("70 of 100; the threshold is 85"), "{}", escalation.recommendation);
    let retry = EscalationAction::RetryWithConstraints { additional_constraints: vec!["no globals".into()] };
    let Resolution::Done { state, hints, .. } = env.store.resolve(fence.task, None, &retry, "me").await.unwrap() else {
        panic!()
    };
    assert_eq!(state, TaskState::Ready);
    assert!(hints.contains(&crate::store::Hint::TaskReady));
    let again = env.store.resolve(fence.task, None, &retry, "me").await.unwrap();
    assert!(matches!(again, Resolution::NotWaiting { .. }), "{again:?}");
    let next = grant(&env, boot).await;
    assert_eq!(next.steps.len(), 6);
    assert_eq!(detail(&env, fence.task).await.summary.loop_state, LoopState::Revising);
    committed(&env, next.fence, 6, generated(artifact(2))).await;
    assert_eq!(env.store.count("select count(*) from questions where state = 'answered'").await, 1);
}

#[tokio::test]
async fn best_effort_needs_an_offer_and_a_result_without_quarantine() {
    let (env, boot, fence) = reviewed(None).await;
    committed(&env, fence, 4, decided(1, escalate(vec![ActionKind::Abort]), Some(1))).await;
    let accept = EscalationAction::AcceptBestEffort;
    let refused = env.store.resolve(fence.task, None, &accept, "me").await.unwrap();
    assert!(matches!(refused, Resolution::NotOffered { .. }), "{refused:?}");
    env.store.raw("update questions set actions = '[\"accept_best_effort\"]'").await;
    env.store.raw("update iterations set quarantine = '\"syntax\"'").await;
    let refused = env.store.resolve(fence.task, None, &accept, "me").await.unwrap();
    assert!(matches!(refused, Resolution::NothingAcceptable { .. }), "{refused:?}");
    env.store.raw("update iterations set quarantine = null").await;
    let done = env.store.resolve(fence.task, None, &accept, "me").await.unwrap();
    assert!(matches!(done, Resolution::Done { state: TaskState::Ready, .. }), "{done:?}");
    let next = grant(&env, boot).await.fence;
    let open = Step::PrOpened { head: "c1".into(), base: "b0".into(), branch: "w".into() };
    committed(&env, next, 6, open).await;
    committed(&env, next, 7, Step::Delivered { branch: "cfq/t1".into(), commit: "c1".into() }).await;
    committed(&env, next, 8, handed_off()).await;
    assert_eq!(detail(&env, next.task).await.summary.state, TaskState::Accepted);
}

/// Commits the steps until the task has converged and its pull request is approved. Returns the pull request's number;
/// the next step is number 9.
async fn approved(env: &TestEnv, fence: TaskFence) -> i64 {
    committed(env, fence, 4, decided(1, Decision::Converged, Some(1))).await;
    let open = Step::PrOpened { head: "c1".into(), base: "b0".into(), branch: "w".into() };
    let pr = committed(env, fence, 5, open).await.unwrap();
    for (seq, to) in (6..).zip([PrState::QcApproved, PrState::PendingCoordinator, PrState::Approved]) {
        committed(env, fence, seq, Step::PrMoved { to, reason: "fine".into() }).await;
    }
    pr
}

#[tokio::test]
async fn held_hand_off_names_the_next_commands_and_can_be_accepted() {
    let (env, boot, fence) = reviewed(None).await;
    let pr = approved(&env, fence).await;
    committed(&env, fence, 9, Step::PrMoved { to: PrState::Closed, reason: "same lines of a.py".into() }).await;
    let late = env.store.cancel(fence.task, "me", Run::Commit).await.unwrap();
    assert!(matches!(late, Cancelled::TooLate { .. }), "the delivery has begun: {late:?}");
    committed(&env, fence, 10, Step::Delivered { branch: "cfq/t1".into(), commit: "c1".into() }).await;
    let early = step(&env, fence, 11, handed_off()).await;
    assert!(matches!(early, StepReply::Illegal { .. }), "neither merged nor accepted: {early:?}");
    let actions = vec![ActionKind::AcceptBestEffort, ActionKind::Abort];
    let held =
        Step::HandOffHeld { reason: "not merged: same lines of a.py".into(), available_actions: actions.clone() };
    committed(&env, fence, 11, held).await;
    let task = detail(&env, fence.task).await;
    assert_eq!((task.summary.state, task.summary.loop_state), (TaskState::WaitingOnHuman, LoopState::Converged));
    assert_eq!((task.runner, task.delivered_branch.as_deref()), (None, Some("cfq/t1")));
    for text in ["same lines of a.py", "cfq pull t1", &format!("cfq pr show {pr}"), "cfq resolve t1"] {
        assert!(task.reason.contains(text), "{}", task.reason);
    }
    let escalation = task.escalation.unwrap();
    assert_eq!((escalation.available_actions, escalation.reason), (actions, EscalationReason::WorkflowError));
    let accept = EscalationAction::AcceptBestEffort;
    let done = env.store.resolve(fence.task, None, &accept, "me").await.unwrap();
    assert!(matches!(done, Resolution::Done { state: TaskState::Ready, .. }), "{done:?}");
    let next = grant(&env, boot).await.fence;
    committed(&env, next, 13, Step::HandedOff { reason: "delivered as branch cfq/t1, not merged".into() }).await;
    let task = detail(&env, fence.task).await;
    assert_eq!((task.summary.state, task.summary.loop_state), (TaskState::Accepted, LoopState::Idle));
    assert!(task.reason.contains("not merged") && task.escalation.is_none(), "{}", task.reason);
    assert_eq!(env.store.pr(pr).await.unwrap().unwrap().state, PrState::Closed);
}

#[tokio::test]
async fn unmerged_held_hand_off_can_be_cancelled() {
    let (env, _, fence) = reviewed(None).await;
    approved(&env, fence).await;
    committed(&env, fence, 9, Step::PrMoved { to: PrState::Closed, reason: "conflict".into() }).await;
    let actions = vec![ActionKind::AcceptBestEffort, ActionKind::Abort];
    committed(&env, fence, 10, Step::HandOffHeld { reason: "conflict".into(), available_actions: actions }).await;
    assert!(matches!(env.store.cancel(fence.task, "me", Run::Commit).await.unwrap(), Cancelled::Done { .. }));
    let task = detail(&env, fence.task).await;
    assert_eq!((task.summary.state, task.summary.loop_state), (TaskState::Cancelled, LoopState::Idle));
    assert!(task.escalation.is_none());
}

#[tokio::test]
async fn abort_and_fail_end_an_escalated_task() {
    for (action, state) in
        [(EscalationAction::Abort, TaskState::Cancelled), (EscalationAction::Fail { reason: None }, TaskState::Failed)]
    {
        let (env, _, fence) = reviewed(Some(Quarantine::Syntax)).await;
        committed(&env, fence, 4, decided(1, escalate(all_actions()), None)).await;
        let done = env.store.resolve(fence.task, None, &action, "me").await.unwrap();
        assert!(matches!(done, Resolution::Done { state: s, .. } if s == state), "{done:?}");
        let task = detail(&env, fence.task).await;
        assert_eq!(task.summary.state, state);
        assert!(task.escalation.is_none());
        assert_eq!(task.iterations[0].quarantine, Some(Quarantine::Syntax));
    }
}

#[tokio::test]
async fn cancel_ends_the_loop_its_jobs_and_its_lease_once() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    let Cancelled::Done { hints, .. } = r.env.store.cancel(r.task.task, "me", Run::Commit).await.unwrap() else {
        panic!()
    };
    assert!(hints.contains(&crate::store::Hint::CancelJob { node: node(), fence: r.job }), "{hints:?}");
    assert!(hints.contains(&crate::store::Hint::CancelTask { runner: runner(), fence: r.task }), "{hints:?}");
    assert!(matches!(r.env.store.cancel(r.task.task, "me", Run::Commit).await.unwrap(), Cancelled::Already { .. }));
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(step(&r.env, r.task, 2, generated(artifact(1))).await, StepReply::Stale);
    let task = detail(&r.env, r.task.task).await;
    assert_eq!((task.summary.state, task.summary.loop_state), (TaskState::Cancelled, LoopState::Idle));
    assert_eq!(task.jobs[0].state, JobState::Cancelled);
    assert_eq!(r.env.store.count("select count(*) from steps where kind = 'cancelled'").await, 1);
}

#[tokio::test]
async fn cancel_racing_with_completion_leaves_one_end_state() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    for round in 1..=8 {
        let fence = reviewed_in(&env, boot, None).await;
        let failed = Decision::Fail { reason: "endpoint down".into() };
        let finish = step(&env, fence, 4, decided(1, failed, Some(1)));
        let (finished, cancelled) = tokio::join!(finish, env.store.cancel(fence.task, "me", Run::Commit));
        let state = detail(&env, fence.task).await.summary.state;
        match (finished, cancelled.unwrap()) {
            (StepReply::Committed { .. }, Cancelled::TooLate { .. }) => assert_eq!(state, TaskState::Failed),
            (StepReply::Stale, Cancelled::Done { .. }) => assert_eq!(state, TaskState::Cancelled),
            other => panic!("{other:?}"),
        }
        let ends = r#"select count(*) from events where body::text ~ '"to":"(failed|cancelled)"'"#;
        assert_eq!(env.store.count(ends).await, round);
    }
}

#[tokio::test]
async fn artifact_above_the_inline_limit_is_sent_and_read_as_a_blob() {
    use cfq_proto::blob::{BlobHash, BlobRef, CHUNK_BYTES};
    let env = TestEnv::new().await;
    env.submit().await;
    let boot = env.join_runner().await;
    let fence = grant(&env, boot).await.fence;
    committed(&env, fence, 0, started()).await;
    let mut large = artifact(1);
    large.files[0].content = Some("x = 1\n".repeat(100_000));
    let bytes = serde_json::to_vec(&large).unwrap();
    let blob = BlobRef { hash: BlobHash::of(&bytes), size: bytes.len() as u64 };
    let by_name = Step::Generated { artifact: Payload::Blob(blob.clone()) };
    let early = step(&env, fence, 1, by_name.clone()).await;
    assert!(matches!(early, StepReply::Unavailable { .. }), "{early:?}");
    let put = |lease, index: usize, data: Vec<u8>| {
        let (store, blob) = (env.store.clone(), blob.clone());
        async move { store.blob_put(&of_runner(lease), &blob.hash, blob.size, index as u32, &data).await.unwrap() }
    };
    let first = bytes[..CHUNK_BYTES].to_vec();
    assert!(
        matches!(put(cfq_proto::ids::LeaseId::fresh(), 0, first).await, crate::store::PutOutcome::Refused(_)),
        "no live lease"
    );
    for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        assert_eq!(put(fence.lease, index, chunk.to_vec()).await, crate::store::PutOutcome::Kept);
    }
    committed(&env, fence, 1, by_name).await;
    let (size, chunk) = env.store.blob_get(&of_runner(fence.lease), &blob.hash, 0).await.unwrap().unwrap();
    assert_eq!((size, chunk.as_slice()), (blob.size, &bytes[..CHUNK_BYTES]));
    assert_eq!(env.store.blob_get(&of_runner(cfq_proto::ids::LeaseId::fresh()), &blob.hash, 0).await.unwrap(), None);
    let chain = env.store.artifact_chain(fence.task, Some(1)).await.unwrap().unwrap();
    assert_eq!(chain.artifacts, vec![large]);
    let shown = env.store.count("select max(length(body::text))::bigint from events").await;
    assert!(shown < 40_000, "{shown}");
}
