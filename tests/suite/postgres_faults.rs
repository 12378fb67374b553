//! Tests of Postgres faults while a task runs: all processes of Postgres are killed and started again later, or they
//! are frozen for a while. In both cases, Postgres is unavailable for longer than one lease TTL. Every test has a
//! dedicated server. No work may be lost or done twice, and no lease may be taken from a holder that is alive.

use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// Duration of the fault: longer than a lease, and shorter than the statement timeout (5 s), so that the scheduler gets
/// no error.
const FAULT_DURATION: Duration = Duration::from_secs(4);

/// Timing with a heartbeat interval that is longer than the scheduler's wait for the database, as by default. Usually
/// no heartbeat is in flight when the fault ends, so a sweep at that moment would find every lease expired.
fn timing() -> Timing {
    let fast = Options::default().timing;
    Timing { lease_ttl_ms: 3_000, lease_margin_ms: 500, heartbeat_ms: 1_500, ..fast }
}

/// Starts a cluster with a task whose generation takes about twice as long as the fault, and waits until it generates.
async fn generating() -> (Cluster, UserRepo, TaskKey) {
    let cluster =
        Cluster::start_with(Options { dedicated_postgres: true, timing: timing(), ..Options::default() }).await;
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(300)));
    cluster.models.script("alpha", vec![Reply::Slow(long, Duration::from_millis(40))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    (cluster, repo, task)
}

/// Asserts that the task ends as it would without the fault and still with its first leases, and that a new task
/// succeeds.
async fn assert_unaffected(cluster: Cluster, repo: UserRepo, task: TaskKey) {
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.run_oracle(task, &repo).await;
    assert_eq!(detail.attempt, 1, "the runner kept its lease");
    assert!(
        detail.jobs.iter().all(|j| j.losses == 0 && j.failures == 0),
        "the node kept its leases: {:?}",
        detail.jobs
    );
    assert_eq!(cluster.models.call_count("alpha"), 1, "generated once");
    assert_eq!(cluster.models.call_count("beta"), 1);

    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_postgres_costs_no_lease() {
    let (cluster, repo, task) = generating().await;
    cluster.database.server().kill9().await;
    wait::until("the API to report that it is not ready", WAIT_LIMIT, || async {
        if cluster.client.check_ready().await.is_err() { Ok(()) } else { Err("still ready".to_owned()) }
    })
    .await;
    let refused = cluster.client.submit(&cluster.spec(&repo), Some("meanwhile")).await;
    assert!(refused.is_err(), "accepted without a database: {refused:?}");
    tokio::time::sleep(FAULT_DURATION).await;
    cluster.database.server().restart().await;
    assert_unaffected(cluster, repo, task).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_frozen_past_the_lease_ttl_costs_no_lease() {
    let (cluster, repo, task) = generating().await;
    let frozen = cluster.database.server().freeze();
    let reply = tokio::time::timeout(FAULT_DURATION, cluster.client.task(task)).await;
    assert!(!matches!(reply, Ok(Ok(_))), "Postgres was not frozen: {reply:?}");
    if reply.is_ok() {
        // The request failed early; the fault has to last longer than the leases.
        tokio::time::sleep(FAULT_DURATION).await;
    }
    drop(frozen);
    assert_unaffected(cluster, repo, task).await;
}

/// Statements that make Postgres refuse to extend a lease, as if the disk of the tables were full. All other writes, such
/// as the renewal of the leader row, succeed.
const REFUSE_EXTENSIONS: &str = "
    create function refuse() returns trigger language plpgsql as $$
        begin raise exception 'could not extend file: No space left on device' using errcode = '53100'; end $$;
    create trigger refuse before update of lease_expires on jobs for each row
        when (old.state = 'running' and new.state = 'running') execute function refuse();
    create trigger refuse before update of lease_expires on tasks for each row
        when (old.state = 'running' and new.state = 'running') execute function refuse();";

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_that_cannot_be_written_cost_no_lease() {
    let (cluster, repo, task) = generating().await;
    cluster.database.raw(REFUSE_EXTENSIONS).await;
    tokio::time::sleep(FAULT_DURATION).await;
    cluster.database.raw("drop trigger refuse on jobs; drop trigger refuse on tasks").await;
    assert_unaffected(cluster, repo, task).await;
}
