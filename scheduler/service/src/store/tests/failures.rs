use cfq_proto::job::JobFailure;

use super::*;

fn down() -> Outcome {
    Outcome::Failed { failure: JobFailure::Unavailable { reason: "refused".into() } }
}

/// Places and accepts the job's next attempt.
async fn retry(r: &mut Running) {
    r.job = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
    assert_eq!(accept(&r.env, r.job, r.node).await, FenceReply::Committed);
}

/// Moves all times of the job and its attempts `minutes` into the past.
async fn minutes_pass(r: &Running, minutes: u32) {
    let earlier = |column: &str| format!("{column} = {column} - interval '{minutes} minutes'");
    let jobs: Vec<String> = ["first_failure_at", "placed_at", "accepted_at"].map(earlier).into();
    let attempts: Vec<String> = ["placed_at", "accepted_at", "ended_at", "first_token_at"].map(earlier).into();
    r.env.store.raw(&format!("update jobs set {}", jobs.join(", "))).await;
    r.env.store.raw(&format!("update attempts set {}", attempts.join(", "))).await;
    let row = r.env.store.live_jobs().await.remove(0);
    let mut node_failures = row.node_failures;
    node_failures.0.values_mut().for_each(|s| s.until_ms -= i64::from(minutes) * 60_000);
    let node_failures = serde_json::to_string(&node_failures).unwrap();
    r.env.store.raw(&format!("update jobs set node_failures = '{node_failures}'")).await;
}

#[tokio::test]
async fn job_fails_once_its_retries_reach_the_ceiling() {
    let mut r = running().await;
    for _ in 0..5 {
        report(&r.env, r.job, r.node, down()).await;
        assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
        retry(&mut r).await;
        minutes_pass(&r, 2).await;
    }
    report(&r.env, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Failed);
}

#[tokio::test]
async fn first_token_resets_backoff_and_ceiling() {
    let mut r = running().await;
    report(&r.env, r.job, r.node, down()).await;
    retry(&mut r).await;
    assert!(r.env.store.record_first_token(&r.job).await.unwrap());
    assert!(!r.env.store.record_first_token(&r.job).await.unwrap(), "recorded before");
    // The attempt fails after half an hour of output. The backoff starts at its first step again.
    minutes_pass(&r, 30).await;
    report(&r.env, r.job, r.node, down()).await;
    let row = r.env.store.live_jobs().await.remove(0);
    assert_eq!(row.node_failures.0[&node()].failures, 1);
    assert_eq!(r.env.store.count("select failures::bigint from jobs").await, 2);
    let late = r.env.store.record_first_token(&r.job).await.unwrap();
    assert!(!late, "the attempt has ended");
}

#[tokio::test]
async fn waiting_for_capacity_does_not_count_towards_the_ceiling() {
    let mut r = running().await;
    report(&r.env, r.job, r.node, down()).await;
    minutes_pass(&r, 30).await;
    retry(&mut r).await;
    report(&r.env, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
}

#[tokio::test]
async fn time_noted_as_unavailable_does_not_shorten_an_attempts_ceiling() {
    let mut r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    assert!(r.env.store.note_unavailable(r.leadership, r.job.job, 1, "connection refused").await.unwrap());
    minutes_pass(&r, 30).await;
    retry(&mut r).await;
    report(&r.env, r.job, r.node, down()).await;
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
}

#[tokio::test]
async fn repeated_failures_in_mid_answer_end_as_dead_letter_with_evidence() {
    let mut r = running().await;
    let broken = || Outcome::Failed { failure: JobFailure::Engine { reason: "out of memory".into() } };
    for round in 1..=6 {
        assert!(r.env.store.record_first_token(&r.job).await.unwrap());
        report(&r.env, r.job, r.node, broken()).await;
        if round < 6 {
            retry(&mut r).await;
        }
    }
    let dead = view_of(&r.env, r.job.job).await;
    assert_eq!(dead.state, JobState::Dead);
    let reason = dead.failure.unwrap().to_string();
    assert!(
        reason.contains("failed 6 times") && reason.contains("attempt 6 on den: failed (out of memory)"),
        "{reason}"
    );
}
