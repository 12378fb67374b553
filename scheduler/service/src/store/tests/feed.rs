use std::collections::BTreeSet;
use std::time::Duration;

use super::super::{Committed, FeedCursor};
use super::*;
use crate::testing::new_task;

const TASKS: usize = 12;

/// Writers commit out of order while a reader follows the global feed. The reader must receive every event once, and
/// the events of each task in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn global_feed_skips_no_event_under_concurrent_writers() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let writers = (0..TASKS).map(|n| {
        let store = env.store.clone();
        async move {
            store.submit(&new_task(None)).await.unwrap();
            // Keeps a transaction open that already has an event id, while other writers commit.
            let sql = format!(
                "begin; insert into events (task, number, task_seq, body) select id, number, 1000 + {n}, '{{\"type\":\"task_submitted\"}}' \
                 from tasks order by number limit 1; select pg_sleep(0.0{}); commit",
                n % 10
            );
            store.raw(&sql).await;
            if n % 2 == 0 {
                store.grant(&runner(), &LeaseRequest { boot, request: None }).await.unwrap();
            }
        }
    });
    let mut seen = Vec::new();
    let follow = async {
        let mut cursor = FeedCursor::default();
        let expected = TASKS + TASKS + (TASKS / 2) * 2;
        while seen.len() < expected {
            for (at, event) in env.store.all_events(cursor).await.unwrap() {
                assert!(at > cursor, "positions increase");
                cursor = at;
                seen.push(event);
            }
            tokio::task::yield_now().await;
        }
    };
    let both = async { tokio::join!(futures::future::join_all(writers), follow) };
    tokio::time::timeout(Duration::from_secs(30), both).await.unwrap();
    let distinct: BTreeSet<i64> = seen.iter().map(|e| e.id).collect();
    assert_eq!(distinct.len(), seen.len());
    assert_eq!(env.store.count("select count(*) from events").await, seen.len() as i64);
}

#[tokio::test]
async fn task_events_have_no_gaps_and_can_be_read_from_any_position() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    report(&r.env, r.job, r.node, done("x")).await;
    let all = r.env.store.task_events(r.task.task, 0).await.unwrap();
    assert_eq!(all.iter().map(|e| e.task_seq).collect::<Vec<_>>(), (1..=all.len() as i64).collect::<Vec<_>>());
    let rest = r.env.store.task_events(r.task.task, 3).await.unwrap();
    assert_eq!(rest, all[3..]);
}

#[tokio::test]
async fn restore_into_a_younger_cluster_does_not_stop_the_feed() {
    let env = TestEnv::new().await;
    env.submit().await;
    env.store.raw("update events set xid = '9000000000000'").await;
    assert!(env.store.all_events(FeedCursor::default()).await.unwrap().is_empty());
    env.store.migrate().await.unwrap();
    assert_eq!(env.store.all_events(FeedCursor::default()).await.unwrap().len(), 1);
}

#[tokio::test]
async fn events_keep_their_order_after_a_restore() {
    let env = TestEnv::new().await;
    let (first, _) = env.submit().await;
    let (second, _) = env.submit().await;
    // The oldest event has an id that the new cluster has reached already.
    env.store.raw(&format!("update events set xid = '9000000000000' where task = '{second}'")).await;
    env.store.migrate().await.unwrap();
    let page = env.store.all_events(FeedCursor::default()).await.unwrap();
    assert_eq!(page.iter().map(|(_, event)| event.task).collect::<Vec<_>>(), [first, second]);
    let ids = "select count(distinct xid::text) from events";
    assert_eq!(env.store.count(ids).await, 1, "an event that comes later in the feed is not older");
}

/// Transactions with notifications commit one after another, so none of them sends one.
#[tokio::test]
async fn no_transaction_sends_a_postgres_notification() {
    let env = TestEnv::new().await;
    let mut listener = sqlx::postgres::PgListener::connect_with(&env.store.pool).await.unwrap();
    listener.listen("cfq_events").await.unwrap();
    env.submit().await;
    let boot = env.join_runner().await;
    let task = grant(&env, boot).await.fence;
    job(&env, task).await;
    committed(&env, task, 0, started()).await;
    let received = tokio::time::timeout(Duration::from_millis(500), listener.recv()).await;
    assert!(received.is_err(), "{received:?}");
}

#[tokio::test]
async fn commit_with_events_reports_its_task() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut reported = env.store.committed_tasks();
    let (task, _) = env.submit().await;
    assert_eq!(reported.try_recv(), Ok(Committed::Task(task)), "submit");
    let fence = grant(&env, boot).await.fence;
    assert_eq!(reported.try_recv(), Ok(Committed::Task(task)), "grant");
    job(&env, fence).await;
    assert_eq!(reported.try_recv(), Ok(Committed::Task(task)), "job");
    let stale = TaskFence { attempt: fence.attempt + 1, ..fence };
    assert_eq!(step(&env, stale, 0, started()).await, StepReply::Stale);
    assert!(reported.try_recv().is_err(), "nothing was committed");
    env.store.cancel(task, "a test", Run::Commit).await.unwrap();
    assert_eq!(reported.try_recv(), Ok(Committed::Task(task)), "cancel");
}
