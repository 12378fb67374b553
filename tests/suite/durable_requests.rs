//! Tests in which the scheduler crashes while it commits a client's request or expires leases (a lease sweep). After a
//! retry, the effect must exist exactly once.

use std::time::Duration;

use cfq_proto::event::EventBody;
use cfq_proto::http::ResolveRequest;
use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;
use tokio::runtime::Handle;

const ADD: &str = "def add(a, b):\n    return a + b";

/// Note in the reply to an answer that was recorded before.
const ANSWERED_BEFORE: &str = "the question got this answer before";

/// A cluster whose scheduler aborts at the failpoint, once.
async fn cluster_with_failpoint(failpoint: &str) -> Cluster {
    let failpoint = Some(("scheduler".to_owned(), failpoint.to_owned()));
    let cluster = Cluster::start_with(Options { failpoint, ..Options::default() }).await;
    let slow = Reply::Slow(file("add.py", ADD), Duration::from_millis(40));
    cluster.models.script("alpha", vec![slow]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    cluster
}

/// Number of events that report that the task entered this state.
async fn times_entered(cluster: &Cluster, task: TaskKey, state: TaskState) -> usize {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    events.iter().filter(|e| matches!(&e.body, EventBody::TaskStateChanged { to, .. } if *to == state)).count()
}

async fn cancel_survives(failpoint: &str) {
    let cluster = cluster_with_failpoint(failpoint).await;
    cluster.models.script("alpha", vec![Reply::Endless]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let request = wait::until("the cancel to be accepted", WAIT_LIMIT, || async {
        cluster.client.cancel(task, "enough").await.map_err(|e| e.to_string())
    });
    let (reply, ()) = tokio::join!(request, cluster.restart_after_failpoint());
    assert_eq!(reply.state, TaskState::Cancelled);
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Cancelled);
    cluster.wait_until_nodes_idle().await;
    assert_eq!(times_entered(&cluster, task, TaskState::Cancelled).await, 1);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_survives_scheduler_crash_before_commit() {
    cancel_survives("scheduler.cancel.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_survives_scheduler_crash_after_commit() {
    cancel_survives("scheduler.cancel.after_commit").await;
}

/// Resolves an escalation while the scheduler crashes at the failpoint. `committed` says whether the answer was
/// committed before the crash.
async fn resolve_survives(failpoint: &str, committed: bool) {
    let cluster = cluster_with_failpoint(failpoint).await;
    cluster.models.script("beta", vec![Reply::Text(review(50, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    let task = cluster.submit(&spec).await;
    let escalated = cluster.wait_until_settled(task).await;
    assert_eq!(escalated.summary.state, TaskState::Escalated);
    let question = escalated.escalation.map(|escalation| escalation.question);
    assert!(question.is_some());
    let answer = ResolveRequest { action: EscalationAction::AcceptBestEffort, question };
    // A client whose connection broke repeats the request.
    let request = wait::until("the resolve to be answered", WAIT_LIMIT, || async {
        cluster.client.resolve(task, answer.clone()).await.map_err(|e| e.to_string())
    });
    let (reply, ()) = tokio::join!(request, cluster.restart_after_failpoint());
    assert_ne!(reply.state, TaskState::Escalated);
    assert_eq!(reply.note, if committed { ANSWERED_BEFORE } else { "" });
    cluster.wait_for_state(task, TaskState::Accepted).await;
    assert_eq!(times_entered(&cluster, task, TaskState::Accepted).await, 1);
    let branches = repo.branches().into_iter().filter(|b| b.starts_with("cfq/")).count();
    assert_eq!(branches, 1, "delivered once");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resolve_survives_scheduler_crash_before_commit() {
    resolve_survives("scheduler.resolve.before_commit", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resolve_survives_scheduler_crash_after_commit() {
    resolve_survives("scheduler.resolve.after_commit", true).await;
}

/// `cfq resolve` repeats the answer after the scheduler crashed, although the first request was recorded.
#[tokio::test(flavor = "multi_thread")]
async fn resolve_command_repeats_an_answer_without_a_response() {
    let cluster = cluster_with_failpoint("scheduler.resolve.after_commit").await;
    cluster.models.script("beta", vec![Reply::Text(review(50, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    let task = cluster.submit(&spec).await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Escalated);
    let home = tempfile::tempdir().unwrap();
    let number = task.to_string();
    let args = ["resolve", &number, "--action", "accept_best_effort"];
    let output = tokio::task::block_in_place(|| {
        std::thread::scope(|threads| {
            let command = threads.spawn(|| cfq(&cluster, home.path(), &args));
            Handle::current().block_on(cluster.restart_after_failpoint());
            command.join().unwrap()
        })
    });
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(ANSWERED_BEFORE), "{output:?}");
    cluster.wait_for_state(task, TaskState::Accepted).await;
    assert_eq!(times_entered(&cluster, task, TaskState::Accepted).await, 1);
    cluster.finish().await;
}

/// The runner is killed between the two steps of a start that failed.
#[tokio::test(flavor = "multi_thread")]
async fn start_that_failed_is_ended_with_its_reason_by_another_runner() {
    let failpoint = Some(("runner".to_owned(), "runner.after_step.started".to_owned()));
    let cluster = Cluster::start_with(Options { failpoint, ..Options::default() }).await;
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.base = None;
    // A repository without commits has no HEAD to start from.
    std::fs::remove_dir_all(repo.path().join(".git")).unwrap();
    git2::Repository::init(repo.path()).unwrap();
    let task = cluster.submit(&spec).await;
    cluster.restart_after_failpoint().await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert!(detail.reason.contains("has no commits yet"), "{}", detail.reason);
    cluster.finish().await;
}

async fn lease_sweep_survives(failpoint: &str) {
    let cluster = cluster_with_failpoint(failpoint).await;
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    // The runner is restarted only after the lease sweep. An earlier start would not test the sweep, because the
    // registration of the restarted runner ends the leases of the killed one.
    cluster.kill9("runner");
    cluster.restart_after_failpoint().await;
    cluster.start_service("runner");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(times_entered(&cluster, task, TaskState::Ready).await, 1, "the lease sweep made the task ready, once");
    assert_eq!(cluster.models.call_count("alpha"), 1, "the job continued meanwhile");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_sweep_survives_scheduler_crash_before_commit() {
    lease_sweep_survives("scheduler.sweep.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_sweep_survives_scheduler_crash_after_commit() {
    lease_sweep_survives("scheduler.sweep.after_commit").await;
}
