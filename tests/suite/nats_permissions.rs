//! NATS permissions: a node or runner may publish and subscribe to its role's subjects only, and the server refuses the
//! rest. The tests wait for the refusal of each forbidden subject, so that no test passes only because a reply was
//! late.

use std::time::Duration;

use async_nats::{HeaderMap, Message, Subscriber};
use cfq_link::permission_violation::PermissionViolation;
use cfq_link::{LinkError, Session};
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;
use futures::StreamExt;
use serde_json::{Value, json};

/// Maximum wait for a message or a refusal.
const REPLY_LIMIT: Duration = Duration::from_secs(20);

async fn bounded<T>(what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(REPLY_LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}: not within {REPLY_LIMIT:?}"))
}

/// Subject that only a scheduler may publish to, and that no client uses.
const UNUSED_COMMAND: &str = "cfq.v1.cmd.node.unused";
/// Request that deletes the stream of work orders.
const DELETE_STREAM: &str = "$JS.API.STREAM.DELETE.WORK";

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

    // JetStream is forbidden, and requests fail immediately.
    for subject in [
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.PURGE.WORK",
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.n1",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.n2",
        "$JS.API.CONSUMER.DELETE.WORK.n1",
        "$JS.API.STREAM.MSG.GET.WORK",
    ] {
        for session in [&node, &runner] {
            let reply = session.request::<_, Value>(subject, &json!({})).await;
            assert!(matches!(reply, Err(LinkError::Forbidden { .. })), "{subject} replied {reply:?}");
        }
    }
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
        (&node, "cfq.v1.order.n2.*"),
        (&node, "cfq.v1.order.>"),
        (&node, "cfq.v1.node.*.tokens.*"),
        (&node, "_INBOX_runner_r1.>"),
        (&node, "_INBOX_scheduler.>"),
        (&runner, "cfq.v1.cmd.node.n1"),
        (&runner, "cfq.v1.work.>"),
        (&runner, "cfq.v1.order.n1.*"),
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

/// When the server created the stream of work orders.
async fn stream_creation(scheduler: &Session) -> String {
    let streams = async_nats::jetstream::new(scheduler.client().clone());
    wait::until("the stream of work orders", WAIT_LIMIT, || async {
        let stream = streams.get_stream("WORK").await.map_err(|error| error.to_string())?;
        Ok(stream.cached_info().created.to_string())
    })
    .await
}

/// The sender of a message chooses its reply subject, and the server does not check it. A status message of JetStream on
/// the subject `DELETE_STREAM` would delete the stream of work orders.
#[tokio::test(flavor = "multi_thread")]
async fn forged_reply_subject_makes_jetstream_publish_nothing() {
    let Fixture { cluster, scheduler, node, runner } = Fixture::start().await;
    let created = stream_creation(&scheduler).await;
    let mut unused = subscribe(&scheduler, UNUSED_COMMAND).await;
    let streams = async_nats::jetstream::new(scheduler.client().clone());
    let stream = streams.get_stream("WORK").await.unwrap();
    let consumers: Vec<String> = stream.consumer_names().map(Result::unwrap).collect().await;
    let [consumer] = &consumers[..] else { panic!("one consumer: {consumers:?}") };
    for (subject, payload) in [
        (format!("$JS.API.CONSUMER.MSG.NEXT.WORK.{consumer}"), r#"{"batch":1,"no_wait":true}"#),
        (format!("$JS.API.CONSUMER.MSG.NEXT.WORK.{consumer}"), r#"{"batch":1,"expires":1000000}"#),
        (format!("$JS.ACK.WORK.{consumer}.1.1.1.1.0"), "+ACK"),
        (format!("$JS.ACK.WORK.{consumer}.1.1.1.1.0"), "+NXT"),
        (format!("$JS.FC.WORK.{consumer}.x"), ""),
        ("$JS.API.STREAM.INFO.WORK".to_owned(), ""),
    ] {
        for (session, reply) in [(&node, UNUSED_COMMAND), (&runner, UNUSED_COMMAND), (&node, DELETE_STREAM)] {
            let mut refusals = session.permission_violations();
            let client = session.client();
            client.publish_with_reply(subject.clone(), reply, payload.into()).await.unwrap();
            let expected = PermissionViolation::Publish { subject: subject.clone() };
            let refused = tokio::time::timeout(REPLY_LIMIT, refusals.violated(&expected)).await;
            assert_eq!(stream_creation(&scheduler).await, created, "{subject} deleted the stream");
            assert!(refused.is_ok(), "{subject} was not refused");
        }
    }
    // The header asks the server to report the path of the message to another subject.
    for dest in [UNUSED_COMMAND, DELETE_STREAM] {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Trace-Dest", dest);
        let mut refusals = node.permission_violations();
        node.client().publish_with_headers("cfq.v1.node.n1.heartbeat", headers, "".into()).await.unwrap();
        bounded(dest, refusals.violated(&PermissionViolation::Publish { subject: dest.to_owned() })).await;
    }
    scheduler.client().publish(UNUSED_COMMAND, "mark".into()).await.unwrap();
    assert!(until_mark(&mut unused).await.is_empty(), "a message was published");
    assert_eq!(stream_creation(&scheduler).await, created, "the stream was deleted");
    cluster.finish().await;
}

/// A node may publish to the reply subject of a message that it received. The reply subject of a work order belongs to
/// JetStream.
#[tokio::test(flavor = "multi_thread")]
async fn reply_to_a_work_order_makes_jetstream_publish_nothing() {
    let Fixture { cluster, scheduler, node, .. } = Fixture::start().await;
    let created = stream_creation(&scheduler).await;
    let streams = async_nats::jetstream::new(scheduler.client().clone());
    let stream = streams.get_stream("WORK").await.unwrap();
    let consumers: Vec<String> = stream.consumer_names().map(Result::unwrap).collect().await;
    let boot = consumers[0].strip_prefix("n1_").unwrap().to_owned();
    let mut unused = subscribe(&scheduler, UNUSED_COMMAND).await;
    let mut orders = node.client().subscribe(format!("cfq.v1.order.n1.{boot}")).await.unwrap();
    node.flush().await.unwrap();
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    for (payload, forged) in [("+NXT", UNUSED_COMMAND), ("+ACK", DELETE_STREAM)] {
        let order = bounded("a work order", orders.next()).await.unwrap();
        let reply = order.reply.expect("JetStream sets it");
        node.client().publish_with_reply(reply, forged, payload.into()).await.unwrap();
    }
    // This waits until the server has read the messages above.
    subscribe(&node, "cfq.v1.cmd.node.n1").await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged);
    scheduler.client().publish(UNUSED_COMMAND, "mark".into()).await.unwrap();
    assert!(until_mark(&mut unused).await.is_empty(), "a message was published");
    assert_eq!(stream_creation(&scheduler).await, created, "the stream was deleted");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_with_a_forged_reply_subject_is_not_answered() {
    let Fixture { cluster, scheduler, node, runner } = Fixture::start().await;
    let created = stream_creation(&scheduler).await;
    let mut unused = subscribe(&scheduler, UNUSED_COMMAND).await;
    let of_node =
        ["register", "hello", "preparing", "accept", "refuse", "journal", "result", "blob_put", "blob_get", "nothing"];
    let of_runner =
        ["register", "lease", "step", "job_submit", "job_get", "job_cancel", "release", "abandon", "blob_get", "x"];
    let of_node = of_node.map(|verb| (&node, format!("cfq.v1.node.n1.{verb}")));
    let of_runner = of_runner.map(|verb| (&runner, format!("cfq.v1.runner.r1.{verb}")));
    for (session, subject) in of_node.into_iter().chain(of_runner) {
        for forged in [UNUSED_COMMAND, DELETE_STREAM, "_INBOX_node_n2.x", "_INBOX_scheduler.x"] {
            for payload in [r#"{"v":1,"body":"unreadable"}"#, r#"{"v":9,"body":{}}"#, "not a message", ""] {
                let client = session.client();
                client.publish_with_reply(subject.clone(), forged, payload.into()).await.unwrap();
            }
        }
        if !subject.ends_with("nothing") && !subject.ends_with(".x") {
            // Requests of one verb are read in order: the reply to this one shows that the others were read.
            let reply = bounded(&subject, session.request::<_, Value>(&subject, &"unreadable")).await;
            assert!(reply.is_ok(), "{subject} replied {reply:?}");
        }
    }
    scheduler.client().publish(UNUSED_COMMAND, "mark".into()).await.unwrap();
    assert!(until_mark(&mut unused).await.is_empty(), "a reply was sent");
    assert_eq!(stream_creation(&scheduler).await, created, "the stream was deleted");
    cluster.finish().await;
}

/// A runner receives the token frames of nodes. It must not get the permission to publish to their reply subjects.
#[tokio::test(flavor = "multi_thread")]
async fn runner_may_not_publish_to_the_reply_subject_of_a_token_frame() {
    let Fixture { cluster, scheduler, node, runner } = Fixture::start().await;
    let created = stream_creation(&scheduler).await;
    let mut frames = subscribe(&runner, "cfq.v1.node.*.tokens.*").await;
    for forged in [DELETE_STREAM, UNUSED_COMMAND] {
        node.client().publish_with_reply("cfq.v1.node.n1.tokens.x", forged, "".into()).await.unwrap();
        let frame = bounded("the frame", frames.next()).await.unwrap();
        let mut refusals = runner.permission_violations();
        runner.client().publish(frame.reply.unwrap(), "".into()).await.unwrap();
        let expected = PermissionViolation::Publish { subject: forged.to_owned() };
        let refused = tokio::time::timeout(REPLY_LIMIT, refusals.violated(&expected)).await;
        assert_eq!(stream_creation(&scheduler).await, created, "the runner deleted the stream");
        assert!(refused.is_ok(), "{forged} was not refused");
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
