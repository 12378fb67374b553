//! Tests of partial database faults: the parts of the service that a fault does not affect must continue.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_rows_block_no_grant_sweep_or_placement() {
    let mut cluster = TestCluster::start().await;
    let unreadable = cluster.client.submit(&spec(), None).await.unwrap();
    let good = cluster.client.submit(&spec(), None).await.unwrap();
    let other = cluster.client.submit(&spec(), None).await.unwrap();
    cluster.env.store.raw(&format!("update tasks set spec = '{{}}' where id = '{}'", unreadable.id)).await;
    let fence = cluster.take_task().await;
    assert_eq!(fence.task, good.id, "the unreadable task, which ranks first, is skipped");
    let job = cluster.submit_job(fence).await;
    let order = cluster.pull().await;
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    let second = cluster.take_task().await;
    assert_eq!(second.task, other.id);
    let queued = cluster.submit_job(second).await;
    cluster.env.store.raw(&format!("update jobs set node_failures = '[]' where id = '{}'", queued.id)).await;
    in_time(async {
        loop {
            // The runner sends heartbeats, the node does not.
            let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
            let keep_alive = Heartbeat { boot: cluster.runner_boot, held, ledger: None, devices: None };
            let subject = subject::runner(&runner(), "heartbeat");
            let _reply: HeartbeatReply = request_reply(&cluster.runner, subject, keep_alive).await;
            if cluster.get_job(fence, job.id).await.state == JobState::Queued {
                return;
            }
        }
    })
    .await;
    let again = cluster.pull().await;
    assert_eq!((again.fence.job, again.fence.attempt), (job.id, 2));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_is_answered_while_all_request_connections_wait() {
    let limits = SchedulerLimits { database_connections: 2, ..SchedulerLimits::default() };
    let mut cluster = TestCluster::within(limits).await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let blocked = cluster.env.store.hold("lock table tasks in exclusive mode").await;
    let requests: Vec<_> = (0..6)
        .map(|_| {
            let (session, body) = (cluster.runner.clone(), cfq_proto::messages::Release { fence, waits_for: None });
            tokio::spawn(async move {
                let subject = subject::runner(&runner(), "release");
                session.request::<_, FenceReply>(&subject, &body).await
            })
        })
        .collect();
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    in_time(async { while cluster.env.store.count(waiting).await < 2 {} }).await;
    let heartbeat = Heartbeat { boot: cluster.node_boot, held: vec![], ledger: None, devices: None };
    let reply: HeartbeatReply = cluster.node.request(&subject::node(&node(), "heartbeat"), &heartbeat).await.unwrap();
    assert!(!reply.register_again);
    // The lock is released only after the heartbeat was answered.
    blocked.rollback().await.unwrap();
    for request in requests {
        // Any reply is accepted here, including unavailable: this test is about the heartbeat.
        let _answer = in_time(request).await.unwrap();
    }
    cluster.stop().await;
}
