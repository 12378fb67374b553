//! Tests of the calls to a model's endpoint: retries while it is unavailable, and cancellation.

use std::time::{Duration, Instant};

use cfq_proto::loop_step::LoopState;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{End, Reply};
use cfq_tests::wait;

use super::{add, score};

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_down_beyond_the_retry_ceiling_fails_the_task() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Status(503, "no".into())]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Failed);
    assert!(cluster.models.call_count("alpha") > 1, "the call was retried before the task failed");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_recovering_in_time_does_not_fail_the_task() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(90)]);
    cluster.models.set_down(true);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_queued(task).await;
    cluster.models.set_down(false);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_stops_a_running_generation() {
    // The documentation says that a cancel takes about a second; this limit is longer because the machine may be
    // loaded.
    const CANCEL_LIMIT: Duration = Duration::from_secs(10);
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow("word ".repeat(5_000), Duration::from_millis(30))]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("the model's first text", WAIT_LIMIT, || async {
        let calls = cluster.models.all_calls();
        if calls.iter().any(|c| !c.sent.is_empty()) { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;
    let requested = Instant::now();
    let reply = cluster.client.cancel(task, "changed my mind").await.unwrap();
    assert_eq!(reply.state, TaskState::Cancelled);
    // The client closes its connection to the model server: the generation stops.
    let ends = wait::until("the model's call to end", CANCEL_LIMIT, || async {
        let ends: Vec<End> = cluster.models.all_calls().iter().filter_map(|c| c.end).collect();
        if ends.is_empty() { Err("still open".to_owned()) } else { Ok(ends) }
    })
    .await;
    println!("the connection to the model server was closed {:?} after the cancel request", requested.elapsed());
    assert_eq!(ends, [End::Disconnected], "one call, which was interrupted");
    cluster.wait_until_nodes_idle().await;
    let detail = cluster.client.task(task).await.unwrap();
    assert_eq!(detail.summary.state, TaskState::Cancelled);
    assert_eq!(detail.summary.loop_state, LoopState::Idle);
    // A second cancel changes nothing, and there is still one terminal event.
    drop(cluster.client.cancel(task, "").await);
    let after = cluster.run_oracle(task, &repo).await;
    assert_eq!(after.summary.state, TaskState::Cancelled, "a terminal state never changes");
    cluster.finish().await;
}
