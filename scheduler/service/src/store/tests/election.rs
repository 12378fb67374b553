use uuid::Uuid;

use super::super::StoreError;
use super::super::leader::lock_leader_row;
use super::*;

#[tokio::test]
async fn only_one_leads_and_a_replaced_leaders_plan_is_rejected() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    assert_eq!(r.env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap(), None, "another scheduler leads");
    assert!(r.env.store.renew_leadership(r.leadership, true).await.unwrap());
    r.env.store.raw("update leader set expires_at = now() - interval '1 second'").await;
    let next = r.env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap().unwrap();
    assert_eq!(next.term, r.leadership.term + 1);
    assert!(!r.env.store.renew_leadership(r.leadership, true).await.unwrap());
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    let stale = r.env.store.place(r.leadership, &order).await.unwrap_err();
    assert!(matches!(stale, StoreError::NotLeader { .. }), "{stale}");
    r.env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    assert!(matches!(r.env.store.sweep_now(r.leadership).await.unwrap_err(), StoreError::NotLeader { .. }));
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
    assert!(r.env.store.place(next, &order).await.unwrap().is_some());
}

#[tokio::test]
async fn one_of_many_candidates_is_elected_and_released_leadership_can_be_acquired() {
    let env = TestEnv::new().await;
    let candidates =
        futures::future::join_all((0..8).map(|_| env.store.acquire_leadership(Uuid::now_v7(), true))).await;
    let elected: Vec<_> = candidates.into_iter().filter_map(|s| s.unwrap()).collect();
    assert_eq!(elected.len(), 1);
    assert!(env.store.has_leader().await.unwrap());
    env.store.release_leadership(elected[0]).await.unwrap();
    assert!(!env.store.has_leader().await.unwrap());
    assert!(env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap().is_some());
}

#[tokio::test]
async fn takeover_ends_the_open_transaction_of_a_former_leader() {
    let env = TestEnv::new().await;
    let former = env.acquire_leadership().await;
    env.store.raw("update leader set expires_at = now() - interval '1 second'").await;
    let mut hanging = env.store.hold("select 1").await;
    lock_leader_row(&mut hanging, former).await.unwrap();
    let next = env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap().unwrap();
    assert_eq!(next.term, former.term + 1);
    assert!(hanging.commit().await.is_err(), "the former leader's transaction was ended");
}

#[tokio::test]
async fn renewal_does_not_wait_for_a_placement_that_waits_for_a_locked_row() {
    let r = running().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let locked = r.env.store.hold("select 1 from jobs for update").await;
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    let (store, leadership) = (r.env.store.clone(), r.leadership);
    let placement = tokio::spawn(async move { store.place(leadership, &order).await });
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    while r.env.store.count(waiting).await == 0 {}
    assert!(r.env.store.renew_leadership(r.leadership, true).await.unwrap());
    assert!(!placement.is_finished(), "the renewal came first");
    locked.rollback().await.unwrap();
    assert!(placement.await.unwrap().unwrap().is_some());
}

#[tokio::test]
async fn leader_without_nats_is_replaced_by_a_scheduler_that_has_it() {
    let env = TestEnv::new().await;
    let leader = env.acquire_leadership().await;
    assert!(env.store.renew_leadership(leader, false).await.unwrap());
    assert_eq!(env.store.acquire_leadership(Uuid::now_v7(), false).await.unwrap(), None, "neither has NATS");
    assert!(env.store.renew_leadership(leader, true).await.unwrap());
    assert_eq!(env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap(), None, "NATS is back");
    assert!(env.store.renew_leadership(leader, false).await.unwrap());
    let next = env.store.acquire_leadership(Uuid::now_v7(), true).await.unwrap().unwrap();
    assert_eq!(next.term, leader.term + 1);
    assert!(!env.store.renew_leadership(leader, true).await.unwrap());
}
