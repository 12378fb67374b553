use cfq_proto::messages::{Heartbeat, HeldLease};
use cfq_scheduler_core::PendingReason;

use super::*;

#[tokio::test]
async fn time_without_a_node_for_the_model_survives_a_new_leader() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let no_node = PendingReason::NoNodeHasModel { model: MODEL.parse().unwrap() };
    assert!(r.env.store.explain(r.leadership, r.job.job, 1, &no_node, 123_456).await.unwrap());
    r.env.store.release_leadership(r.leadership).await.unwrap();
    let next = r.env.acquire_leadership().await;
    let row = r.env.store.live_jobs().await.remove(0);
    assert_eq!(row.no_node_ms, 123_456);
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    r.env.store.place(next, &order).await.unwrap().unwrap();
    assert_eq!(r.env.store.live_jobs().await[0].no_node_ms, 0);
}

#[tokio::test]
async fn job_is_as_old_as_its_task() {
    let r = running().await;
    r.env.store.raw("update tasks set created_at = now() - interval '1 hour'").await;
    let row = r.env.store.live_jobs().await.remove(0);
    let age_ms = r.env.store.clock_ms().await.unwrap() - row.created_ms;
    assert!((3_600_000..3_660_000).contains(&age_ms), "{age_ms}");
}

#[tokio::test]
async fn model_served_again_resets_the_noted_failure() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    r.env.store.note_unavailable(r.leadership, r.job.job, 1, "connection refused").await.unwrap();
    let unusable = PendingReason::Unusable { reasons: [(node(), "connection refused".into())].into() };
    let first = async |pending: &PendingReason| {
        assert!(r.env.store.explain(r.leadership, r.job.job, 1, pending, 0).await.unwrap());
        r.env.store.live_jobs().await[0].first_failure_ms
    };
    assert!(first(&unusable).await.is_some());
    assert!(first(&PendingReason::NoNodeUp).await.is_some(), "a node that is gone does not serve the model");
    assert_eq!(first(&PendingReason::Capacity).await, None);
}

/// Working time of the job as the runner sees it, in ms.
async fn worked(r: &Running) -> u64 {
    view_of(&r.env, r.job.job).await.running_ms
}

#[tokio::test]
async fn working_time_starts_at_the_first_token_and_stops_while_pending() {
    let mut r = running().await;
    let minutes = |n: u64| n * 60_000 - 5_000..n * 60_000 + 60_000;
    r.env.store.raw("update jobs set accepted_at = accepted_at - interval '20 minutes'").await;
    assert_eq!(worked(&r).await, 0, "a long prompt without a first token");
    r.env.store.record_first_token(&r.job).await.unwrap();
    assert!(worked(&r).await < 60_000, "from the first token, not from the acceptance");
    r.env.store.raw("update tasks set first_token_at = first_token_at - interval '3 minutes'").await;
    assert!(minutes(3).contains(&worked(&r).await));
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    assert!(minutes(3).contains(&worked(&r).await));
    // Neither queued nor placed time is working time.
    r.env.store.raw("update tasks set first_token_at = first_token_at - interval '30 minutes'").await;
    r.job = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    assert!(minutes(3).contains(&worked(&r).await));
    // The next attempt's prefill counts: the task has had its first token.
    accept(&r.env, r.job, r.node).await;
    r.env.store.raw("update jobs set accepted_at = accepted_at - interval '2 minutes'").await;
    assert!(minutes(5).contains(&worked(&r).await));
    report(&r.env, r.job, r.node, done("x")).await;
    assert!(minutes(5).contains(&worked(&r).await));
}

#[tokio::test]
async fn completion_starts_the_working_time_if_all_token_frames_were_lost() {
    let r = running().await;
    r.env.store.raw("update jobs set accepted_at = accepted_at - interval '10 minutes'").await;
    let Outcome::Done { completion: Payload::Inline(mut completion) } = done("x") else { panic!("done") };
    completion.usage.first_token_ms = 4 * 60_000;
    let outcome = Outcome::Done { completion: Payload::Inline(completion) };
    assert_eq!(report(&r.env, r.job, r.node, outcome).await, FenceReply::Committed);
    assert!((6 * 60_000 - 1_000..7 * 60_000).contains(&worked(&r).await), "ten minutes less the four before it");
}

#[tokio::test]
async fn empty_heartbeat_and_heartbeat_of_an_unknown_boot_are_answered() {
    let r = running().await;
    let held = vec![HeldLease { lease: r.task.lease, step_age_ms: 0 }];
    let heartbeat = |boot, held| Heartbeat { boot, held, ledger: None, devices: None };
    let known = r.env.store.record_runner_heartbeat(&runner(), &heartbeat(r.runner, vec![])).await.unwrap();
    assert!(!known.register_again && known.extended.is_empty() && known.lost.is_empty(), "{known:?}");
    let unknown_boot = r.env.store.record_runner_heartbeat(&runner(), &heartbeat(BootId::fresh(), held)).await.unwrap();
    assert!(unknown_boot.register_again && unknown_boot.lost == vec![r.task.lease], "{unknown_boot:?}");
}
