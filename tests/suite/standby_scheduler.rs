//! Tests of two schedulers: one leads, the other stands by.

use std::time::Duration;

use cfq_link::Session;
use cfq_proto::ids::{BootId, RunnerId};
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
    let cluster = Cluster::start_with(Options { second_scheduler: true, timing, ..Options::default() }).await;
    let stands_by = |service: &str| {
        let log = std::fs::read_to_string(cluster.log(service)).unwrap_or_default();
        let mut lines = log
            .lines()
            .filter(|line| line.contains("the requests of nodes and runners") || line.contains("became leader"));
        lines.next_back().is_some_and(|line| line.contains("another scheduler leads"))
    };
    let standby = wait::until("one scheduler to stand by", WAIT_LIMIT, || async {
        let standby = ["scheduler", "second_scheduler"].into_iter().find(|service| stands_by(service));
        standby
            .ok_or_else(|| format!("{}\n{}", tail(&cluster.log("scheduler")), tail(&cluster.log("second_scheduler"))))
    })
    .await;
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
    cluster.signal(standby, libc::SIGSTOP);
    let heartbeat = Heartbeat { boot: BootId::fresh(), held: vec![], ledger: None, devices: None };
    let (subject, mut unanswered) = (subject::runner(&runner, "heartbeat"), 0);
    for _ in 0..REQUESTS {
        let reply = asker.request::<_, HeartbeatReply>(&subject, &heartbeat);
        // The limit only ends the wait for a reply that never comes.
        unanswered += usize::from(!matches!(tokio::time::timeout(Duration::from_secs(3), reply).await, Ok(Ok(_))));
    }
    cluster.signal(standby, libc::SIGCONT);
    assert_eq!(unanswered, 0, "of {REQUESTS} requests");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.attempt, 1, "the runner kept its lease");
    assert!(detail.jobs.iter().all(|j| (j.attempt, j.losses) == (1, 0)), "the node kept its lease: {:?}", detail.jobs);
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
