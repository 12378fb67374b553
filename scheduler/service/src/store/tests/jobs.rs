use cfq_proto::job::{JobFailure, JobState, Outcome};
use cfq_proto::messages::{FenceReply, JobCancel, JobFence, JobGet, Refusal, Refuse};
use cfq_scheduler_core::UnreportedEnd;

use super::super::PlaceOrder;
use super::*;

#[tokio::test]
async fn submitting_again_returns_the_same_job_and_then_its_result() {
    let r = running().await;
    let first = job(&r.env, r.task).await;
    assert_eq!((first.id, first.state), (r.job.job, JobState::Running));
    assert_eq!(report(&r.env, r.job, r.node, done("hi\0")).await, FenceReply::Committed);
    assert_eq!(report(&r.env, r.job, r.node, done("hi\0")).await, FenceReply::Committed, "repeated");
    let over = job(&r.env, r.task).await;
    assert_eq!(over.state, JobState::Done);
    let Some(Payload::Inline(completion)) = over.completion else { panic!("a completion") };
    assert_eq!(completion.text, "hi\0");
    // One event each for queued, placed, running and done, despite the repeats.
    assert_eq!(r.env.store.count("select count(*) from events where body::text like '%\"job_changed\"%'").await, 4);
}

#[tokio::test]
async fn late_result_of_an_old_attempt_is_stale() {
    let r = running().await;
    r.env.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
    let (_, jobs, _) = r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(jobs, 1);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    let second = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    assert_eq!(second.attempt, r.job.attempt + 1);
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(accept(&r.env, r.job, r.node).await, FenceReply::Stale);
    let forged = JobFence { lease: r.job.lease, ..second };
    assert_eq!(accept(&r.env, forged, r.node).await, FenceReply::Stale);
    assert_eq!(accept(&r.env, second, r.node).await, FenceReply::Committed);
    assert_eq!(accept(&r.env, second, r.node).await, FenceReply::Committed, "repeated");
    assert_eq!(report(&r.env, second, r.node, done("right")).await, FenceReply::Committed);
    let Some(Payload::Inline(completion)) = view_of(&r.env, r.job.job).await.completion else { panic!("a completion") };
    assert_eq!(completion.text, "right");
    let row = r.env.store.count("select (losses * 100 + failures)::bigint from jobs").await;
    assert_eq!(row, 100, "one loss, no failure");
}

#[tokio::test]
async fn job_that_loses_too_many_nodes_is_dead_with_the_evidence() {
    let mut r = running().await;
    for round in 0..4 {
        r.env.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
        r.env.store.sweep_now(r.leadership).await.unwrap();
        if round < 3 {
            r.job = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
            assert_eq!(accept(&r.env, r.job, r.node).await, FenceReply::Committed);
        }
    }
    let dead = view_of(&r.env, r.job.job).await;
    assert_eq!(dead.state, JobState::Dead);
    let reason = dead.failure.unwrap().to_string();
    assert!(reason.contains("attempt 4 on den: lost"), "{reason}");
    assert_eq!(r.env.store.count("select count(*) from attempts where outcome = 'lost'").await, 4);
}

#[tokio::test]
async fn retryable_failure_backs_off_and_a_permanent_one_ends_the_job() {
    let r = running().await;
    let down = Outcome::Failed { failure: JobFailure::Unavailable { reason: "refused".into() } };
    assert_eq!(report(&r.env, r.job, r.node, down.clone()).await, FenceReply::Committed);
    assert_eq!(report(&r.env, r.job, r.node, down).await, FenceReply::Committed, "repeated, counted once");
    let row = r.env.store.live_jobs().await.remove(0);
    assert_eq!(row.node_failures.0[&node()].failures, 1);
    let wait = row.node_failures.0[&node()].until_ms - row.first_failure_ms.unwrap();
    assert!((700..=1_100).contains(&wait), "{wait}");
    let second = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    accept(&r.env, second, r.node).await;
    let rejected = Outcome::Failed { failure: JobFailure::Rejected { reason: "no such model".into() } };
    assert_eq!(report(&r.env, second, r.node, rejected).await, FenceReply::Committed);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Failed);
    assert_eq!(r.env.store.count("select failures::bigint from jobs").await, 2);
}

#[tokio::test]
async fn released_and_refused_jobs_are_requeued_without_a_failure() {
    let r = running().await;
    let released = Outcome::Released { reason: ReleaseReason::Drained };
    assert_eq!(report(&r.env, r.job, r.node, released).await, FenceReply::Committed);
    assert_eq!(r.env.store.count("select (losses + failures)::bigint from jobs").await, 0);
    let second = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    let refusal = Refusal::NotNow { need: Some(777), have: 10, ledger_version: 5 };
    let request = Refuse { fence: second, boot: r.node, refusal };
    assert_eq!(r.env.store.refuse(&node(), &request).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.env.store.refuse(&node(), &request).await.unwrap().0, FenceReply::Committed, "repeated");
    let exclusions = r.env.store.core_nodes().await.unwrap().remove(0).exclusions;
    assert_eq!(exclusions.iter().map(|(m, e)| (m.as_str(), e.version)).collect::<Vec<_>>(), vec![(MODEL, 5)]);
    assert_eq!(r.env.store.live_jobs().await[0].counted_tokens, Some(777));
    let again = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    let refusal = Refusal::NotNow { need: None, have: 0, ledger_version: 6 };
    r.env.store.refuse(&node(), &Refuse { fence: again, boot: r.node, refusal }).await.unwrap();
    assert_eq!(
        r.env.store.live_jobs().await[0].counted_tokens,
        Some(777),
        "a refusal without a count keeps the earlier one"
    );
    let third = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    let request = Refuse { fence: third, boot: r.node, refusal: Refusal::Never { reason: "wrong \"kind\"".into() } };
    r.env.store.refuse(&node(), &request).await.unwrap();
    assert_eq!(r.env.store.live_jobs().await[0].refused_by[&node()], "wrong \"kind\"");
}

#[tokio::test]
async fn job_is_read_only_under_the_live_lease_of_its_task() {
    let r = running().await;
    let get = JobGet { fence: r.task, job: r.job.job };
    let seen = view(r.env.store.get_job(&runner(), &get).await.unwrap());
    assert_eq!((seen.id, seen.state), (r.job.job, JobState::Running));
    for stale in [
        JobGet { job: JobId::fresh(), ..get.clone() },
        JobGet { fence: TaskFence { attempt: 9, ..r.task }, ..get.clone() },
        JobGet { fence: TaskFence { lease: r.job.lease, ..r.task }, ..get.clone() },
    ] {
        assert_eq!(r.env.store.get_job(&runner(), &stale).await.unwrap(), JobReply::Stale, "{stale:?}");
    }
    r.env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(r.env.store.get_job(&runner(), &get).await.unwrap(), JobReply::Stale, "swept");
}

#[tokio::test]
async fn job_cancelled_by_its_runner_notifies_the_node() {
    let r = running().await;
    let cancel = JobCancel { fence: r.task, job: r.job.job };
    let (reply, hints) = r.env.store.cancel_job(&runner(), &cancel).await.unwrap();
    assert_eq!(reply, FenceReply::Committed);
    assert!(hints.contains(&crate::store::Hint::CancelJob { node: node(), fence: r.job }), "{hints:?}");
    assert_eq!(r.env.store.cancel_job(&runner(), &cancel).await.unwrap().0, FenceReply::Committed, "repeated");
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Cancelled);
}

#[tokio::test]
async fn placement_is_rejected_if_the_row_or_boot_changed_since_the_plan() {
    let r = running().await;
    let again = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    assert!(r.env.store.place(r.leadership, &again).await.unwrap().is_none(), "the job runs");
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let old_boot = PlaceOrder { boot: BootId::fresh(), ..again.clone() };
    assert!(r.env.store.place(r.leadership, &old_boot).await.unwrap().is_none(), "another boot");
    let old_plan = PlaceOrder { attempt: 1, ..again.clone() };
    assert!(r.env.store.place(r.leadership, &old_plan).await.unwrap().is_none(), "an old plan");
    r.env.store.set_cordon(&node(), true).await.unwrap().unwrap();
    assert!(r.env.store.place(r.leadership, &again).await.unwrap().is_none(), "the node was cordoned");
    r.env.store.set_cordon(&node(), false).await.unwrap().unwrap();
    let order = r.env.store.place(r.leadership, &again).await.unwrap().unwrap();
    assert_eq!(r.env.store.placed_order(order.fence).await.unwrap(), Some(order.clone()));
    let unplace = || r.env.store.unplace(r.leadership, order.fence, UnreportedEnd::NotAccepted, "not accepted");
    assert!(unplace().await.unwrap().is_some());
    assert_eq!(unplace().await.unwrap(), None);
    assert_eq!(r.env.store.placed_order(order.fence).await.unwrap(), None);
}
