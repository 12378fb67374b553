//! A node or runner can say what its role says, and nothing else: the NATS server refuses the rest.

use std::time::Duration;

use cfq_link::Session;
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::Cluster;
use futures::StreamExt;

/// Whether `listener` hears on `subject` what the scheduler publishes on `example`.
async fn hears(scheduler: &Session, listener: &Session, subject: &'static str, example: &'static str) -> bool {
    let mut listening = listener.client().subscribe(subject).await.unwrap();
    listener.flush().await.unwrap();
    // The two connections have no order between them: said more than once, so that one comes after the subscription.
    for _ in 0..10 {
        scheduler.client().publish(example, "secret".into()).await.unwrap();
        scheduler.flush().await.unwrap();
        // Other messages may come on a subject that is heard.
        let secret = async {
            while let Some(message) = listening.next().await {
                if &message.payload[..] == b"secret" {
                    return;
                }
            }
            std::future::pending::<()>().await;
        };
        if tokio::time::timeout(Duration::from_millis(50), secret).await.is_ok() {
            return true;
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_granted_does_not_arrive() {
    let cluster = Cluster::start().await;
    let timing = Timing { request_ms: 700, ..Timing::default() };
    let connect = |who: &'static str, identity| {
        let config = cluster.nats.config(who);
        let timing = timing.clone();
        async move { Session::connect(&config, identity, &timing).await.unwrap() }
    };
    let scheduler = connect("scheduler", Identity::Scheduler).await;
    let node = connect("node", Identity::Node(NodeId::new("n1").unwrap())).await;
    let runner = connect("runner", Identity::Runner(RunnerId::new("r1").unwrap())).await;
    let mut all = scheduler.client().subscribe("cfq.v1.>").await.unwrap();
    scheduler.flush().await.unwrap();

    let forbidden = [
        (&node, "cfq.v1.node.n2.beat"),
        (&node, "cfq.v1.runner.r1.step"),
        (&node, "cfq.v1.cmd.runner.r1"),
        (&node, "cfq.v1.work.n1.x"),
        (&node, "cfq.v1.hint.runners"),
        (&runner, "cfq.v1.runner.r2.step"),
        (&runner, "cfq.v1.node.n1.result"),
        (&runner, "cfq.v1.cmd.node.n1"),
        (&runner, "cfq.v1.work.n1.x"),
    ];
    for (session, subject) in forbidden {
        session.client().publish(subject, "forbidden".into()).await.unwrap();
        session.flush().await.unwrap();
    }
    // What is granted arrives, on the same connections and after all of the above would have. Said again until it is heard,
    // since the scheduler's subscription has no order to what others publish.
    let mut heard = std::collections::BTreeSet::new();
    let listen = async {
        while heard.len() < 2 {
            for (session, subject) in [(&node, "cfq.v1.node.n1.tokens.mark"), (&runner, "cfq.v1.runner.r1.mark")] {
                session.client().publish(subject, "mark".into()).await.unwrap();
                session.flush().await.unwrap();
            }
            while let Ok(Some(message)) = tokio::time::timeout(Duration::from_millis(100), all.next()).await {
                assert_ne!(&message.payload[..], b"forbidden", "{} got through", message.subject);
                if &message.payload[..] == b"mark" {
                    heard.insert(message.subject.to_string());
                    break;
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), listen).await.expect("what is granted arrives");

    // JetStream's API is closed but for the pull on one's own consumer.
    for subject in [
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.PURGE.WORK",
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.n2",
        "$JS.API.CONSUMER.DELETE.WORK.n1",
        "$JS.API.STREAM.MSG.GET.WORK",
    ] {
        for session in [&node, &runner] {
            let answer = session.client().request(subject, "{}".into()).await;
            assert!(answer.is_err(), "{subject} answered {:?}", answer.map(|m| m.payload));
        }
    }
    // Nobody reads another's answers, commands or work. Each is published where the scheduler may publish, and where the
    // listener would hear it if it were let in.
    for (session, subject, example) in [
        (&node, "cfq.v1.cmd.node.n2", "cfq.v1.cmd.node.n2"),
        (&node, "cfq.v1.cmd.runner.r1", "cfq.v1.cmd.runner.r1"),
        (&node, "cfq.v1.>", "cfq.v1.cmd.node.n2"),
        (&node, "cfq.v1.work.>", "cfq.v1.work.n2.x"),
        (&runner, "cfq.v1.cmd.node.n1", "cfq.v1.cmd.node.n1"),
        (&runner, "cfq.v1.work.>", "cfq.v1.work.n2.x"),
        (&runner, ">", "cfq.v1.cmd.node.n2"),
    ] {
        assert!(!hears(&scheduler, session, subject, example).await, "{subject} was heard");
    }
    // The probe itself works: what is granted is heard.
    assert!(hears(&scheduler, &node, "cfq.v1.cmd.node.n1", "cfq.v1.cmd.node.n1").await);
    assert!(hears(&scheduler, &runner, "cfq.v1.hint.runners", "cfq.v1.hint.runners").await);
    // Inboxes: the scheduler may not write there unasked, but a listener is refused all the same.
    for (session, subject) in
        [(&node, "_INBOX_runner_r1.>"), (&runner, "_INBOX_node_n1.>"), (&node, "_INBOX_scheduler.>")]
    {
        let mut listening = session.client().subscribe(subject).await.unwrap();
        session.flush().await.unwrap();
        let owner = if subject.contains("runner") { &runner } else { &scheduler };
        // A request of the owner is answered into its inbox: that answer must not be overheard.
        let asked = owner.client().request("cfq.v1.runner.r1.hello", "{}".into());
        drop(tokio::time::timeout(Duration::from_millis(300), asked).await);
        let heard = tokio::time::timeout(Duration::from_millis(200), listening.next()).await;
        assert!(!matches!(heard, Ok(Some(_))), "{subject} was heard");
    }
    // Without a key nobody connects at all.
    let mut config = cluster.nats.config("node");
    config.seed_file = None;
    let without = Session::connect(&config, Identity::Node(NodeId::new("n1").unwrap()), &timing);
    let connected = tokio::time::timeout(Duration::from_secs(10), without).await;
    assert!(!matches!(connected, Ok(Ok(_))), "connected without a key");
    cluster.finish().await;
}
