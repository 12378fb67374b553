//! Two nodes with the same model: one goes on where the other was killed.

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};
use cfq_tests::small::{SMALL, first_journal, long_text};

async fn cluster() -> Cluster {
    let mut options =
        Options { models: vec![SMALL.parse().unwrap()], alpha: SMALL.into(), neighbour: true, ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    Cluster::with(options).await
}

/// The service that is this node.
fn service(node: &str) -> &'static str {
    match node {
        "n1" => "node",
        "n2" => "neighbour",
        other => panic!("{other}?"),
    }
}

fn written(detail: &TaskDetail) -> Vec<&JobSummary> {
    detail.jobs.iter().filter(|job| job.role == Agent::Alpha).collect()
}

/// Killed from outside, wherever it is; not started again before its task has come to rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_finished_by_another_node_where_its_own_is_killed() {
    let cluster = cluster().await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let uncut = cluster.submit(&long_text(&cluster, &repo)).await;
    let uncut = cluster.rests(uncut).await;
    let task = cluster.submit(&long_text(&cluster, &other)).await;
    let killed = first_journal(&cluster, task).await;
    cluster.kill9(service(&killed));
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    cluster.start_service(service(&killed));
    cluster.oracle(task, &other).await;
    let (cut, whole) = (written(&detail)[0], written(&uncut)[0]);
    assert_eq!((cut.losses, cut.failures), (1, 0), "{cut:?}");
    assert_ne!(cut.node.as_ref().unwrap().as_str(), killed);
    let (usage, all) = (cut.usage.unwrap(), whole.usage.unwrap());
    assert!(usage.resumed_tokens > 0 && usage.resumed_tokens < all.output_tokens, "{usage:?} {all:?}");
    assert_eq!(usage.output_tokens, all.output_tokens);
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "the same files to the last byte");
    cluster.finish().await;
}
