//! What must go on when one part of the database is at fault.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_cannot_be_read_stop_no_grant_no_sweep_and_no_placement() {
    let mut r = Running::start().await;
    let unreadable = r.client.submit(&spec(), None).await.unwrap();
    let good = r.client.submit(&spec(), None).await.unwrap();
    let other = r.client.submit(&spec(), None).await.unwrap();
    r.lab.store.raw(&format!("update tasks set spec = '{{}}' where id = '{}'", unreadable.id)).await;
    let fence = r.take_task().await;
    assert_eq!(fence.task, good.id, "the one that comes first is left alone");
    let job = r.ask_job(fence).await;
    let order = r.pull().await;
    assert_eq!(r.accept(&order).await, FenceReply::Committed);
    let second = r.take_task().await;
    assert_eq!(second.task, other.id);
    let queued = r.ask_job(second).await;
    r.lab.store.raw(&format!("update jobs set setbacks = '[]' where id = '{}'", queued.id)).await;
    soon(async {
        loop {
            // The runner lives, the node says nothing.
            let held = vec![Held { lease: fence.lease, step_age_ms: 0 }];
            let keep = Beat { boot: r.runner_boot, held, ledger: None, devices: None };
            let _beat: BeatReply = asked(&r.runner, subject::runner(&runner(), "beat"), keep).await;
            if r.look_at(fence, job.id).await.state == JobState::Queued {
                return;
            }
        }
    })
    .await;
    let again = r.pull().await;
    assert_eq!((again.fence.job, again.fence.attempt), (job.id, 2));
    r.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beat_is_answered_while_every_connection_for_requests_waits() {
    let mut r = Running::within(Limits { database_connections: 2, ..Limits::default() }).await;
    r.client.submit(&spec(), None).await.unwrap();
    let fence = r.take_task().await;
    let blocked = r.lab.store.hold("lock table tasks in exclusive mode").await;
    let asks: Vec<_> = (0..6)
        .map(|_| {
            let (session, body) = (r.runner.clone(), cfq_proto::messages::Release { fence, waits_for: None });
            tokio::spawn(async move {
                let subject = subject::runner(&runner(), "release");
                session.request::<_, FenceReply>(&subject, &body).await
            })
        })
        .collect();
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    soon(async { while r.lab.store.count(waiting).await < 2 {} }).await;
    let beat = Beat { boot: r.node_boot, held: vec![], ledger: None, devices: None };
    let reply: BeatReply = r.node.request(&subject::node(&node(), "beat"), &beat).await.unwrap();
    assert!(!reply.hello_again);
    // Only now: the beat was answered while every connection for requests waited.
    blocked.rollback().await.unwrap();
    for ask in asks {
        // Answered, or said to be unavailable: what matters is the beat.
        let _answer = soon(ask).await.unwrap();
    }
    r.stop().await;
}
