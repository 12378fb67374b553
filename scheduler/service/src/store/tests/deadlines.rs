use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::{ActionKind, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::{Quarantine, ReviewFeedback};
use cfq_proto::task::TaskState;
use cfq_proto::task_ref::TaskRef;

use super::super::{Hint, Resolution, Submitted};
use super::*;

const PASSED: &str = "update tasks set deadline = now() - interval '1 second'";

/// Commits the steps of one generated and checked iteration.
async fn checked_iteration(env: &TestEnv, fence: TaskFence, quarantine: Option<Quarantine>) {
    committed(env, fence, 0, started()).await;
    committed(env, fence, 1, generated(artifact(1))).await;
    committed(env, fence, 2, Step::Checked { iteration: 1, findings: vec![], quarantine, ran: vec![] }).await;
}

async fn states(env: &TestEnv, fence: TaskFence) -> (TaskState, LoopState, String) {
    let detail = env.store.task_detail(fence.task).await.unwrap().unwrap();
    (detail.summary.state, detail.summary.loop_state, detail.reason)
}

#[tokio::test]
async fn overdue_running_task_escalates_and_cancels_its_job_and_runner() {
    let r = running().await;
    checked_iteration(&r.env, r.task, None).await;
    assert_eq!(r.env.store.sweep_deadlines(r.leadership).await.unwrap(), vec![], "no deadline is set");
    r.env.store.raw("update tasks set deadline = now() + interval '1 hour'").await;
    assert_eq!(r.env.store.sweep_deadlines(r.leadership).await.unwrap(), vec![], "the deadline has not passed");
    r.env.store.raw(PASSED).await;
    let hints = r.env.store.sweep_deadlines(r.leadership).await.unwrap();
    assert!(hints.contains(&Hint::CancelJob { node: node(), fence: r.job }), "{hints:?}");
    assert!(hints.contains(&Hint::CancelTask { runner: runner(), fence: r.task }), "{hints:?}");
    let (state, loop_state, reason) = states(&r.env, r.task).await;
    assert_eq!((state, loop_state), (TaskState::Escalated, LoopState::Escalated));
    assert!(reason.contains("deadline"), "{reason}");
    let detail = r.env.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!((detail.best_iteration, detail.runner), (Some(1), None));
    let escalation = detail.escalation.unwrap();
    assert_eq!(escalation.reason, EscalationReason::TimeoutExceeded);
    assert!(escalation.available_actions.contains(&ActionKind::AcceptBestEffort));
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Cancelled);
    // A step that the task's runner commits after the escalation is stale.
    let review = ReviewFeedback { quality_score: 99.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
    let late = Step::Reviewed { iteration: 1, review, job: r.job.job, model: MODEL.into() };
    assert_eq!(step(&r.env, r.task, 3, late).await, StepReply::Stale);
    assert_eq!(r.env.store.sweep_deadlines(r.leadership).await.unwrap(), vec![], "escalated once");
}

#[tokio::test]
async fn answer_after_the_deadline_lifts_it() {
    let r = running().await;
    checked_iteration(&r.env, r.task, None).await;
    r.env.store.raw(PASSED).await;
    r.env.store.sweep_deadlines(r.leadership).await.unwrap();
    let retry = EscalationAction::RetryWithConstraints { additional_constraints: vec!["be quick".into()] };
    let resolved = r.env.store.resolve(r.task.task, None, &retry, "me").await.unwrap();
    assert!(matches!(resolved, Resolution::Done { state: TaskState::Ready, .. }), "{resolved:?}");
    let next = grant(&r.env, r.runner).await.fence;
    assert_eq!(r.env.store.sweep_deadlines(r.leadership).await.unwrap(), vec![]);
    // The answer may come after the sweep has found the task.
    assert_eq!(r.env.store.end_overdue(r.leadership, next.task).await.unwrap(), vec![]);
    assert_eq!(states(&r.env, next).await.0, TaskState::Running);
}

#[tokio::test]
async fn overdue_task_without_a_runner_ends() {
    let env = TestEnv::new().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    env.submit().await;
    let started_fence = grant(&env, boot).await.fence;
    checked_iteration(&env, started_fence, None).await;
    env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    env.store.sweep_now(leadership).await.unwrap();
    assert_eq!(states(&env, started_fence).await.0, TaskState::Ready);
    let (waiting, _) = env.submit().await;
    env.store.raw(PASSED).await;
    env.store.sweep_deadlines(leadership).await.unwrap();
    assert_eq!(states(&env, started_fence).await.0, TaskState::Escalated);
    let detail = env.store.task_detail(waiting).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("before a runner started the task"), "{}", detail.reason);
}

#[tokio::test]
async fn overdue_task_that_waits_for_its_time_or_for_another_task_fails() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let (first, _) = env.submit().await;
    let mut blocked = crate::testing::new_task(None);
    blocked.spec.after = vec![TaskRef::Key(TaskKey::Id(first))];
    let mut queued = crate::testing::new_task(None);
    queued.spec.run_at = Some(env.store.clock_ms().await.unwrap() / 1000 + 3600);
    let submitted = env.store.submit_batch(&[blocked.clone(), queued.clone()]).await.unwrap();
    assert!(submitted.iter().all(|s| matches!(s, Submitted::Created { .. })), "{submitted:?}");
    env.store.raw("update tasks set deadline = now() - interval '1 second' where state in ('blocked', 'queued')").await;
    env.store.sweep_deadlines(leadership).await.unwrap();
    for task in [blocked.id, queued.id] {
        let detail = env.store.task_detail(task).await.unwrap().unwrap();
        assert_eq!(detail.summary.state, TaskState::Failed);
        assert!(detail.reason.contains("before a runner started the task"), "{}", detail.reason);
    }
    assert_eq!(env.store.task_detail(first).await.unwrap().unwrap().summary.state, TaskState::Ready);
}

#[tokio::test]
async fn pending_decisions_come_first_and_unreadable_tasks_are_skipped() {
    let env = TestEnv::new().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    let mut fences = Vec::new();
    for quarantine in [Some(Quarantine::Syntax), None, None] {
        env.submit().await;
        let fence = grant(&env, boot).await.fence;
        checked_iteration(&env, fence, quarantine).await;
        fences.push(fence);
    }
    let review = ReviewFeedback { quality_score: 99.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
    env.store.raw(&format!("update steps set seq = 7 where seq = 2 and task = '{}'", fences[1].task)).await;
    env.store.raw(PASSED).await;
    env.store.sweep_deadlines(leadership).await.unwrap();
    assert_eq!(states(&env, fences[0]).await.0, TaskState::Running, "its next step needs no model");
    assert_eq!(states(&env, fences[1]).await.0, TaskState::Running, "a gap in its steps");
    assert_eq!(states(&env, fences[2]).await.0, TaskState::Escalated);
    // This task was reviewed before the deadline: it is decided by the review and does not escalate.
    env.submit().await;
    let good = grant(&env, boot).await.fence;
    checked_iteration(&env, good, None).await;
    committed(&env, good, 3, Step::Reviewed { iteration: 1, review, job: JobId::fresh(), model: MODEL.into() }).await;
    env.store.raw(PASSED).await;
    env.store.sweep_deadlines(leadership).await.unwrap();
    assert_eq!(states(&env, good).await.0, TaskState::Running);
}
