//! Tests of two schedulers: one leads, the other stands by.

use std::time::Duration;

use cfq_link::{LinkError, Session};
use cfq_proto::ids::{BootId, NodeId, RunnerId};
use cfq_proto::messages::{Heartbeat, HeartbeatReply};
use cfq_proto::subject::{self, Identity};
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, tail};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// Number of requests while the standby is stopped. If the standby got half of them, the chance that it got none would
/// be less than one in a billion.
const REQUESTS: usize = 40;

/// The standby is stopped, but stays connected to NATS: it must get no request, since it would not answer.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_standby_costs_no_request_and_no_lease() {
    let fast = Options::default().timing;
    let timing = Timing { leader_renewal_ms: 1_000, leader_ttl_ms: 3_000, ..fast };
    let cluster = Cluster::start_with(Options { timing, ..Options::default() }).await;
    // The second scheduler is started after the first one leads, so that it is the one that stands by.
    wait_for_line(&cluster, "scheduler", "became leader").await;
    cluster.start_service("second_scheduler");
    wait_for_line(&cluster, "second_scheduler", "another scheduler leads and answers the requests").await;
    let slow = Duration::from_millis(60);
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", "def add(a, b):\n    return a + b"), slow)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let runner = RunnerId::new("r1").unwrap();
    let asker = Session::connect(&cluster.nats.config("runner"), Identity::Runner(runner.clone()), &Timing::default())
        .await
        .unwrap();
    cluster.signal("second_scheduler", libc::SIGSTOP);
    let heartbeat = Heartbeat { boot: BootId::fresh(), held: vec![], ledger: None, devices: None };
    let (subject, mut unanswered) = (subject::runner(&runner, "heartbeat"), 0);
    for _ in 0..REQUESTS {
        let reply = asker.request::<_, HeartbeatReply>(&subject, &heartbeat);
        // The limit only ends the wait for a reply that never comes.
        unanswered += usize::from(!matches!(tokio::time::timeout(Duration::from_secs(3), reply).await, Ok(Ok(_))));
    }
    cluster.signal("second_scheduler", libc::SIGCONT);
    assert_eq!(unanswered, 0, "of {REQUESTS} requests");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.attempt, 1, "the runner kept its lease");
    assert!(detail.jobs.iter().all(|j| (j.attempt, j.losses) == (1, 0)), "the node kept its lease: {:?}", detail.jobs);
    cluster.finish().await;
}

/// Waits until the log of a service contains this text.
async fn wait_for_line(cluster: &Cluster, service: &str, text: &str) {
    wait::until(&format!("{text:?} in the log of {service}"), WAIT_LIMIT, || async {
        let log = std::fs::read_to_string(cluster.log(service)).unwrap_or_default();
        if log.contains(text) { Ok(()) } else { Err(tail(&cluster.log(service))) }
    })
    .await;
}

/// The only scheduler is stopped for longer than the sender of a request waits, and continued before NATS closes its
/// connection. It reads the request then, and drops it.
#[tokio::test(flavor = "multi_thread")]
async fn request_that_a_stopped_scheduler_reads_too_late_is_dropped() {
    let cluster = Cluster::start().await;
    // No node with this name runs in the cluster.
    let node = NodeId::new("n2").unwrap();
    let identity = Identity::Node(node.clone());
    let sender = Session::connect(&cluster.nats.config("second_node"), identity, &Timing::default()).await.unwrap();
    let heartbeat = Heartbeat { boot: BootId::fresh(), held: vec![], ledger: None, devices: None };
    let subject = subject::node(&node, "heartbeat");
    let first: HeartbeatReply = sender.request_until_answered(&subject, &heartbeat).await.unwrap();
    assert!(first.register_again);
    cluster.signal("scheduler", libc::SIGSTOP);
    let stat = format!("/proc/{}/stat", cluster.pid("scheduler"));
    wait::until("the scheduler to be stopped", WAIT_LIMIT, || async {
        let text = std::fs::read_to_string(&stat).unwrap();
        let is_stopped = text.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'));
        if is_stopped { Ok(()) } else { Err(text) }
    })
    .await;
    let timeout = Duration::from_millis(500);
    let late = sender.request_within::<_, HeartbeatReply>(&subject, &heartbeat, timeout).await;
    // Its age is known except for the time that the first heartbeat took.
    tokio::time::sleep(timeout).await;
    cluster.signal("scheduler", libc::SIGCONT);
    assert!(matches!(late, Err(LinkError::NoReply { .. })), "{late:?}");
    let after: HeartbeatReply = sender.request_until_answered(&subject, &heartbeat).await.unwrap();
    assert!(after.register_again);
    let log = std::fs::read_to_string(cluster.log("scheduler")).unwrap();
    let dropped = log.lines().filter(|line| line.contains("request dropped") && line.contains("sender=n2"));
    assert_eq!(dropped.count(), 1, "{}", tail(&cluster.log("scheduler")));
    cluster.finish().await;
}

/// The leader is killed: the standby answers requests, leads, and the task is completed.
#[tokio::test(flavor = "multi_thread")]
async fn standby_takes_over_from_a_killed_leader() {
    let cluster = Cluster::start_with(Options { second_scheduler: true, ..Options::default() }).await;
    let slow = Duration::from_millis(60);
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", "def add(a, b):\n    return a + b"), slow)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let leads =
        |service: &str| std::fs::read_to_string(cluster.log(service)).unwrap_or_default().contains("became leader");
    // The test's client needs the first scheduler, so that one is killed and started again, whether it leads or not.
    assert!(leads("scheduler") || leads("second_scheduler"));
    cluster.kill9("scheduler");
    wait::until("the other scheduler to lead", WAIT_LIMIT, || async {
        if leads("second_scheduler") { Ok(()) } else { Err(tail(&cluster.log("second_scheduler"))) }
    })
    .await;
    cluster.start_service("scheduler");
    cluster.wait_until_ready().await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
