//! Tests of faults that are not the fault of the work: a lost message, a release or report that is answered with
//! `unavailable` once, a restart of the machine. None of them counts as a loss of the task or of its job.

use std::path::Path;
use std::time::Duration;

use cfq_proto::event::{EventBody, RunnerChange};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT};
use cfq_tests::mount_namespace::MountNamespace;
use cfq_tests::nats_proxy::Lost;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::task_rows::TaskRows;
use cfq_tests::{binary, wait};

/// Options with leases that last longer than a fault of these tests.
fn long_leases() -> Options {
    let mut options = Options::default();
    (options.timing.lease_ttl_ms, options.timing.drain_timeout_ms) = (60_000, 15_000);
    options
}

/// Lets the scripted models complete a task whose generation takes several seconds.
fn script(cluster: &Cluster) {
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(300)));
    cluster.models.script("alpha", vec![Reply::Slow(long.clone(), Duration::from_millis(30)), Reply::Text(long)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
}

/// Submits a task and waits until it generates.
async fn generating(cluster: &Cluster) -> (UserRepo, TaskKey) {
    script(cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    (repo, task)
}

/// Reasons of the losses of the task's runner.
async fn runner_losses(cluster: &Cluster, task: TaskKey) -> Vec<String> {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    let reason = |body: EventBody| match body {
        EventBody::RunnerChanged { change: RunnerChange::Lost { reason }, .. } => Some(reason),
        _ => None,
    };
    events.into_iter().filter_map(|event| reason(event.body)).collect()
}

/// Asserts that the task is completed, and that no attempt at one of its jobs was lost.
async fn assert_completed_without_lost_job(cluster: &Cluster, repo: &UserRepo, task: TaskKey) {
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert!(detail.jobs.iter().all(|job| job.losses == 0), "{:?}", detail.jobs);
    let mut connection = cluster.database.connect().await;
    let rows = TaskRows::of(&mut connection, &detail.summary.id.to_string()).await;
    let attempts: Vec<_> = rows.jobs.iter().flat_map(|job| &job.attempts).collect();
    // The first placement may still go to the boot before the one that was started behind the proxy.
    let accepts = |boot: &str| attempts.iter().any(|attempt| attempt.accepted && attempt.boot == boot);
    let lost = attempts.iter().any(|attempt| match attempt.outcome.as_deref() {
        Some("lost") => true,
        Some("unplaced") => accepts(&attempt.boot),
        _ => false,
    });
    assert!(!lost, "{attempts:?}");
    cluster.run_oracle(task, repo).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_reply_to_a_lease_request_costs_no_attempt() {
    let cluster = Cluster::start().await;
    let lost = Lost::Reply { subject: "cfq.v1.runner.r1.lease".into(), text: "\"granted\"" };
    let proxy = cluster.restart_behind_proxy("runner", lost).await;
    let (repo, task) = generating(&cluster).await;
    assert!(proxy.is_lost());
    assert_completed_without_lost_job(&cluster, &repo, task).await;
    assert_eq!(cluster.client.task(task).await.unwrap().attempt, 1, "the repeated request got the same grant");
    assert_eq!(runner_losses(&cluster, task).await, Vec::<String>::new());
    cluster.finish().await;
}

/// Stops the service, starts it again, and waits until the task is completed.
async fn restart_and_complete(cluster: Cluster, service: &str, repo: UserRepo, task: TaskKey) {
    assert!(cluster.stop(service).await.success());
    cluster.start_service(service);
    assert_completed_without_lost_job(&cluster, &repo, task).await;
    assert_eq!(runner_losses(&cluster, task).await, Vec::<String>::new());
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn release_of_a_drained_task_that_is_lost_is_repeated() {
    let cluster = Cluster::start_with(long_leases()).await;
    let lost = Lost::Request { subject: "cfq.v1.runner.r1.release".into(), text: "" };
    let proxy = cluster.restart_behind_proxy("runner", lost).await;
    let (repo, task) = generating(&cluster).await;
    restart_and_complete(cluster, "runner", repo, task).await;
    assert!(proxy.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn report_of_a_drained_job_that_is_lost_is_repeated() {
    let cluster = Cluster::start_with(long_leases()).await;
    let lost = Lost::Request { subject: "cfq.v1.node.n1.result".into(), text: "\"released\"" };
    let proxy = cluster.restart_behind_proxy("node", lost).await;
    let (repo, task) = generating(&cluster).await;
    restart_and_complete(cluster, "node", repo, task).await;
    assert!(proxy.is_lost());
}

/// Drains the service while the task's row is locked, so that its release or report is answered with `unavailable`. The
/// row is unlocked once the service has logged `retried`.
async fn drained_while_unavailable(service: &str, retried: &str) {
    let cluster = Cluster::start_with(long_leases()).await;
    let (repo, task) = generating(&cluster).await;
    let mut lock = cluster.database.connect().await;
    sqlx::raw_sql("begin; select 1 from tasks for update").execute(&mut lock).await.unwrap();
    let unlock = async {
        wait::until("the service to repeat its request", WAIT_LIMIT, || async {
            let log = std::fs::read_to_string(cluster.log(service)).unwrap();
            if log.contains(retried) { Ok(()) } else { Err(cfq_tests::cluster::tail(&cluster.log(service))) }
        })
        .await;
        sqlx::raw_sql("rollback").execute(&mut lock).await.unwrap();
    };
    let (status, ()) = tokio::join!(cluster.stop(service), unlock);
    assert!(status.success());
    cluster.start_service(service);
    assert_completed_without_lost_job(&cluster, &repo, task).await;
    assert_eq!(runner_losses(&cluster, task).await, Vec::<String>::new());
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn release_of_a_drained_task_is_repeated_while_unavailable() {
    drained_while_unavailable("runner", "cannot release the task yet, retrying").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn report_of_a_drained_job_is_repeated_while_unavailable() {
    drained_while_unavailable("node", "scheduler unavailable; the report is repeated").await;
}

/// Node and runner are killed and started again with another id of the machine's start, as after a restart of the
/// machine that is faster than their leases.
#[tokio::test(flavor = "multi_thread")]
async fn restart_of_the_machine_is_no_loss() {
    let mut options = Options::default();
    (options.timing.lease_ttl_ms, options.timing.lease_margin_ms) = (8_000, 1_000);
    let cluster = Cluster::start_with(options).await;
    let boot_id = cluster.dir.path().join("boot_id");
    std::fs::write(&boot_id, "5d9c0ab6-0000-4000-8000-000000000000\n").unwrap();
    let at = Path::new("/proc/sys/kernel/random/boot_id");
    let Some(namespace) = MountNamespace::with_file("restart_of_the_machine_is_no_loss", &boot_id, at) else { return };
    tokio::task::block_in_place(binary::cfq);
    let (repo, task) = generating(&cluster).await;
    for service in ["node", "runner"] {
        cluster.kill9(service);
    }
    for service in ["node", "runner"] {
        cluster.start_service_in(&namespace, service);
    }
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert!(detail.jobs.iter().all(|job| job.losses == 0), "{:?}", detail.jobs);
    assert_eq!(runner_losses(&cluster, task).await, ["was restarted together with its machine"]);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
