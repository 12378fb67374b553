//! Tests of every path of the review loop, with scripted models behind the real protocol; everything else is the real
//! cfq.

use cfq_proto::loop_step::Decision;
use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::Cluster;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

mod delivery;
mod edits;
mod endpoint;
mod escalation;

const ADD: &str = "def add(a, b):\n    return a + b\n";

fn add(n: u32) -> Reply {
    Reply::Text(file("add.py", &format!("# try {n}\n{ADD}")))
}

fn score(n: u32) -> Reply {
    Reply::Text(review(n, &[]))
}

#[tokio::test(flavor = "multi_thread")]
async fn converges_at_once_and_delivers_one_branch() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let branches = repo.branches();

    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 1);
    assert_eq!(detail.summary.best_score, Some(93.0));
    assert_eq!(repo.fingerprint(), before, "the user's repository was changed");
    let new: Vec<String> = repo.branches().into_iter().filter(|b| !branches.contains(b)).collect();
    assert_eq!(new, vec![detail.delivered_branch.clone().unwrap()]);
    assert!(new[0].starts_with("cfq/t"), "{new:?}");
    assert!(repo.show(&new[0], "add.py").unwrap().contains("def add"));
    // The result does not contain the user's uncommitted changes.
    assert_eq!(repo.show(&new[0], "README.md").unwrap(), "# sample\n");
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, cfq_proto::pr::PrState::Merged);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beta_never_sees_alphas_reasoning_over_two_revisions() {
    let cluster = Cluster::start().await;
    let secret = "my private reasoning about the cabbage";
    let first = format!("{secret}\n\n{}", file("add.py", ADD));
    cluster.models.script("alpha", vec![Reply::Text(first), add(2), add(3)]);
    cluster.models.script("beta", vec![score(40), score(60), score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let scores: Vec<f64> = detail.iterations.iter().map(|i| i.review.as_ref().unwrap().quality_score).collect();
    assert_eq!(scores, vec![40.0, 60.0, 90.0]);
    assert!(cluster.models.prompts("beta").iter().all(|p| !p.contains("cabbage")), "beta saw alpha's reasoning");
    assert!(cluster.models.prompts("alpha")[1].contains("fix it"), "feedback did not reach alpha");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_agents_see_the_committed_file_that_the_description_names() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("README.md", "# sample\n\nHow to use it.\n"))]);
    cluster.models.script("beta", vec![score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.description = "Add a sentence about its use to README.md.".to_owned();
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    for agent in ["alpha", "beta"] {
        let prompt = cluster.models.prompts(agent).remove(0);
        assert!(
            prompt.contains(r"# Repository files before the change\n\nREADME.md\n```md\n# sample\n```\n"),
            "{agent}: {prompt}"
        );
    }
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn critical_defect_prevents_passing_at_any_score() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![Reply::Text(review(99, &[("critical", "adds wrongly")])), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations[0].decided.as_ref().unwrap().decision, Decision::Revise);
    assert_eq!(detail.iterations.len(), 2);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn syntax_error_is_returned_as_a_finding_and_fixed() {
    let cluster = Cluster::start().await;
    let broken = file("add.py", "def add(a, b:\n    return a + b");
    cluster.models.script("alpha", vec![Reply::Text(broken), Reply::Text("I would rather not.".into()), add(3)]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 3);
    assert!(detail.iterations[0].quarantine.is_some() && detail.iterations[1].quarantine.is_some());
    assert_eq!(cluster.models.call_count("beta"), 1, "only output that parses is reviewed");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_output_is_neither_committed_nor_passed() {
    let cluster = Cluster::start().await;
    let half = "Here it is.\n\nadd.py\n```python\ndef add(a, b):\n    return a + b\n";
    cluster.models.script("alpha", vec![Reply::Truncated(half.into()), add(2), add(3)]);
    let half = r#"{"quality_score":92,"defects":[{"severity":"critical","#;
    cluster.models.script("beta", vec![Reply::Truncated(half.into()), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [file, report, whole] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!((file.quarantine, &file.commit), (Some(Quarantine::Unparsable), &None));
    assert!(file.findings[0].message.contains("maximum length"), "{:?}", file.findings);
    assert!(report.review.as_ref().unwrap().has_critical(), "score 92, but the truncated rest is unknown");
    assert_eq!(report.decided.as_ref().unwrap().decision, Decision::Revise);
    assert_eq!(cluster.models.call_count("beta"), 4, "a truncated report is requested twice more");
    assert_eq!(whole.review.as_ref().unwrap().quality_score, 95.0);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn review_that_quotes_a_report_never_passes() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    let own = review(20, &[("major", "adds wrongly")]);
    let quoting = format!("report.json contains {}.\n{own}", review(100, &[]));
    // A repeated request gets the same reply.
    cluster.models.script("beta", vec![Reply::Text(quoting)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("more than one score or review"), "{}", detail.reason);
    assert_eq!(cluster.models.call_count("beta"), 3, "an unreadable review is requested twice more");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn task_with_an_invalid_step_fails_with_the_reason() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    cluster.kill9("runner");
    // The recorded step is not a legal first step.
    cluster.database.raw(r#"update steps set step = '{"kind": "merged", "commit": "c"}'"#).await;
    cluster.start_service("runner");
    let detail = cluster.wait_for_state(task, TaskState::Failed).await;
    assert!(detail.reason.contains("step 0 is not valid after the steps before it"), "{}", detail.reason);
    cluster.finish().await;
}
