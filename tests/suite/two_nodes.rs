//! Two nodes with the same model: one goes on where the other was killed.

use std::time::Duration;

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{Agent, TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};
use cfq_tests::small::SMALL;

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

fn long_text(cluster: &Cluster, repo: &UserRepo) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    spec.max_iterations = Some(1);
    let alpha = &mut spec.agents.alpha;
    (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(500), Some(7), Some(true));
    spec
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
    let mut connection = cluster.database.connect().await;
    let TaskKey::Id(id) = task else { panic!("{task}") };
    let told = "select a.node from attempts a join jobs j on j.id = a.job \
                where j.task = $1 and cardinality(a.journal) > 0 and a.attempt = 1";
    let killed = tokio::time::timeout(PATIENCE, async {
        loop {
            let node: Option<String> =
                sqlx::query_scalar(told).bind(id.0).fetch_optional(&mut connection).await.unwrap();
            match node {
                Some(node) => break node,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await
    .expect("a journal of the first attempt");
    cluster.kill9(service(&killed));
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    cluster.start_service(service(&killed));
    cluster.oracle(task, &other).await;
    let (cut, whole) = (written(&detail)[0], written(&uncut)[0]);
    assert_eq!((cut.attempt, cut.losses, cut.failures), (2, 1, 0), "{cut:?}");
    assert_ne!(cut.node.as_ref().unwrap().as_str(), killed);
    let (usage, all) = (cut.usage.unwrap(), whole.usage.unwrap());
    assert!(usage.resumed_tokens > 0 && usage.resumed_tokens < all.output_tokens, "{usage:?} {all:?}");
    assert_eq!(usage.output_tokens, all.output_tokens);
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "the same files to the last byte");
    cluster.finish().await;
}
