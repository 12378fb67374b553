//! The fallback of an agent: another model that is called if the first one cannot answer.

use cfq_proto::http::TaskDetail;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

const ADD: &str = "def add(a, b):\n    return a + b\n";

async fn run(cluster: &Cluster, change: impl FnOnce(&mut TaskSpec)) -> TaskDetail {
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.agents.alpha.fallback = Some(cluster.model("alpha2"));
    change(&mut spec);
    let task = cluster.submit(&spec).await;
    cluster.wait_until_settled(task).await
}

fn answers(cluster: &Cluster) {
    cluster.models.script("alpha2", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn call_moves_to_the_fallback_at_once_if_the_model_cannot_answer() {
    let cluster = Cluster::start().await;
    for reply in [Reply::Status(503, "overloaded".into()), Reply::Status(401, "wrong key".into())] {
        cluster.models.script("alpha", vec![reply]);
        answers(&cluster);
        let detail = run(&cluster, |_| {}).await;
        assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
        assert_eq!(detail.iterations[0].model, cluster.model("alpha2").as_str());
        assert_eq!(cluster.models.call_count("alpha"), 1);
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn review_that_cannot_be_parsed_is_requested_from_the_fallback() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text("It looks good to me.".into())]);
    cluster.models.script("alpha2", vec![Reply::Text(review(95, &[]))]);
    let detail = run(&cluster, |spec| spec.agents.beta.fallback = Some(cluster.model("alpha2"))).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!((cluster.models.call_count("beta"), cluster.models.call_count("alpha2")), (3, 1));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_no_node_has_is_replaced_by_the_fallback() {
    let cluster = Cluster::start_with(Options::default()).await;
    answers(&cluster);
    let detail = run(&cluster, |spec| spec.agents.alpha.model = Some(cluster.model("gone"))).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, cluster.model("alpha2").as_str());
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn task_fails_with_both_reasons_if_neither_answers() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Status(503, "overloaded".into())]);
    cluster.models.script("alpha2", vec![Reply::Status(503, "no".into())]);
    let detail = run(&cluster, |_| {}).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    for reason in ["alpha2 did not answer alpha", "before that, openai:scripted/alpha did not answer", "overloaded"] {
        assert!(detail.reason.contains(reason), "{}", detail.reason);
    }
    assert!(cluster.models.call_count("alpha2") > 1, "it is retried until the ceiling");
    assert_eq!(cluster.models.call_count("alpha"), 1);
    cluster.finish().await;
}
