//! Tests of where the scheduler sends its replies.

use cfq_proto::ids::LeaseId;
use cfq_proto::messages::JobFence;

use super::*;

/// A key that may publish requests must not be able to make the scheduler publish on a subject of the sender's choice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reply_goes_only_to_the_inboxes_of_the_sender() {
    let mut cluster = TestCluster::start().await;
    let scheduler = Session::connect(&cluster.config.nats, Identity::Scheduler, &cluster.config.timing).await.unwrap();
    let mut published = scheduler.client().subscribe("cfq.v1.>").await.unwrap();
    scheduler.flush().await.unwrap();
    let heartbeat = Heartbeat { boot: cluster.node_boot, held: vec![], ledger: None, devices: None };
    let valid = cfq_proto::envelope::encode(&heartbeat).unwrap();
    let foreign = ["cfq.v1.cmd.runner.r1", "cfq.v1.work.den.x"];
    for reply in foreign {
        for payload in [valid.clone(), b"not a message".to_vec()] {
            let subject = subject::node(&node(), "heartbeat");
            cluster.node.client().publish_with_reply(subject, reply, payload.into()).await.unwrap();
            let subject = subject::node(&node(), "accept");
            cluster.node.client().publish_with_reply(subject, reply, b"not a message".to_vec().into()).await.unwrap();
        }
    }
    // Requests of one verb are taken in the order of their arrival: after these replies, those above would have been
    // sent too.
    for _ in 0..10 {
        cluster.node_heartbeat(vec![]).await;
        let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
        let accept = Accept { fence, boot: cluster.node_boot };
        let reply: FenceReply = request_reply(&cluster.node, subject::node(&node(), "accept"), accept).await;
        assert_eq!(reply, FenceReply::Stale);
    }
    scheduler.client().publish("cfq.v1.mark", "".into()).await.unwrap();
    in_time(async {
        loop {
            let message = published.next().await.unwrap();
            if message.subject.as_str() == "cfq.v1.mark" {
                return;
            }
            assert!(!foreign.contains(&message.subject.as_str()), "{message:?}");
        }
    })
    .await;
    cluster.stop().await;
}
