use std::collections::BTreeSet;
use std::time::Duration;

use super::super::FeedCursor;
use super::*;
use crate::testing::new_task;

const TASKS: usize = 12;

/// Writers commit out of order; a reader that follows the feed all the while sees every event once, in each task's order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_global_feed_skips_nothing_under_concurrent_writers() {
    let lab = Lab::new().await;
    let boot = lab.join_runner().await;
    let writers = (0..TASKS).map(|n| {
        let store = lab.store.clone();
        async move {
            store.submit(&new_task(None)).await.unwrap();
            // Holds its transaction, with an event id drawn, while others commit theirs.
            let sql = format!(
                "begin; insert into events (task, number, task_seq, body) select id, number, 1000 + {n}, '{{\"type\":\"task_submitted\"}}' \
                 from tasks order by number limit 1; select pg_sleep(0.0{}); commit",
                n % 10
            );
            store.raw(&sql).await;
            if n % 2 == 0 {
                store.grant(&runner(), boot).await.unwrap();
            }
        }
    });
    let mut seen = Vec::new();
    let follow = async {
        let mut cursor = FeedCursor::default();
        let expected = TASKS + TASKS + (TASKS / 2) * 2;
        while seen.len() < expected {
            for (at, event) in lab.store.all_events(cursor).await.unwrap() {
                assert!(at > cursor, "the feed only goes forward");
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
    assert_eq!(lab.store.count("select count(*) from events").await, seen.len() as i64);
}

#[tokio::test]
async fn a_tasks_events_are_numbered_without_gaps_and_go_on_after_any_of_them() {
    let r = running().await;
    committed(&r.lab, r.task, 0, started()).await;
    report(&r.lab, r.job, r.node, done("x")).await;
    let all = r.lab.store.task_events(r.task.task, 0).await.unwrap();
    assert_eq!(all.iter().map(|e| e.task_seq).collect::<Vec<_>>(), (1..=all.len() as i64).collect::<Vec<_>>());
    let rest = r.lab.store.task_events(r.task.task, 3).await.unwrap();
    assert_eq!(rest, all[3..]);
}

#[tokio::test]
async fn a_database_restored_into_a_younger_cluster_does_not_stop_the_feed() {
    let lab = Lab::new().await;
    lab.submit().await;
    lab.store.raw("update events set xid = '9000000000000'").await;
    assert!(lab.store.all_events(FeedCursor::default()).await.unwrap().is_empty());
    lab.store.migrate().await.unwrap();
    assert_eq!(lab.store.all_events(FeedCursor::default()).await.unwrap().len(), 1);
}
