//! Tests of servers that other machines reach, and of the nodes there.

use std::time::{Duration, Instant};

use cfq_deploy::nats::{RemoteNode, public_key_in};
use cfq_deploy::{LanOptions, Stack, StackOptions};
use cfq_link::child::Signal;
use cfq_link::{LinkError, NatsConfig, Session};
use cfq_proto::ids::NodeId;
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;

use crate::lab::{Lab, chain, node, options, running};

/// Longest wait for what normally takes a fraction of a second.
const WAIT: Duration = Duration::from_secs(30);

async fn start(lab: &Lab) -> Stack {
    let lan = LanOptions { listen: [127, 0, 0, 1].into(), hosts: vec!["127.0.0.1".to_owned()] };
    let options = StackOptions { lan: Some(lan), ..options() };
    Stack::start(&lab.paths, options).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn remote() -> NodeId {
    NodeId::new("gpu1").unwrap()
}

/// The connection of the remote node, whose key is in a file of its own.
fn remote_config(lab: &Lab, stack: &Stack) -> NatsConfig {
    NatsConfig { seed_file: Some(lab.folder.path().join("gpu1.seed")), ..stack.addresses().nats.config(&node()) }
}

async fn connect(config: &NatsConfig, name: Identity) -> Result<Session, LinkError> {
    Session::connect(config, name, &Timing::default()).await
}

async fn until(what: &str, mut is_done: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_done().await {
        assert!(start.elapsed() < WAIT, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_for_other_machines_is_reached_only_with_its_authority() {
    let (lab, other_lab) = (Lab::new(), Lab::new());
    let (stack, other) = (start(&lab).await, start(&other_lab).await);
    let own = stack.addresses().nats.config(&node());
    assert!(own.url.starts_with("tls://127.0.0.1:"), "{}", own.url);
    connect(&own, node()).await.unwrap();
    let foreign_authority = NatsConfig { ca_file: other.addresses().nats.ca.clone(), ..own.clone() };
    let system_authorities = NatsConfig { ca_file: None, ..own.clone() };
    for config in [foreign_authority, system_authorities] {
        let refused = connect(&config, node()).await.unwrap_err();
        assert!(chain(&refused).contains("invalid peer certificate"), "{}", chain(&refused));
    }
    stack.stop().await.unwrap();
    other.stop().await.unwrap();
}

/// Also after restarts of the server and of the whole stack, before anything else tells NATS which nodes there are.
#[tokio::test(flavor = "multi_thread")]
async fn remote_node_connects_until_it_is_removed() {
    let lab = Lab::new();
    let mut stack = start(&lab).await;
    let config = remote_config(&lab, &stack);
    let key = public_key_in(config.seed_file.as_deref().unwrap()).unwrap();
    let identity = Identity::Node(remote());
    let stranger = connect(&config, identity.clone()).await.unwrap_err();
    assert!(matches!(stranger, LinkError::AuthRejected { .. }), "{}", chain(&stranger));
    let nodes = stack.remote_nodes();
    nodes.set(vec![RemoteNode { name: remote(), key }]).unwrap();
    until("the added node connects", async || connect(&config, identity.clone()).await.is_ok()).await;

    assert!(running(&lab.paths, "nats").signal(Signal::Kill).unwrap());
    tokio::time::timeout(WAIT, stack.supervise()).await.unwrap().unwrap();
    connect(&config, identity.clone()).await.unwrap();
    stack.stop().await.unwrap();
    let stack = start(&lab).await;
    let (session, own) = (
        connect(&config, identity.clone()).await.unwrap(),
        connect(&stack.addresses().nats.config(&node()), node()).await.unwrap(),
    );
    assert!(session.is_connected());

    stack.remote_nodes().set(vec![]).unwrap();
    until("the connection of the removed node is closed", async || !session.is_connected()).await;
    let removed = connect(&config, identity).await.unwrap_err();
    assert!(matches!(removed, LinkError::AuthRejected { .. }), "{}", chain(&removed));
    assert!(own.is_connected(), "other connections stay");
    own.flush().await.unwrap();
    stack.stop().await.unwrap();
}
