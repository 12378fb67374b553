//! Postgres itself is hurt while a task runs: killed with all its processes, and frozen, each for longer than a lease. Every
//! test has a server of its own. Nobody's work may be lost, done twice, or taken from a holder who lived all the time.

use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// Longer than a lease, and shorter than a statement may take (5 s): no error tells the scheduler that anything was wrong.
const FAULT: Duration = Duration::from_secs(4);

/// Beats further apart than a scheduler waits for the database with one, as shipped: at the end of the fault mostly none is
/// under way, and whoever swept at once would find every lease run out.
fn timing() -> Timing {
    let fast = Options::default().timing;
    Timing { lease_ttl_ms: 3_000, lease_margin_ms: 500, beat_ms: 1_500, ..fast }
}

/// A cluster in the middle of a generation that takes about twice as long as the fault.
async fn at_work() -> (Cluster, UserRepo, TaskKey) {
    let cluster = Cluster::with(Options { own_postgres: true, timing: timing(), ..Options::default() }).await;
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(300)));
    cluster.models.script("alpha", vec![Reply::Slow(long, Duration::from_millis(40))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    (cluster, repo, task)
}

/// The task ends as if nothing had been, and a fresh one works.
async fn goes_on(cluster: Cluster, repo: UserRepo, task: TaskKey) {
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.oracle(task, &repo).await;
    assert_eq!(detail.attempt, 1, "the runner kept its lease");
    assert!(detail.jobs.iter().all(|j| j.losses == 0 && j.failures == 0), "the node kept its: {:?}", detail.jobs);
    assert_eq!(cluster.models.calls("alpha"), 1, "generated once");
    assert_eq!(cluster.models.calls("beta"), 1);

    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_killed_with_all_its_processes_costs_nobody_a_lease() {
    let (cluster, repo, task) = at_work().await;
    cluster.database.server().kill9().await;
    wait::until("an API that says it is not ready", PATIENCE, || async {
        if cluster.client.ready().await.is_err() { Ok(()) } else { Err("still ready".to_owned()) }
    })
    .await;
    let refused = cluster.client.submit(&cluster.spec(&repo), Some("meanwhile")).await;
    assert!(refused.is_err(), "acknowledged without a database: {refused:?}");
    tokio::time::sleep(FAULT).await;
    cluster.database.server().start_again().await;
    goes_on(cluster, repo, task).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_frozen_for_longer_than_a_lease_costs_nobody_a_lease() {
    let (cluster, repo, task) = at_work().await;
    let frozen = cluster.database.server().freeze();
    let answered = tokio::time::timeout(FAULT, cluster.client.task(task)).await;
    assert!(!matches!(answered, Ok(Ok(_))), "it was not frozen: {answered:?}");
    if answered.is_ok() {
        // An error came soon; the fault has yet to outlast the leases.
        tokio::time::sleep(FAULT).await;
    }
    drop(frozen);
    goes_on(cluster, repo, task).await;
}
