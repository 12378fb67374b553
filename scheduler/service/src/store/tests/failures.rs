use cfq_proto::job::JobFailure;

use super::*;

fn down() -> Outcome {
    Outcome::Failed { failure: JobFailure::Unavailable { reason: "refused".into() } }
}

/// Places and accepts the job once more.
async fn again(r: &mut Running) {
    r.job = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    assert_eq!(accept(&r.lab, r.job, r.node).await, FenceReply::Committed);
}

/// As if everything so far had been so long ago.
async fn minutes_pass(r: &Running, minutes: u32) {
    let earlier = |column: &str| format!("{column} = {column} - interval '{minutes} minutes'");
    let jobs: Vec<String> = ["first_failure_at", "placed_at", "accepted_at"].map(earlier).into();
    let attempts: Vec<String> = ["placed_at", "accepted_at", "ended_at", "first_token_at"].map(earlier).into();
    r.lab.store.raw(&format!("update jobs set {}", jobs.join(", "))).await;
    r.lab.store.raw(&format!("update attempts set {}", attempts.join(", "))).await;
    let (row, _) = r.lab.store.live_jobs().await.unwrap().remove(0);
    let mut setbacks = row.setbacks;
    setbacks.0.values_mut().for_each(|s| s.until_ms -= i64::from(minutes) * 60_000);
    let setbacks = serde_json::to_string(&setbacks).unwrap();
    r.lab.store.raw(&format!("update jobs set setbacks = '{setbacks}'")).await;
}

#[tokio::test]
async fn an_endpoint_that_is_tried_all_the_while_is_given_up_at_the_ceiling() {
    let mut r = running().await;
    for _ in 0..5 {
        report(&r.lab, r.job, r.node, down()).await;
        assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
        again(&mut r).await;
        minutes_pass(&r, 2).await;
    }
    report(&r.lab, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Failed);
}

#[tokio::test]
async fn a_first_token_ends_what_failed_before_it() {
    let mut r = running().await;
    report(&r.lab, r.job, r.node, down()).await;
    again(&mut r).await;
    assert!(r.lab.store.first_token(&r.job).await.unwrap());
    assert!(!r.lab.store.first_token(&r.job).await.unwrap(), "told twice");
    // It answers for half an hour, then breaks off: a new trouble, with a new ladder.
    minutes_pass(&r, 30).await;
    report(&r.lab, r.job, r.node, down()).await;
    let (row, _) = r.lab.store.live_jobs().await.unwrap().remove(0);
    assert_eq!(row.setbacks.0[&node()].failures, 1);
    assert_eq!(r.lab.store.count("select failures::bigint from jobs").await, 2);
    let late = r.lab.store.first_token(&r.job).await.unwrap();
    assert!(!late, "of an attempt that is over");
}

#[tokio::test]
async fn a_wait_for_room_between_two_tries_is_not_trying() {
    let mut r = running().await;
    report(&r.lab, r.job, r.node, down()).await;
    minutes_pass(&r, 30).await;
    again(&mut r).await;
    report(&r.lab, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
}

#[tokio::test]
async fn what_was_only_noted_as_unavailable_does_not_shorten_the_ceiling_of_a_try() {
    let mut r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    assert!(r.lab.store.note_unavailable(r.lead, r.job.job, 1, "connection refused").await.unwrap());
    minutes_pass(&r, 30).await;
    again(&mut r).await;
    report(&r.lab, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
}

#[tokio::test]
async fn what_breaks_off_in_its_answer_again_and_again_is_parked_with_the_evidence() {
    let mut r = running().await;
    let broken = || Outcome::Failed { failure: JobFailure::Engine { reason: "out of memory".into() } };
    for round in 1..=6 {
        assert!(r.lab.store.first_token(&r.job).await.unwrap());
        report(&r.lab, r.job, r.node, broken()).await;
        if round < 6 {
            again(&mut r).await;
        }
    }
    let dead = view_of(&r.lab, r.job.job).await;
    assert_eq!(dead.state, JobState::Dead);
    let reason = dead.failure.unwrap().to_string();
    assert!(
        reason.contains("broke off 6 times") && reason.contains("attempt 6 on den: failed (out of memory)"),
        "{reason}"
    );
}
