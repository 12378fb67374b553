use cfq_proto::messages::{Beat, Held};
use cfq_scheduler_core::Waiting;

use super::*;

#[tokio::test]
async fn how_long_no_node_had_the_model_is_kept_for_the_next_leader_until_one_has_it() {
    let r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    let no_node = Waiting::NoNode { model: MODEL.parse().unwrap() };
    assert!(r.lab.store.explain(r.lead, r.job.job, 1, &no_node, 123_456).await.unwrap());
    r.lab.store.yield_lead(r.lead).await.unwrap();
    let next = r.lab.lead().await;
    let (row, _) = r.lab.store.live_jobs().await.unwrap().remove(0);
    assert_eq!(row.no_node_ms, 123_456);
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    r.lab.store.place(next, &order).await.unwrap().unwrap();
    assert_eq!(r.lab.store.live_jobs().await.unwrap()[0].0.no_node_ms, 0);
}

#[tokio::test]
async fn a_model_that_is_served_again_ends_what_was_noted() {
    let r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    r.lab.store.note_unavailable(r.lead, r.job.job, 1, "connection refused").await.unwrap();
    let unusable = Waiting::Unusable { reasons: "den: connection refused".into() };
    let first = async |waiting: &Waiting| {
        assert!(r.lab.store.explain(r.lead, r.job.job, 1, waiting, 0).await.unwrap());
        r.lab.store.live_jobs().await.unwrap()[0].0.first_failure_ms
    };
    assert!(first(&unusable).await.is_some());
    assert!(first(&Waiting::NoNodeUp).await.is_some(), "a node that went away has not answered");
    assert_eq!(first(&Waiting::Room).await, None);
}

/// Working time of the job, as the runner sees it.
async fn worked(r: &Running) -> u64 {
    view_of(&r.lab, r.job.job).await.running_ms
}

#[tokio::test]
async fn working_time_runs_from_the_tasks_first_token_and_not_while_it_waits() {
    let mut r = running().await;
    let minutes = |n: u64| n * 60_000 - 5_000..n * 60_000 + 60_000;
    r.lab.store.raw("update jobs set accepted_at = accepted_at - interval '20 minutes'").await;
    assert_eq!(worked(&r).await, 0, "a long prompt that nobody has begun to answer");
    r.lab.store.first_token(&r.job).await.unwrap();
    assert!(worked(&r).await < 60_000, "from the first token, not from the acceptance");
    r.lab.store.raw("update tasks set first_token_at = first_token_at - interval '3 minutes'").await;
    assert!(minutes(3).contains(&worked(&r).await));
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    assert!(minutes(3).contains(&worked(&r).await));
    // Waiting for placement, then placed: nobody works on it.
    r.lab.store.raw("update tasks set first_token_at = first_token_at - interval '30 minutes'").await;
    r.job = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    assert!(minutes(3).contains(&worked(&r).await));
    // The next attempt reads the prompt again: that is work, the task's time runs.
    accept(&r.lab, r.job, r.node).await;
    r.lab.store.raw("update jobs set accepted_at = accepted_at - interval '2 minutes'").await;
    assert!(minutes(5).contains(&worked(&r).await));
    report(&r.lab, r.job, r.node, done("x")).await;
    assert!(minutes(5).contains(&worked(&r).await));
}

#[tokio::test]
async fn a_completion_whose_frames_were_all_lost_still_starts_the_tasks_time() {
    let r = running().await;
    r.lab.store.raw("update jobs set accepted_at = accepted_at - interval '10 minutes'").await;
    let Outcome::Done { completion: Carried::Inline(mut completion) } = done("x") else { panic!("done") };
    completion.usage.first_token_ms = 4 * 60_000;
    let outcome = Outcome::Done { completion: Carried::Inline(completion) };
    assert_eq!(report(&r.lab, r.job, r.node, outcome).await, FenceReply::Committed);
    assert!((6 * 60_000 - 1_000..7 * 60_000).contains(&worked(&r).await), "ten minutes less the four before it");
}

#[tokio::test]
async fn an_empty_beat_and_one_of_an_unknown_boot_are_answered() {
    let r = running().await;
    let held = vec![Held { lease: r.task.lease, step_age_ms: 0 }];
    let beat = |boot, held| Beat { boot, held, ledger: None, devices: None };
    let known = r.lab.store.runner_beat(&runner(), &beat(r.runner, vec![])).await.unwrap();
    assert!(!known.hello_again && known.extended.is_empty() && known.lost.is_empty(), "{known:?}");
    let strange = r.lab.store.runner_beat(&runner(), &beat(BootId::fresh(), held)).await.unwrap();
    assert!(strange.hello_again && strange.lost == vec![r.task.lease], "{strange:?}");
}
