//! Tests of tasks that are taken back from their runners, and of tasks that no runner holds while their job waits for a
//! placement.

use cfq_proto::loop_step::{ActionKind, Decision, LoopState};
use cfq_proto::messages::{Abandon, Heartbeat, HeldLease, Release};
use cfq_proto::pr::PrState;
use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;

use super::loops::{decided, reviewed};
use super::*;
use crate::store::Hint;
use crate::testing::runner_registration;

/// Makes the task lose one runner more than permitted, and returns the task after that.
async fn lose_last_runner(env: &TestEnv, fence: TaskFence) -> cfq_proto::http::TaskDetail {
    env.store.raw("update tasks set losses = 1000").await;
    let request = Abandon { fence, reason: "its disk is broken".into() };
    assert_eq!(env.store.abandon(&runner(), &request).await.unwrap().0, FenceReply::Committed);
    let detail = env.store.task_detail(fence.task).await.unwrap().unwrap();
    assert!(detail.reason.contains("its disk is broken"), "{}", detail.reason);
    assert_eq!(detail.runner, None);
    detail
}

#[tokio::test]
async fn task_without_a_result_fails_by_a_step_and_its_jobs_end() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    let detail = lose_last_runner(&r.env, r.task).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::Failed, LoopState::Failed));
    assert_eq!(r.env.store.count("select count(*) from steps where kind = 'decided'").await, 1);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Cancelled);
}

#[tokio::test]
async fn task_with_a_result_escalates_and_offers_best_effort() {
    let (env, _, fence) = reviewed(None).await;
    let detail = lose_last_runner(&env, fence).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::Escalated, LoopState::Escalated));
    let escalation = detail.escalation.unwrap();
    assert!(escalation.available_actions.contains(&ActionKind::AcceptBestEffort), "{escalation:?}");
}

#[tokio::test]
async fn task_with_a_dangerous_result_escalates_instead_of_failing() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    env.submit().await;
    let fence = grant(&env, boot).await.fence;
    committed(&env, fence, 0, started()).await;
    committed(&env, fence, 1, generated(artifact(1))).await;
    let quarantine = Some(Quarantine::Dangerous);
    committed(&env, fence, 2, Step::Checked { iteration: 1, findings: vec![], quarantine, ran: vec![] }).await;
    let detail = lose_last_runner(&env, fence).await;
    assert_eq!(detail.summary.state, TaskState::Escalated);
    assert!(!detail.escalation.unwrap().available_actions.contains(&ActionKind::AcceptBestEffort));
}

#[tokio::test]
async fn hand_off_is_held_with_its_pull_request_open() {
    let (env, _, fence) = reviewed(None).await;
    committed(&env, fence, 4, decided(1, Decision::Converged, Some(1))).await;
    let pr = Step::PrOpened { head: "c1".into(), base: "b0".into(), branch: "worker-1/task-1".into() };
    let pr = committed(&env, fence, 5, pr).await.unwrap();
    let detail = lose_last_runner(&env, fence).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::WaitingOnHuman, LoopState::Converged));
    assert_eq!(env.store.pr(pr).await.unwrap().unwrap().state, PrState::PendingQc);
    assert!(detail.escalation.is_some(), "a question is open");
}

#[tokio::test]
async fn task_with_unreadable_steps_still_ends() {
    let (env, _, fence) = reviewed(None).await;
    env.store.raw("update steps set step = '{}' where seq = 1").await;
    env.store.raw("update tasks set losses = 1000").await;
    let request = Abandon { fence, reason: "a step that this version does not know".into() };
    env.store.abandon(&runner(), &request).await.unwrap();
    let ended = "select count(*) from tasks where state = 'failed' and loop_state = 'failed' and lease is null";
    assert_eq!(env.store.count(ended).await, 1);
}

async fn heartbeat(env: &TestEnv, boot: BootId, lease: cfq_proto::ids::LeaseId, step_age_ms: u64) {
    let heartbeat = Heartbeat { boot, held: vec![HeldLease { lease, step_age_ms }], ledger: None, devices: None };
    env.store.record_runner_heartbeat(&runner(), &heartbeat).await.unwrap();
}

const EXPIRE: &str = "update tasks set lease_expires = now() - interval '1 second'";

#[tokio::test]
async fn task_of_stalling_runners_fails_after_four_grants() {
    let env = TestEnv::new().await;
    let (id, _) = env.submit().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    for round in 1..=4 {
        assert_ne!(env.store.task_detail(id).await.unwrap().unwrap().summary.state, TaskState::Failed, "{round}");
        let fence = grant(&env, boot).await.fence;
        heartbeat(&env, boot, fence.lease, 0).await;
        heartbeat(&env, boot, fence.lease, 601_000).await;
        env.store.raw(EXPIRE).await;
        env.store.sweep_now(leadership).await.unwrap();
    }
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("completed no step in 600 s"), "{}", detail.reason);
}

#[tokio::test]
async fn lost_grant_or_resumed_progress_is_not_a_stall() {
    let env = TestEnv::new().await;
    let (id, _) = env.submit().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    let losses = "select losses::bigint from tasks";
    grant(&env, boot).await;
    env.store.raw("update runners set last_seen = now()").await;
    env.store.raw(EXPIRE).await;
    env.store.sweep_now(leadership).await.unwrap();
    assert_eq!(env.store.count(losses).await, 1, "the reply was lost, and the runner sends heartbeats");
    let fence = grant(&env, boot).await.fence;
    heartbeat(&env, boot, fence.lease, 601_000).await;
    heartbeat(&env, boot, fence.lease, 0).await;
    env.store.raw(EXPIRE).await;
    env.store.sweep_now(leadership).await.unwrap();
    assert_eq!(env.store.count(losses).await, 2);
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert!(detail.reason.contains("did not renew its lease"), "{}", detail.reason);
}

#[tokio::test]
async fn task_that_cannot_be_reclaimed_does_not_block_registration() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    env.submit().await;
    let bad = grant(&env, boot).await.fence;
    env.submit().await;
    let good = grant(&env, boot).await.fence;
    env.store.raw("alter table tasks add constraint broken check (number <> 1 or losses = 0)").await;
    let registration = runner_registration(BootId::fresh());
    assert!(env.store.register_runner(&registration).await.unwrap().is_ok(), "registered");
    assert_eq!(grant(&env, registration.boot).await.fence.task, good.task);
    let detail = env.store.task_detail(bad.task).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Running, "it is skipped");
}

#[tokio::test]
async fn task_waiting_for_its_job_is_granted_once_a_node_accepts_it() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let pending = cfq_scheduler_core::PendingReason::NoNodeUp;
    r.env.store.explain(r.leadership, r.job.job, 1, &pending, 0).await.unwrap();
    let request = Release { fence: r.task, waits_for: Some(r.job.job) };
    assert_eq!(r.env.store.release(&runner(), &request).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.env.store.release(&runner(), &request).await.unwrap().0, FenceReply::Committed, "repeated");
    let detail = r.env.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!((detail.summary.state, detail.reason.as_str()), (TaskState::Ready, "waits: no node is running"));
    assert_eq!(grant_reply(&r.env, r.runner).await, LeaseReply::None);
    // When the reason of its job changes, the task shows the new reason without a write to the task's row.
    let pending = cfq_scheduler_core::PendingReason::Capacity;
    r.env.store.explain(r.leadership, r.job.job, 1, &pending, 0).await.unwrap();
    let detail = r.env.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!(detail.reason, "waits for free capacity on a node");
    // Another task is granted meanwhile.
    let (other, _) = r.env.submit().await;
    assert_eq!(grant(&r.env, r.runner).await.fence.task, other);
    let placed = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    assert_eq!(grant_reply(&r.env, r.runner).await, LeaseReply::None, "the node may yet refuse");
    let request = Accept { fence: placed, boot: r.node };
    let (reply, hints) = r.env.store.accept(&node(), &request).await.unwrap();
    assert_eq!(reply, FenceReply::Committed);
    assert!(hints.contains(&Hint::TaskReady), "{hints:?}");
    let again = grant(&r.env, r.runner).await.fence;
    assert_eq!((again.task, again.attempt), (r.task.task, r.task.attempt + 1));
    assert_eq!(job(&r.env, again).await.id, r.job.job, "the same job continues");
    let detail = r.env.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!(detail.reason, "", "it does not wait any more");
    assert_eq!(r.env.store.count("select losses::bigint from tasks order by number limit 1").await, 0);
}

#[tokio::test]
async fn task_whose_pending_job_fails_is_granted_again() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let request = Release { fence: r.task, waits_for: Some(r.job.job) };
    r.env.store.release(&runner(), &request).await.unwrap();
    let failure = cfq_proto::job::JobFailure::Unavailable { reason: "down".into() };
    let hints = r.env.store.fail_queued(r.leadership, r.job.job, 1, &failure).await.unwrap().unwrap();
    assert!(hints.contains(&Hint::TaskReady), "{hints:?}");
    assert_eq!(grant(&r.env, r.runner).await.fence.task, r.task.task);
}

#[tokio::test]
async fn leases_from_before_the_clock_was_set_back_expire() {
    let r = running().await;
    r.env.store.raw("update jobs set lease_expires = now() + interval '1 hour'").await;
    r.env.store.raw("update tasks set lease_expires = now() + interval '1 hour'").await;
    let (_, jobs, tasks) = r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!((jobs, tasks), (1, 1));
    r.env.store.raw("update leader set expires_at = now() + interval '1 hour'").await;
    assert!(r.env.store.acquire_leadership(uuid::Uuid::now_v7(), true).await.unwrap().is_some());
}
