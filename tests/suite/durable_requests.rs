//! The scheduler dies while it writes what a client, or its own sweep, asked for. Whoever asks again finds it done once.

use std::time::Duration;

use cfq_proto::event::EventBody;
use cfq_proto::ids::TaskKey;
use cfq_proto::looping::EscalationAction;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

const ADD: &str = "def add(a, b):\n    return a + b";

async fn dies_at(failpoint: &str) -> Cluster {
    let failpoint = Some(("scheduler".to_owned(), failpoint.to_owned()));
    let cluster = Cluster::with(Options { failpoint, ..Options::default() }).await;
    let slow = Reply::Slow(file("add.py", ADD), Duration::from_millis(40));
    cluster.models.script("alpha", vec![slow]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    cluster
}

/// How often the task went into this state, by its own events.
async fn times_entered(cluster: &Cluster, task: TaskKey, state: TaskState) -> usize {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    events.iter().filter(|e| matches!(&e.body, EventBody::TaskStateChanged { to, .. } if *to == state)).count()
}

async fn cancelled(failpoint: &str) {
    let cluster = dies_at(failpoint).await;
    cluster.models.script("alpha", vec![Reply::Endless]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    let asking = wait::until("a cancel", PATIENCE, || async {
        cluster.client.cancel(task, "enough").await.map_err(|e| e.to_string())
    });
    let (reply, ()) = tokio::join!(asking, cluster.failpoint_hit());
    assert_eq!(reply.state, TaskState::Cancelled);
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Cancelled);
    cluster.node_is_idle().await;
    assert_eq!(times_entered(&cluster, task, TaskState::Cancelled).await, 1);
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_before_a_cancel_commits() {
    cancelled("scheduler.cancel.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_after_a_cancel_commits() {
    cancelled("scheduler.cancel.after_commit").await;
}

async fn resolved(failpoint: &str) {
    let cluster = dies_at(failpoint).await;
    cluster.models.script("beta", vec![Reply::Text(review(50, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    let task = cluster.submit(&spec).await;
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Escalated);
    // A client that was cut off asks again; that its question is answered already is an answer.
    let asking = wait::until("the answer to be taken", PATIENCE, || async {
        match cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await {
            Ok(_) => Ok(()),
            Err(error) if error.to_string().contains("has something to resolve") => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    });
    tokio::join!(asking, cluster.failpoint_hit());
    cluster.becomes(task, TaskState::Accepted).await;
    assert_eq!(times_entered(&cluster, task, TaskState::Accepted).await, 1);
    let branches = repo.branches().into_iter().filter(|b| b.starts_with("cfq/")).count();
    assert_eq!(branches, 1, "delivered once");
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_before_an_answer_commits() {
    resolved("scheduler.resolve.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_after_an_answer_commits() {
    resolved("scheduler.resolve.after_commit").await;
}

async fn swept(failpoint: &str) {
    let cluster = dies_at(failpoint).await;
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    // Not started again before the sweep: its own hello would take the task back first.
    cluster.kill9("runner");
    cluster.failpoint_hit().await;
    cluster.start_service("runner");
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(times_entered(&cluster, task, TaskState::Ready).await, 1, "by the sweep, once");
    assert_eq!(cluster.models.calls("alpha"), 1, "its job went on meanwhile");
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_before_a_sweep_commits() {
    swept("scheduler.sweep.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_after_a_sweep_commits() {
    swept("scheduler.sweep.after_commit").await;
}
