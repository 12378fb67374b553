//! Tests of two processes with the same id, for example from a copied folder. The process that is alive keeps its work,
//! and the other one is refused. After a kill, a process on the same machine takes over at once, and a process with
//! copied credentials once the lease has ended.

use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, tail};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// Starts a cluster with a task whose generation takes several seconds, and waits until it generates.
async fn generating(options: Options) -> (Cluster, UserRepo, TaskKey) {
    let cluster = Cluster::start_with(options).await;
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(300)));
    cluster.models.script("alpha", vec![Reply::Slow(long, Duration::from_millis(30))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    (cluster, repo, task)
}

async fn assert_second_is_refused(service: &str, id: &str) {
    let (cluster, repo, task) = generating(Options::default()).await;
    let copy = cluster.start_copy(service);
    wait::until("one of the two processes to exit", WAIT_LIMIT, || async {
        let exited = cluster.has_exited(service) || cluster.has_exited(&copy);
        if exited { Ok(()) } else { Err(tail(&cluster.log(&copy))) }
    })
    .await;
    assert!(!cluster.has_exited(service), "the first process was refused:\n{}", tail(&cluster.log(service)));
    let status = cluster.wait_until_exited(&copy).await;
    let log = std::fs::read_to_string(cluster.log(&copy)).unwrap();
    assert_eq!(status.code(), Some(2), "{log}");
    let error = log.lines().find(|line| line.starts_with("cfq: ")).unwrap();
    assert!(error.contains(&format!("uses the id {id}")), "{error}");
    assert!(error.contains("stop that process"), "the next step: {error}");

    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.attempt, 1, "the runner kept its lease");
    assert!(detail.jobs.iter().all(|j| (j.attempt, j.losses) == (1, 0)), "the node kept its lease: {:?}", detail.jobs);
    assert_eq!(cluster.models.call_count("alpha"), 1, "generated once");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_node_with_the_id_of_a_live_one_is_refused() {
    assert_second_is_refused("node", "n1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_runner_with_the_id_of_a_live_one_is_refused() {
    assert_second_is_refused("runner", "r1").await;
}

/// A second process with the same configuration file exits before it connects.
#[tokio::test(flavor = "multi_thread")]
async fn second_process_with_the_same_credentials_file_is_refused() {
    let (cluster, _repo, task) = generating(Options::default()).await;
    let seed = cluster.nats.config("node").seed_file.unwrap();
    let output = cluster.run_again("node").await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(seed.to_str().unwrap()) && stderr.contains("stop that process"), "{stderr}");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!((detail.summary.state, detail.attempt), (TaskState::Merged, 1), "{}", detail.reason);
    cluster.finish().await;
}

/// The leases are longer than any wait of the test, so the restarted processes cannot have waited for their end.
#[tokio::test(flavor = "multi_thread")]
async fn restarted_process_does_not_wait_for_the_lease_of_the_killed_one() {
    let mut options = Options::default();
    options.timing.lease_ttl_ms = 10 * WAIT_LIMIT.as_millis() as u64;
    let (cluster, repo, task) = generating(options).await;
    for service in ["node", "runner"] {
        cluster.kill9(service);
        cluster.start_service(service);
    }
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert!(detail.attempt >= 2, "the runner was killed");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn process_with_copied_credentials_takes_over_once_the_lease_has_ended() {
    let (cluster, repo, task) = generating(Options::default()).await;
    for service in ["node", "runner"] {
        cluster.kill9(service);
        let copy = cluster.start_copy(service);
        wait::until("the wait to be logged", WAIT_LIMIT, || async {
            let log = std::fs::read_to_string(cluster.log(&copy)).unwrap();
            if log.contains("waiting until the lease") { Ok(()) } else { Err(log) }
        })
        .await;
    }
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
