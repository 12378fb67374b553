//! Tests of attempts that end before their node accepts them.

use cfq_proto::node::Ledger;

use super::*;

/// The node sends heartbeats and receives every order, but accepts none, as if the preparation of the prompt hung.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_that_its_node_never_accepts_ends_with_the_evidence() {
    let mut cluster = TestCluster::start().await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let job = cluster.submit_job(fence).await;
    let ledger = node_registration(cluster.node_boot).ledger;
    let mut version = ledger.version;
    let dead = in_time(async {
        loop {
            // A later version of the ledger ends the exclusion of a node that did not accept an order.
            version += 1;
            let ledger = Some(Ledger { version, ..ledger.clone() });
            let heartbeat = Heartbeat { boot: cluster.node_boot, held: vec![], ledger, devices: None };
            let _reply: HeartbeatReply =
                request_reply(&cluster.node, subject::node(&node(), "heartbeat"), heartbeat).await;
            let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
            let heartbeat = Heartbeat { boot: cluster.runner_boot, held, ledger: None, devices: None };
            let _reply: HeartbeatReply =
                request_reply(&cluster.runner, subject::runner(&runner(), "heartbeat"), heartbeat).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            let view = cluster.get_job(fence, job.id).await;
            if view.state.is_terminal() {
                return view;
            }
        }
    })
    .await;
    assert_eq!(dead.state, JobState::Dead);
    let reason = dead.failure.unwrap().to_string();
    assert!(reason.contains("not accepted by its node 4 times") && reason.contains("attempt 4 on den"), "{reason}");
    cluster.stop().await;
}
