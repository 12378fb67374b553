use super::*;

/// The machine was suspended for an hour while a job was running and another one was waiting after failures.
#[tokio::test]
async fn jump_of_the_clock_is_not_working_time() {
    let r = running().await;
    let working_ms = async || view_of(&r.env, r.job.job).await.running_ms;
    r.env.store.raw("update tasks set first_token_at = now() - interval '61 minutes'").await;
    r.env.store.raw("update jobs set accepted_at = now() - interval '62 minutes'").await;
    assert!(working_ms().await > 3_600_000);
    r.env.store.exclude_clock_jump(r.leadership, 3_600_000).await.unwrap();
    let worked = working_ms().await;
    assert!((55_000..120_000).contains(&worked), "{worked}");
    r.env.store.raw("update jobs set first_failure_at = now() - interval '61 minutes'").await;
    r.env.store.exclude_clock_jump(r.leadership, 3_600_000).await.unwrap();
    let recent = "select count(*) from jobs where first_failure_at between now() - interval '5 minutes' and now()";
    assert_eq!(r.env.store.count(recent).await, 1);
    assert!(working_ms().await < 120_000, "never negative or ahead of the clock");
}
