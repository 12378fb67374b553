//! NATS permissions: a node or runner may publish and subscribe to its role's subjects only, and the server refuses the
//! rest. The tests wait for the refusal of each forbidden subject, so that no test passes only because a reply was
//! late.

use std::time::Duration;

use async_nats::{Message, Subscriber};
use cfq_link::permission_violation::PermissionViolation;
use cfq_link::{LinkError, Session};
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::Cluster;
use futures::StreamExt;
use serde_json::{Value, json};

/// Maximum wait for a message or a refusal.
const REPLY_LIMIT: Duration = Duration::from_secs(20);

async fn bounded<T>(what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(REPLY_LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}: not within {REPLY_LIMIT:?}"))
}

/// A cluster, and one NATS session of the test for each of the three identities.
struct Fixture {
    cluster: Cluster,
    scheduler: Session,
    node: Session,
    runner: Session,
}

impl Fixture {
    async fn start() -> Self {
        let cluster = Cluster::start().await;
        let connect = async |service, identity| {
            Session::connect(&cluster.nats.config(service), identity, &Timing::default()).await.unwrap()
        };
        let scheduler = connect("scheduler", Identity::Scheduler).await;
        let node = connect("node", Identity::Node(NodeId::new("n1").unwrap())).await;
        let runner = connect("runner", Identity::Runner(RunnerId::new("r1").unwrap())).await;
        Self { cluster, scheduler, node, runner }
    }
}

/// Subscribes, and waits until the server has processed the subscription. For this, the function then publishes to a
/// forbidden subject and waits for the refusal: a server handles a connection's messages in order. (A flush would only
/// empty the client's buffer.)
async fn subscribe(session: &Session, subject: &'static str) -> Subscriber {
    let subscriber = session.client().subscribe(subject).await.unwrap();
    let mut refusals = session.permission_violations();
    session.client().publish("forbidden.to.all", "".into()).await.unwrap();
    bounded(subject, refusals.violated(&PermissionViolation::Publish { subject: "forbidden.to.all".to_owned() })).await;
    subscriber
}

/// Returns the messages before `mark`. Messages arrive in the order of publishing: what was published before the mark
/// is in this list, or was not delivered. The list contains other traffic of the cluster too.
async fn until_mark(subscriber: &mut Subscriber) -> Vec<Message> {
    let mut before = Vec::new();
    let read = async {
        loop {
            let message = subscriber.next().await.expect("an open connection");
            if &message.payload[..] == b"mark" {
                return;
            }
            before.push(message);
        }
    };
    bounded("the mark", read).await;
    before
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_without_permission_is_refused() {
    let Fixture { cluster, scheduler, node, runner } = Fixture::start().await;
    let mut all = subscribe(&scheduler, "cfq.v1.>").await;
    let forbidden = [
        (&node, "cfq.v1.node.n2.heartbeat"),
        (&node, "cfq.v1.runner.r1.step"),
        (&node, "cfq.v1.cmd.runner.r1"),
        (&node, "cfq.v1.work.n1.x"),
        (&node, "cfq.v1.hint.runners"),
        // Forged replies to the requests of others.
        (&node, "_INBOX_scheduler.x"),
        (&node, "_INBOX_runner_r1.x"),
        (&runner, "_INBOX_node_n1.x"),
        (&runner, "cfq.v1.runner.r2.step"),
        (&runner, "cfq.v1.node.n1.result"),
        (&runner, "cfq.v1.cmd.node.n1"),
        (&runner, "cfq.v1.work.n1.x"),
    ];
    for (session, subject) in forbidden {
        let mut refusals = session.permission_violations();
        session.client().publish(subject, "forbidden".into()).await.unwrap();
        bounded(subject, refusals.violated(&PermissionViolation::Publish { subject: subject.to_owned() })).await;
    }
    // Permitted messages arrive. They are published last on the same connections, so the forbidden messages would have
    // arrived before them.
    for (session, subject) in [(&node, "cfq.v1.node.n1.tokens.mark"), (&runner, "cfq.v1.runner.r1.mark")] {
        session.client().publish(subject, "mark".into()).await.unwrap();
        for message in until_mark(&mut all).await {
            assert_ne!(&message.payload[..], b"forbidden", "{} got through", message.subject);
        }
    }

    // The JetStream API is forbidden except for pulls on the node's own consumer, and requests fail immediately.
    for subject in [
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.PURGE.WORK",
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.n2",
        "$JS.API.CONSUMER.DELETE.WORK.n1",
        "$JS.API.STREAM.MSG.GET.WORK",
    ] {
        for session in [&node, &runner] {
            let reply = session.request::<_, Value>(subject, &json!({})).await;
            assert!(matches!(reply, Err(LinkError::Forbidden { .. })), "{subject} replied {reply:?}");
        }
    }
    let pulled = runner.pull::<Value>("WORK", "n1", Duration::from_secs(60)).await;
    assert!(matches!(pulled, Err(LinkError::Forbidden { .. })), "the runner pulled {pulled:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribing_without_permission_is_refused() {
    let Fixture { cluster, scheduler, node, runner } = Fixture::start().await;
    let mut permitted =
        [subscribe(&node, "cfq.v1.cmd.node.n1").await, subscribe(&runner, "cfq.v1.cmd.runner.r1").await];
    // No identity receives another's replies, commands or work.
    let mut forbidden_subscribers = Vec::new();
    for (session, subject) in [
        (&node, "cfq.v1.cmd.node.n2"),
        (&node, "cfq.v1.cmd.runner.r1"),
        (&node, "cfq.v1.>"),
        (&node, "cfq.v1.work.>"),
        (&node, "cfq.v1.node.*.tokens.*"),
        (&node, "_INBOX_runner_r1.>"),
        (&node, "_INBOX_scheduler.>"),
        (&runner, "cfq.v1.cmd.node.n1"),
        (&runner, "cfq.v1.work.>"),
        (&runner, "cfq.v1.node.>"),
        (&runner, "cfq.v1.node.n1.result"),
        (&runner, "_INBOX_node_n1.>"),
        (&runner, ">"),
    ] {
        let mut refusals = session.permission_violations();
        forbidden_subscribers.push((subject, subscribe(session, subject).await));
        bounded(subject, refusals.violated(&PermissionViolation::Subscribe { subject: subject.to_owned() })).await;
    }

    // Publishes messages that the forbidden subscriptions match: commands and work of the scheduler, and replies to the
    // inboxes of requesters.
    for subject in ["cfq.v1.cmd.node.n2", "cfq.v1.work.n2.x"] {
        scheduler.client().publish(subject, "secret".into()).await.unwrap();
    }
    let mut requests = subscribe(&scheduler, "cfq.v1.*.*.ask").await;
    for (asker, subject) in [(&node, "cfq.v1.node.n1.ask"), (&runner, "cfq.v1.runner.r1.ask")] {
        let answer = async {
            let request = requests.next().await.unwrap();
            scheduler.client().publish(request.reply.unwrap(), "secret".into()).await.unwrap();
        };
        let asked = asker.client().request(subject, "{}".into());
        let (answered, ()) = bounded(subject, async { tokio::join!(asked, answer) }).await;
        assert_eq!(&answered.unwrap().payload[..], b"secret", "the requester receives it");
    }
    let answer = async {
        // A command of the cluster's own scheduler has no reply subject.
        let reply = loop {
            if let Some(reply) = permitted[0].next().await.unwrap().reply {
                break reply;
            }
        };
        node.client().publish(reply, "secret".into()).await.unwrap();
    };
    let asked = scheduler.client().request("cfq.v1.cmd.node.n1", "{}".into());
    let (answered, ()) = bounded("the reply to the scheduler", async { tokio::join!(asked, answer) }).await;
    assert_eq!(&answered.unwrap().payload[..], b"secret");

    // Permitted messages arrive. They are published last, so the messages above would have arrived before them.
    for (index, subject) in ["cfq.v1.cmd.node.n1", "cfq.v1.cmd.runner.r1"].into_iter().enumerate() {
        scheduler.client().publish(subject, "mark".into()).await.unwrap();
        until_mark(&mut permitted[index]).await;
    }
    for (subject, subscriber) in &mut forbidden_subscribers {
        let message = futures::FutureExt::now_or_never(subscriber.next());
        assert!(message.is_none(), "{subject} was received: {message:?}");
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_without_a_known_key_is_refused_promptly() {
    let Fixture { cluster, .. } = Fixture::start().await;
    let identity = || Identity::Node(NodeId::new("n1").unwrap());
    let mut config = cluster.nats.config("node");
    let own = config.seed_file.take().unwrap();
    let without = bounded("a refusal", Session::connect(&config, identity(), &Timing::default())).await.unwrap_err();
    assert!(without.to_string().contains("requires a key, and none is configured"), "{without}");

    let stranger = cluster.dir.path().join("stranger.seed");
    std::fs::write(&stranger, nkeys::KeyPair::new_user().seed().unwrap()).unwrap();
    config.seed_file = Some(stranger.clone());
    let refused = bounded("a refusal", Session::connect(&config, identity(), &Timing::default())).await.unwrap_err();
    assert!(matches!(refused, LinkError::AuthRejected { .. }), "{refused}");
    assert!(refused.to_string().contains(stranger.to_str().unwrap()), "{refused}");

    config.seed_file = Some(own);
    bounded("a connection", Session::connect(&config, identity(), &Timing::default())).await.unwrap();
    cluster.finish().await;
}
