//! Tests of pause and resume.

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskId;
use cfq_proto::loop_step::{ActionKind, EscalationAction};
use cfq_proto::messages::{Abandon, Release};
use cfq_proto::task::{Agent, TaskState};

use super::super::{Cancelled, Hint, PauseOutcome, Resolution, ResumeOutcome};
use super::loops::{self, decided, reviewed};
use super::*;

async fn pause(env: &TestEnv, task: TaskId) -> PauseOutcome {
    env.store.pause(task, "me", Run::Commit).await.unwrap()
}

/// Resumes the task and returns its new state.
async fn resume(env: &TestEnv, task: TaskId) -> TaskState {
    match env.store.resume(task, "me", Run::Commit).await.unwrap() {
        ResumeOutcome::Done { state, .. } | ResumeOutcome::Withdrawn { state, .. } => state,
        other => panic!("{other:?}"),
    }
}

async fn detail(env: &TestEnv, task: TaskId) -> TaskDetail {
    env.store.task_detail(task).await.unwrap().unwrap()
}

async fn state(env: &TestEnv, task: TaskId) -> TaskState {
    detail(env, task).await.summary.state
}

#[tokio::test]
async fn pause_queues_the_running_job_again_and_counts_nothing() {
    let r = running().await;
    let PauseOutcome::Done { hints, .. } = pause(&r.env, r.task.task).await else { panic!("paused") };
    assert!(hints.iter().any(|hint| matches!(hint, Hint::CancelJob { fence, .. } if *fence == r.job)));
    assert!(hints.iter().any(|hint| matches!(hint, Hint::CancelTask { fence, .. } if *fence == r.task)));
    let task = detail(&r.env, r.task.task).await;
    assert_eq!((task.summary.state, task.reason.as_str(), task.runner), (TaskState::Paused, "paused by me", None));
    let paused = &task.jobs[0];
    assert_eq!((paused.state, paused.losses, paused.unaccepted, paused.failures), (JobState::Queued, 0, 0, 0));
    assert_eq!(paused.placement, "the task is paused");
    assert_eq!(r.env.store.count("select count(*) from tasks where losses = 0 and lease is null").await, 1);
    assert_eq!(r.env.store.count("select count(*) from attempts where outcome = 'released'").await, 1);

    // Nothing works on it: the planner does not see the job, a stale plan is rejected, and the old holders are fenced off.
    assert_eq!(r.env.store.live_jobs().await, vec![]);
    assert!(r.env.store.live_job_versions().await.unwrap().is_empty());
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    assert!(r.env.store.place(r.leadership, &order).await.unwrap().is_none());
    let failure = cfq_proto::job::JobFailure::Unavailable { reason: "x".into() };
    assert!(r.env.store.fail_queued(r.leadership, r.job.job, 1, &failure).await.unwrap().is_none());
    assert_eq!(step(&r.env, r.task, 0, started()).await, StepReply::Stale);
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(grant_reply(&r.env, r.runner).await, LeaseReply::None);
    assert!(matches!(pause(&r.env, r.task.task).await, PauseOutcome::Already { .. }));

    // The same job continues as the next attempt.
    assert_eq!(resume(&r.env, r.task.task).await, TaskState::Ready);
    assert_eq!(r.env.store.live_jobs().await.len(), 1);
    let fence = grant(&r.env, r.runner).await.fence;
    assert_eq!(job(&r.env, fence).await.id, r.job.job);
    assert_eq!(place(&r.env, r.leadership, r.job.job, r.node).await.fence.attempt, 2);
}

#[tokio::test]
async fn time_of_a_pause_counts_toward_no_limit_of_the_job() {
    let r = running().await;
    pause(&r.env, r.task.task).await;
    r.env
        .store
        .raw(
            r#"update jobs set no_node_ms = 1000000, first_failure_at = now() - interval '1 day',
                      node_failures = '{"den": {"failures": 3, "until_ms": 99999999999999}}'"#,
        )
        .await;
    resume(&r.env, r.task.task).await;
    let job = r.env.store.live_jobs().await.remove(0);
    assert_eq!((job.no_node_ms, job.first_failure_ms), (0, None));
    assert!(job.node_failures.0.is_empty());
}

#[tokio::test]
async fn pause_during_a_step_takes_effect_when_the_step_is_committed() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (task, _) = env.submit().await;
    let fence = grant(&env, boot).await.fence;
    assert!(matches!(pause(&env, task).await, PauseOutcome::AfterStep { .. }));
    assert!(matches!(pause(&env, task).await, PauseOutcome::Already { state: TaskState::Running, .. }));
    let shown = detail(&env, task).await;
    assert_eq!(shown.summary.state, TaskState::Running);
    assert!(shown.reason.contains("will be paused after the running step"), "{}", shown.reason);
    let StepReply::Committed { release, .. } = step(&env, fence, 0, started()).await else { panic!("committed") };
    assert!(release);
    assert_eq!(state(&env, task).await, TaskState::Paused);
    let repeated = step(&env, fence, 0, started()).await;
    assert!(matches!(repeated, StepReply::Committed { release: true, .. }), "{repeated:?}");
    // The committed step is kept, and the request does not apply again.
    assert_eq!(resume(&env, task).await, TaskState::Ready);
    let next = grant(&env, boot).await;
    assert_eq!(next.steps.len(), 1);
    let StepReply::Committed { release, .. } = step(&env, next.fence, 1, generated(artifact(1))).await else {
        panic!("committed")
    };
    assert!(!release);
}

#[tokio::test]
async fn requested_pause_takes_effect_before_a_job_and_at_every_end_of_the_lease() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (task, _) = env.submit().await;
    for end in ["job", "release", "abandon"] {
        let fence = grant(&env, boot).await.fence;
        assert!(matches!(pause(&env, task).await, PauseOutcome::AfterStep { .. }), "{end}");
        match end {
            "job" => {
                let (reply, _) = env.store.submit_job(&runner(), &submit_job(fence, 0)).await.unwrap();
                assert_eq!(reply, JobReply::Stale);
                assert_eq!(env.store.count("select count(*) from jobs").await, 0);
            }
            "release" => {
                let release = Release { fence, waits_for: None };
                assert_eq!(env.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed);
                assert_eq!(env.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed);
            }
            _ => {
                let request = Abandon { fence, reason: "broken".into() };
                assert_eq!(env.store.abandon(&runner(), &request).await.unwrap().0, FenceReply::Committed);
            }
        }
        assert_eq!(state(&env, task).await, TaskState::Paused, "{end}");
        assert_eq!(resume(&env, task).await, TaskState::Ready, "{end}");
    }
}

#[tokio::test]
async fn resume_withdraws_a_pause_that_has_not_taken_effect() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (task, _) = env.submit().await;
    let fence = grant(&env, boot).await.fence;
    pause(&env, task).await;
    assert_eq!(resume(&env, task).await, TaskState::Running);
    let StepReply::Committed { release, .. } = step(&env, fence, 0, started()).await else { panic!("committed") };
    assert!(!release);
    assert_eq!(state(&env, task).await, TaskState::Running);
    let again = env.store.resume(task, "me", Run::Commit).await.unwrap();
    assert!(matches!(again, ResumeOutcome::NotPaused { .. }), "{again:?}");
}

#[tokio::test]
async fn held_hand_off_can_be_paused_and_waits_for_its_answer_again_after_the_resume() {
    let (env, _, fence) = reviewed(None).await;
    let task = fence.task;
    env.store
        .raw(
            "update tasks set state = 'waiting_on_human', lease = null, lease_expires = null;
             insert into questions (id, task, text, reason, actions, recommendation)
             select id, id, 'q', '\"workflow_error\"', '[]', 'r' from tasks",
        )
        .await;
    assert!(matches!(pause(&env, task).await, PauseOutcome::Done { .. }));
    assert_eq!(resume(&env, task).await, TaskState::WaitingOnHuman);
}

#[tokio::test]
async fn ended_and_escalated_tasks_cannot_be_paused_and_a_paused_one_can_be_cancelled() {
    let env = TestEnv::new().await;
    let (task, _) = env.submit().await;
    for state in TaskState::ALL.into_iter().filter(|s| s.is_terminal() || *s == TaskState::Escalated) {
        env.store.raw(&format!("update tasks set state = '{state}'")).await;
        assert!(matches!(pause(&env, task).await, PauseOutcome::Refused { .. }), "{state}");
    }
    env.store.raw("update tasks set state = 'ready'").await;
    pause(&env, task).await;
    assert!(matches!(env.store.cancel(task, "me", Run::Commit).await.unwrap(), Cancelled::Done { .. }));
    let late = env.store.resume(task, "me", Run::Commit).await.unwrap();
    assert!(matches!(late, ResumeOutcome::NotPaused { state: TaskState::Cancelled, .. }), "{late:?}");
}

#[tokio::test]
async fn pause_requested_before_a_question_takes_effect_after_the_answer() {
    let escalate = || decided(1, loops::escalate(vec![ActionKind::SwitchLlm]), Some(1));
    let switch = EscalationAction::SwitchLlm { target_agent: Agent::Alpha, suggested_model: None };
    let (env, boot, fence) = reviewed(None).await;
    let task = fence.task;
    assert!(matches!(pause(&env, task).await, PauseOutcome::AfterStep { .. }));
    committed(&env, fence, 4, escalate()).await;
    assert_eq!(state(&env, task).await, TaskState::Escalated);
    let answered = env.store.resolve(task, None, &switch, "me").await.unwrap();
    assert!(matches!(answered, Resolution::Done { state: TaskState::Paused, .. }), "{answered:?}");
    assert_eq!(grant_reply(&env, boot).await, LeaseReply::None);
    assert_eq!(resume(&env, task).await, TaskState::Ready);

    // The request can be withdrawn while the question is open.
    let (env, boot, fence) = reviewed(None).await;
    let task = fence.task;
    pause(&env, task).await;
    committed(&env, fence, 4, escalate()).await;
    let reason = detail(&env, task).await.reason;
    assert!(reason.ends_with("(after the answer: paused by me)"), "{reason}");
    assert!(matches!(pause(&env, task).await, PauseOutcome::Already { state: TaskState::Escalated, .. }));
    assert_eq!(resume(&env, task).await, TaskState::Escalated);
    assert_eq!(detail(&env, task).await.reason, reason.replace(" (after the answer: paused by me)", ""));
    let answered = env.store.resolve(task, None, &switch, "me").await.unwrap();
    assert!(matches!(answered, Resolution::Done { state: TaskState::Ready, .. }), "{answered:?}");
    assert_eq!(grant(&env, boot).await.fence.task, task);
}
