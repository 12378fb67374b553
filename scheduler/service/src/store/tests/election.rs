use uuid::Uuid;

use super::super::StoreError;
use super::*;

#[tokio::test]
async fn one_leads_and_a_plan_of_the_one_before_is_rejected() {
    let r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    assert_eq!(r.lab.store.take_lead(Uuid::now_v7()).await.unwrap(), None, "somebody leads");
    assert!(r.lab.store.renew_lead(r.lead).await.unwrap());
    r.lab.store.raw("update leader set expires_at = now() - interval '1 second'").await;
    let next = r.lab.store.take_lead(Uuid::now_v7()).await.unwrap().unwrap();
    assert_eq!(next.generation, r.lead.generation + 1);
    assert!(!r.lab.store.renew_lead(r.lead).await.unwrap());
    let order = PlaceOrder { job: r.job.job, attempt: 2, node: node(), boot: r.node, reason: String::new() };
    let stale = r.lab.store.place(r.lead, &order).await.unwrap_err();
    assert!(matches!(stale, StoreError::NotLeader { .. }), "{stale}");
    r.lab.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    assert!(matches!(r.lab.store.sweep(r.lead).await.unwrap_err(), StoreError::NotLeader { .. }));
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
    assert!(r.lab.store.place(next, &order).await.unwrap().is_some());
}

#[tokio::test]
async fn of_many_that_stand_at_once_one_is_elected_and_a_yielded_row_is_free() {
    let lab = Lab::new().await;
    let stood = futures::future::join_all((0..8).map(|_| lab.store.take_lead(Uuid::now_v7()))).await;
    let elected: Vec<_> = stood.into_iter().filter_map(|s| s.unwrap()).collect();
    assert_eq!(elected.len(), 1);
    assert!(lab.store.has_leader().await.unwrap());
    lab.store.yield_lead(elected[0]).await.unwrap();
    assert!(!lab.store.has_leader().await.unwrap());
    assert!(lab.store.take_lead(Uuid::now_v7()).await.unwrap().is_some());
}
