use cfq_proto::job::{JobFailure, JobState, Outcome};
use cfq_proto::messages::{FenceReply, JobDrop, JobFence, JobLook, Refusal, Refuse};

use super::super::PlaceOrder;
use super::*;

#[tokio::test]
async fn asking_again_returns_the_same_job_and_then_its_result() {
    let r = running().await;
    let first = job(&r.lab, r.task).await;
    assert_eq!((first.id, first.state), (r.job.job, JobState::Running));
    assert_eq!(report(&r.lab, r.job, r.node, done("hi\0")).await, FenceReply::Committed);
    assert_eq!(report(&r.lab, r.job, r.node, done("hi\0")).await, FenceReply::Committed, "told twice");
    let over = job(&r.lab, r.task).await;
    assert_eq!(over.state, JobState::Done);
    let Some(Carried::Inline(completion)) = over.completion else { panic!("a completion") };
    assert_eq!(completion.text, "hi\0");
    // queued, placed, running, done: once each, whatever was repeated.
    assert_eq!(r.lab.store.count("select count(*) from events where body::text like '%\"job_changed\"%'").await, 4);
}

#[tokio::test]
async fn a_late_result_of_an_old_attempt_changes_nothing() {
    let r = running().await;
    r.lab.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
    let (_, jobs, _) = r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!(jobs, 1);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
    assert_eq!(report(&r.lab, r.job, r.node, done("late")).await, FenceReply::Stale);
    let second = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    assert_eq!(second.attempt, r.job.attempt + 1);
    assert_eq!(report(&r.lab, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(accept(&r.lab, r.job, r.node).await, FenceReply::Stale);
    let forged = JobFence { lease: r.job.lease, ..second };
    assert_eq!(accept(&r.lab, forged, r.node).await, FenceReply::Stale);
    assert_eq!(accept(&r.lab, second, r.node).await, FenceReply::Committed);
    assert_eq!(accept(&r.lab, second, r.node).await, FenceReply::Committed, "told twice");
    assert_eq!(report(&r.lab, second, r.node, done("right")).await, FenceReply::Committed);
    let Some(Carried::Inline(completion)) = view_of(&r.lab, r.job.job).await.completion else { panic!("a completion") };
    assert_eq!(completion.text, "right");
    let row = r.lab.store.count("select (losses * 100 + failures)::bigint from jobs").await;
    assert_eq!(row, 100, "one loss, no failure");
}

#[tokio::test]
async fn a_job_that_loses_its_node_too_often_is_dead_with_the_evidence() {
    let mut r = running().await;
    for round in 0..4 {
        r.lab.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
        r.lab.store.sweep(r.lead).await.unwrap();
        if round < 3 {
            r.job = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
            assert_eq!(accept(&r.lab, r.job, r.node).await, FenceReply::Committed);
        }
    }
    let dead = view_of(&r.lab, r.job.job).await;
    assert_eq!(dead.state, JobState::Dead);
    let reason = dead.failure.unwrap().to_string();
    assert!(reason.contains("attempt 4 on den: lost"), "{reason}");
    assert_eq!(r.lab.store.count("select count(*) from attempts where outcome = 'lost'").await, 4);
}

#[tokio::test]
async fn a_failure_of_the_work_climbs_the_ladder_and_one_that_cannot_be_retried_ends_it() {
    let r = running().await;
    let down = Outcome::Failed { failure: JobFailure::Unavailable { reason: "refused".into() } };
    assert_eq!(report(&r.lab, r.job, r.node, down.clone()).await, FenceReply::Committed);
    assert_eq!(report(&r.lab, r.job, r.node, down).await, FenceReply::Committed, "told twice, counted once");
    let (row, _) = r.lab.store.live_jobs().await.unwrap().remove(0);
    assert_eq!(row.setbacks.0[&node()].failures, 1);
    let wait = row.setbacks.0[&node()].until_ms - row.first_failure_ms.unwrap();
    assert!((700..=1_100).contains(&wait), "{wait}");
    let second = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    accept(&r.lab, second, r.node).await;
    let rejected = Outcome::Failed { failure: JobFailure::Rejected { reason: "no such model".into() } };
    assert_eq!(report(&r.lab, second, r.node, rejected).await, FenceReply::Committed);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Failed);
    assert_eq!(r.lab.store.count("select failures::bigint from jobs").await, 2);
}

#[tokio::test]
async fn released_and_refused_work_goes_back_uncounted_and_is_remembered() {
    let r = running().await;
    let released = Outcome::Released { reason: "draining".into() };
    assert_eq!(report(&r.lab, r.job, r.node, released).await, FenceReply::Committed);
    assert_eq!(r.lab.store.count("select (losses + failures)::bigint from jobs").await, 0);
    let second = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    let refusal = Refusal::NotNow { need: Some(777), have: 10, ledger_version: 5 };
    let ask = Refuse { fence: second, boot: r.node, refusal };
    assert_eq!(r.lab.store.refuse(&node(), &ask).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.lab.store.refuse(&node(), &ask).await.unwrap().0, FenceReply::Committed, "told twice");
    let left_out = r.lab.store.core_nodes().await.unwrap().remove(0).left_out;
    assert_eq!(left_out.iter().map(|(m, l)| (m.as_str(), l.version)).collect::<Vec<_>>(), vec![(MODEL, 5)]);
    assert_eq!(r.lab.store.live_jobs().await.unwrap()[0].0.known_need, Some(777));
    let again = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    let refusal = Refusal::NotNow { need: None, have: 0, ledger_version: 6 };
    r.lab.store.refuse(&node(), &Refuse { fence: again, boot: r.node, refusal }).await.unwrap();
    assert_eq!(
        r.lab.store.live_jobs().await.unwrap()[0].0.known_need,
        Some(777),
        "who did not count says nothing of it"
    );
    let third = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    let ask = Refuse { fence: third, boot: r.node, refusal: Refusal::Never { reason: "wrong \"kind\"".into() } };
    r.lab.store.refuse(&node(), &ask).await.unwrap();
    assert_eq!(r.lab.store.live_jobs().await.unwrap()[0].0.never[&node()], "wrong \"kind\"");
}

#[tokio::test]
async fn a_job_is_looked_at_by_its_id_under_the_live_lease_only() {
    let r = running().await;
    let look = JobLook { fence: r.task, job: r.job.job };
    let seen = view(r.lab.store.look_at_job(&runner(), &look).await.unwrap());
    assert_eq!((seen.id, seen.state), (r.job.job, JobState::Running));
    for stale in [
        JobLook { job: JobId::fresh(), ..look.clone() },
        JobLook { fence: TaskFence { attempt: 9, ..r.task }, ..look.clone() },
        JobLook { fence: TaskFence { lease: r.job.lease, ..r.task }, ..look.clone() },
    ] {
        assert_eq!(r.lab.store.look_at_job(&runner(), &stale).await.unwrap(), JobReply::Stale, "{stale:?}");
    }
    r.lab.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!(r.lab.store.look_at_job(&runner(), &look).await.unwrap(), JobReply::Stale, "swept");
}

#[tokio::test]
async fn a_job_given_up_is_cancelled_and_its_node_told() {
    let r = running().await;
    let give_up = JobDrop { fence: r.task, job: r.job.job };
    let (reply, hints) = r.lab.store.drop_job(&runner(), &give_up).await.unwrap();
    assert_eq!(reply, FenceReply::Committed);
    assert!(hints.contains(&crate::store::Hint::CancelJob { node: node(), fence: r.job }), "{hints:?}");
    assert_eq!(r.lab.store.drop_job(&runner(), &give_up).await.unwrap().0, FenceReply::Committed, "told twice");
    assert_eq!(report(&r.lab, r.job, r.node, done("late")).await, FenceReply::Stale);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Cancelled);
}

#[tokio::test]
async fn a_placement_is_refused_where_the_row_or_the_boot_is_not_what_was_planned() {
    let r = running().await;
    let again = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    assert!(r.lab.store.place(r.lead, &again).await.unwrap().is_none(), "it runs");
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    let old_boot = PlaceOrder { boot: BootId::fresh(), ..again.clone() };
    assert!(r.lab.store.place(r.lead, &old_boot).await.unwrap().is_none(), "another boot");
    let old_plan = PlaceOrder { attempt: 1, ..again.clone() };
    assert!(r.lab.store.place(r.lead, &old_plan).await.unwrap().is_none(), "an old plan");
    let order = r.lab.store.place(r.lead, &again).await.unwrap().unwrap();
    assert_eq!(r.lab.store.placed_order(order.fence).await.unwrap(), Some(order.clone()));
    assert!(r.lab.store.unplace(r.lead, order.fence, "nobody took it").await.unwrap());
    assert!(!r.lab.store.unplace(r.lead, order.fence, "nobody took it").await.unwrap());
    assert_eq!(r.lab.store.placed_order(order.fence).await.unwrap(), None);
}
