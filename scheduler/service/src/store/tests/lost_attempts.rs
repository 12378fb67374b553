use cfq_proto::messages::{Heartbeat, HeldLease, NodeRegistration};
use cfq_scheduler_core::UnreportedEnd;

use super::*;
use crate::testing::node_registration;

const EXPIRE: &str = "update jobs set lease_expires = now() - interval '1 second' where state = 'running'";
const NODE_SILENT: &str = "update nodes set last_seen = now() - interval '1 minute'";

/// Losses, attempts that were not accepted, and suspicions of a job.
async fn counts(env: &TestEnv, job: JobId) -> [i64; 3] {
    let count = |column: &'static str| {
        let sql = format!("select {column}::bigint from jobs where id = '{job}'");
        async move { env.store.count(&sql).await }
    };
    [count("losses").await, count("unaccepted").await, count("suspicions").await]
}

/// Submits a second task and places its job on the node.
async fn place_another(r: &Running) -> JobFence {
    r.env.submit().await;
    let task = grant(&r.env, r.runner).await.fence;
    let id = job(&r.env, task).await.id;
    place(&r.env, r.leadership, id, r.node).await.fence
}

/// Registers a boot of the node's process on a machine that was started as `machine`.
async fn join_node_on(env: &TestEnv, machine: &str) -> BootId {
    let boot = BootId::fresh();
    let registration = NodeRegistration { machine_boot: Some(machine.into()), ..node_registration(boot) };
    env.store.register_node(&registration).await.unwrap().unwrap();
    boot
}

async fn unaccepted(r: &Running, fence: JobFence) {
    let reason = "den is alive but did not accept the job";
    r.env.store.unplace(r.leadership, fence, UnreportedEnd::NotAccepted, reason).await.unwrap().unwrap();
}

#[tokio::test]
async fn job_that_no_node_accepts_is_dead_with_the_evidence() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    for _ in 0..4 {
        assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
        let fence = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
        unaccepted(&r, fence).await;
    }
    let dead = view_of(&r.env, r.job.job).await;
    assert_eq!((dead.state, counts(&r.env, r.job.job).await), (JobState::Dead, [0, 4, 4]));
    let reason = dead.failure.unwrap().to_string();
    assert!(reason.contains("was not accepted by its node 4 times"), "{reason}");
    assert!(reason.contains("attempt 5 on den: unplaced (den is alive but did not accept the job) at 2"), "{reason}");
}

#[tokio::test]
async fn job_that_crashes_its_node_before_it_is_accepted_is_dead() {
    let mut r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    for _ in 0..4 {
        place(&r.env, r.leadership, r.job.job, r.node).await;
        r.node = r.env.join_node().await;
    }
    let dead = view_of(&r.env, r.job.job).await;
    assert_eq!((dead.state, counts(&r.env, r.job.job).await), (JobState::Dead, [0, 4, 4]));
    let reason = dead.failure.unwrap().to_string();
    assert!(reason.contains("den stopped unexpectedly and was restarted before it accepted the job"), "{reason}");
}

#[tokio::test]
async fn generating_job_is_not_suspected_beside_one_that_starts() {
    let r = running().await;
    assert!(r.env.store.record_first_token(&r.job).await.unwrap());
    let starting = place_another(&r).await;
    let node = r.env.join_node().await;
    assert_eq!(counts(&r.env, r.job.job).await, [1, 0, 0], "it was lost, but had already generated text");
    assert_eq!(counts(&r.env, starting.job).await, [0, 1, 1]);
    // The same loss, noticed by the expiry of the leases: first that of the generating job.
    let fence = place(&r.env, r.leadership, r.job.job, node).await.fence;
    assert_eq!(accept(&r.env, fence, node).await, FenceReply::Committed);
    assert!(r.env.store.record_first_token(&fence).await.unwrap());
    let starting = place(&r.env, r.leadership, starting.job, node).await.fence;
    r.env.store.raw(NODE_SILENT).await;
    r.env.store.raw(EXPIRE).await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    r.env.store.unplace(r.leadership, starting, UnreportedEnd::NodeLost, "den was lost").await.unwrap().unwrap();
    assert_eq!(counts(&r.env, r.job.job).await, [2, 0, 0]);
    assert_eq!(counts(&r.env, starting.job).await, [0, 2, 2]);
    // Alone on its node, the generating job is suspected.
    let fence = place(&r.env, r.leadership, r.job.job, node).await.fence;
    assert_eq!(accept(&r.env, fence, node).await, FenceReply::Committed);
    r.env.store.raw("update attempts set ended_at = now() - interval '1 hour' where ended_at is not null").await;
    r.env.join_node().await;
    assert_eq!(counts(&r.env, r.job.job).await, [3, 0, 1]);
}

#[tokio::test]
async fn order_behind_a_blocking_one_is_not_suspected() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let blocking = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    let behind = place_another(&r).await;
    unaccepted(&r, blocking).await;
    unaccepted(&r, behind).await;
    assert_eq!(counts(&r.env, blocking.job).await, [0, 1, 1]);
    assert_eq!(counts(&r.env, behind.job).await, [0, 1, 0]);
    // Once the node accepts work again, each unaccepted order speaks for itself.
    let other = place_another(&r).await;
    assert_eq!(accept(&r.env, other, r.node).await, FenceReply::Committed);
    let behind = place(&r.env, r.leadership, behind.job, r.node).await.fence;
    unaccepted(&r, behind).await;
    assert_eq!(counts(&r.env, behind.job).await, [0, 2, 1]);
}

#[tokio::test]
async fn stalled_job_on_a_live_node_is_suspected() {
    let r = running().await;
    r.env.store.raw(EXPIRE).await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(counts(&r.env, r.job.job).await, [1, 0, 1]);
    let detail = "select count(*) from attempts where suspicion = 'stalled' and detail like '%completed no step%'";
    assert_eq!(r.env.store.count(detail).await, 1);
}

#[tokio::test]
async fn restarted_machine_clean_stop_and_returned_node_make_no_job_suspicious() {
    let r = running().await;
    let rerun = async |boot| {
        let fence = place(&r.env, r.leadership, r.job.job, boot).await.fence;
        assert_eq!(accept(&r.env, fence, boot).await, FenceReply::Committed);
        fence
    };
    // The machine was restarted before the lease expired.
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let boot = join_node_on(&r.env, "monday").await;
    rerun(boot).await;
    let boot = join_node_on(&r.env, "tuesday").await;
    assert_eq!(counts(&r.env, r.job.job).await, [0, 0, 0]);
    // The lease expires while the machine is being restarted: the suspicion is withdrawn afterwards.
    rerun(boot).await;
    r.env.store.raw(NODE_SILENT).await;
    r.env.store.raw(EXPIRE).await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(counts(&r.env, r.job.job).await, [1, 0, 1]);
    let boot = join_node_on(&r.env, "wednesday").await;
    assert_eq!(counts(&r.env, r.job.job).await, [1, 0, 0]);
    // The node was only disconnected, and still works on the job.
    let fence = rerun(boot).await;
    r.env.store.raw(NODE_SILENT).await;
    r.env.store.raw(EXPIRE).await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(counts(&r.env, r.job.job).await, [2, 0, 1]);
    let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
    let heartbeat = Heartbeat { boot, held, ledger: None, devices: None };
    let reply = r.env.store.record_node_heartbeat(&node(), &heartbeat).await.unwrap();
    assert_eq!((reply.lost, counts(&r.env, r.job.job).await), (vec![fence.lease], [2, 0, 0]));
    // The node was stopped cleanly, but its report was lost.
    rerun(boot).await;
    r.env.store.raw("update nodes set ledger = (ledger::jsonb || '{\"draining\":true}')::json").await;
    let boot = join_node_on(&r.env, "wednesday").await;
    assert_eq!(counts(&r.env, r.job.job).await, [2, 0, 0]);
    // A crash of the process alone is suspicious.
    rerun(boot).await;
    join_node_on(&r.env, "wednesday").await;
    assert_eq!(counts(&r.env, r.job.job).await, [3, 0, 1]);
}

#[tokio::test]
async fn losses_and_unaccepted_attempts_are_limited_together() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    r.env.store.raw("update jobs set losses = 19").await;
    for state in [JobState::Queued, JobState::Dead] {
        let fence = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
        let ended = r.env.store.unplace(r.leadership, fence, UnreportedEnd::NodeLost, "den was lost").await;
        assert!(ended.unwrap().is_some());
        assert_eq!(state_of(&r.env, r.job.job).await, state);
    }
    assert_eq!(counts(&r.env, r.job.job).await, [19, 2, 2]);
}

#[tokio::test]
async fn ends_because_of_the_infrastructure_are_not_counted() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    r.env.store.raw("update jobs set losses = 20").await;
    for _ in 0..3 {
        let fence = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
        let end = UnreportedEnd::Infrastructure;
        assert!(r.env.store.unplace(r.leadership, fence, end, "the order was not stored").await.unwrap().is_some());
        assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
    }
    assert_eq!(counts(&r.env, r.job.job).await, [20, 0, 0]);
}
