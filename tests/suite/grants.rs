//! A node or runner can say what its role says, and nothing else: the NATS server refuses the rest. Each refusal is waited
//! for by its name, so nothing here passes because an answer was merely late.

use std::time::Duration;

use async_nats::{Message, Subscriber};
use cfq_link::refusal::Refusal;
use cfq_link::{LinkError, Session};
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::Cluster;
use futures::StreamExt;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

async fn soon<T>(what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, wait).await.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// A cluster, and a session of our own as each of its three identities.
struct Stage {
    cluster: Cluster,
    scheduler: Session,
    node: Session,
    runner: Session,
}

impl Stage {
    async fn set() -> Self {
        let cluster = Cluster::start().await;
        let connect = async |who, identity| {
            Session::connect(&cluster.nats.config(who), identity, &Timing::default()).await.unwrap()
        };
        let scheduler = connect("scheduler", Identity::Scheduler).await;
        let node = connect("node", Identity::Node(NodeId::new("n1").unwrap())).await;
        let runner = connect("runner", Identity::Runner(RunnerId::new("r1").unwrap())).await;
        Self { cluster, scheduler, node, runner }
    }
}

/// Listening for sure: the server works off a connection in order, so once it has refused what was said after the
/// subscription, it has seen that. (A flush only empties the client's buffer.)
async fn listen(session: &Session, subject: &'static str) -> Subscriber {
    let listening = session.client().subscribe(subject).await.unwrap();
    let mut refusals = session.refusals();
    session.client().publish("nobody.may.say.this", "".into()).await.unwrap();
    soon(subject, refusals.heard(&Refusal::Publish { subject: "nobody.may.say.this".to_owned() })).await;
    listening
}

/// Messages come in the order they were said, so once `mark` is here, whatever was said before it has come or never will.
/// Other traffic of the cluster is passed over.
async fn until_mark(listening: &mut Subscriber) -> Vec<Message> {
    let mut before = Vec::new();
    let read = async {
        loop {
            let message = listening.next().await.expect("the connection stays");
            if &message.payload[..] == b"mark" {
                return;
            }
            before.push(message);
        }
    };
    soon("the mark", read).await;
    before
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_granted_is_not_said() {
    let Stage { cluster, scheduler, node, runner } = Stage::set().await;
    let mut all = listen(&scheduler, "cfq.v1.>").await;
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
        let mut refusals = session.refusals();
        session.client().publish(subject, "forbidden".into()).await.unwrap();
        soon(subject, refusals.heard(&Refusal::Publish { subject: subject.to_owned() })).await;
    }
    // What is granted arrives, on the same connections and after all of the above would have.
    for (session, subject) in [(&node, "cfq.v1.node.n1.tokens.mark"), (&runner, "cfq.v1.runner.r1.mark")] {
        session.client().publish(subject, "mark".into()).await.unwrap();
        for message in until_mark(&mut all).await {
            assert_ne!(&message.payload[..], b"forbidden", "{} got through", message.subject);
        }
    }

    // JetStream's API is closed but for the pull on one's own consumer, and whoever asks is told so at once.
    for subject in [
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.PURGE.WORK",
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.n2",
        "$JS.API.CONSUMER.DELETE.WORK.n1",
        "$JS.API.STREAM.MSG.GET.WORK",
    ] {
        for session in [&node, &runner] {
            let answer = session.request::<_, Value>(subject, &json!({})).await;
            assert!(matches!(answer, Err(LinkError::Forbidden { .. })), "{subject} answered {answer:?}");
        }
    }
    let pulled = runner.pull::<Value>("WORK", "n1", Duration::from_secs(60)).await;
    assert!(matches!(pulled, Err(LinkError::Forbidden { .. })), "the runner pulled {pulled:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_granted_is_not_heard() {
    let Stage { cluster, scheduler, node, runner } = Stage::set().await;
    let mut granted = [listen(&node, "cfq.v1.cmd.node.n1").await, listen(&runner, "cfq.v1.cmd.runner.r1").await];
    // Nobody reads another's answers, commands or work.
    let mut overheard = Vec::new();
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
        let mut refusals = session.refusals();
        overheard.push((subject, listen(session, subject).await));
        soon(subject, refusals.heard(&Refusal::Subscribe { subject: subject.to_owned() })).await;
    }

    // All of it is really said: what the scheduler publishes, and answers into the inboxes of those who asked.
    for subject in ["cfq.v1.cmd.node.n2", "cfq.v1.work.n2.x"] {
        scheduler.client().publish(subject, "secret".into()).await.unwrap();
    }
    let mut answers = listen(&scheduler, "cfq.v1.*.*.ask").await;
    for (asker, subject) in [(&node, "cfq.v1.node.n1.ask"), (&runner, "cfq.v1.runner.r1.ask")] {
        let answer = async {
            let question = answers.next().await.unwrap();
            scheduler.client().publish(question.reply.unwrap(), "secret".into()).await.unwrap();
        };
        let asked = asker.client().request(subject, "{}".into());
        let (answered, ()) = soon(subject, async { tokio::join!(asked, answer) }).await;
        assert_eq!(&answered.unwrap().payload[..], b"secret", "the asker hears it");
    }
    let answer = async {
        // A command of the cluster's own scheduler asks for no answer.
        let reply = loop {
            if let Some(reply) = granted[0].next().await.unwrap().reply {
                break reply;
            }
        };
        node.client().publish(reply, "secret".into()).await.unwrap();
    };
    let asked = scheduler.client().request("cfq.v1.cmd.node.n1", "{}".into());
    let (answered, ()) = soon("the scheduler's answer", async { tokio::join!(asked, answer) }).await;
    assert_eq!(&answered.unwrap().payload[..], b"secret");

    // What is granted comes, after all of the above would have.
    for (index, subject) in ["cfq.v1.cmd.node.n1", "cfq.v1.cmd.runner.r1"].into_iter().enumerate() {
        scheduler.client().publish(subject, "mark".into()).await.unwrap();
        until_mark(&mut granted[index]).await;
    }
    for (subject, listening) in &mut overheard {
        let heard = futures::FutureExt::now_or_never(listening.next());
        assert!(heard.is_none(), "{subject} was heard: {heard:?}");
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_known_key_nobody_connects_and_the_error_says_so_soon() {
    let Stage { cluster, .. } = Stage::set().await;
    let identity = || Identity::Node(NodeId::new("n1").unwrap());
    let mut config = cluster.nats.config("node");
    let own = config.seed_file.take().unwrap();
    let without = soon("a refusal", Session::connect(&config, identity(), &Timing::default())).await.unwrap_err();
    assert!(without.to_string().contains("refuses a connection without a key"), "{without}");

    let stranger = cluster.dir.path().join("stranger.seed");
    std::fs::write(&stranger, nkeys::KeyPair::new_user().seed().unwrap()).unwrap();
    config.seed_file = Some(stranger.clone());
    let refused = soon("a refusal", Session::connect(&config, identity(), &Timing::default())).await.unwrap_err();
    assert!(matches!(refused, LinkError::Unwelcome { .. }), "{refused}");
    assert!(refused.to_string().contains(stranger.to_str().unwrap()), "{refused}");

    config.seed_file = Some(own);
    soon("a welcome", Session::connect(&config, identity(), &Timing::default())).await.unwrap();
    cluster.finish().await;
}
