//! Tests of escalations: their causes, what an escalated task holds, and the actions that resolve it.

use std::time::Duration;

use cfq_proto::loop_step::{ActionKind, EscalationAction, EscalationReason, LoopState};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::Cluster;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file};

use super::{ADD, add, score};

/// Runs a task that must escalate for this reason, and checks the properties that every escalation has.
async fn run_escalating(cluster: &Cluster, repo: &UserRepo, reason: EscalationReason) -> cfq_proto::http::TaskDetail {
    let before = repo.fingerprint();
    let task = cluster.submit(&cluster.spec(repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Escalated);
    let escalation = detail.escalation.clone().expect("an escalated task has its escalation");
    assert_eq!(escalation.reason, reason);
    assert!(!escalation.recommendation.is_empty());
    assert!(detail.runner.is_none(), "an escalated task holds no lease");
    assert_eq!(repo.fingerprint(), before);
    detail
}

#[tokio::test(flavor = "multi_thread")]
async fn stagnation_escalates_at_the_second_iteration_without_improvement() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", (1..=5).map(add).collect());
    cluster.models.script("beta", vec![score(50), score(51), score(50), score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let detail = run_escalating(&cluster, &repo, EscalationReason::StagnationDetected).await;
    assert_eq!(detail.iterations.len(), 3, "one iteration without improvement still revises");
    assert!(detail.best_iteration.is_some());
    assert_eq!(detail.escalation.unwrap().final_critique.unwrap().quality_score, 50.0);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn oscillation_escalates_on_repeated_content() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2), add(1)]);
    cluster.models.script("beta", vec![score(20), score(40), score(60)]);
    let repo = UserRepo::with_uncommitted_changes();
    run_escalating(&cluster, &repo, EscalationReason::OscillationDetected).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn iteration_limit_escalates_and_accept_delivers_the_best() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", (1..=5).map(add).collect());
    // The score rises and then falls a little, so iteration 4 is the best.
    cluster.models.script("beta", vec![score(20), score(40), score(60), score(80), score(70)]);
    let repo = UserRepo::with_uncommitted_changes();
    let detail = run_escalating(&cluster, &repo, EscalationReason::MaxIterationsReached).await;
    assert_eq!(detail.iterations.len(), 5, "the limit is five iterations");
    assert_eq!(detail.best_iteration, Some(4));

    let key = cluster.key(&detail);
    cluster.client.resolve(key, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(key, TaskState::Accepted).await;
    let branch = done.delivered_branch.unwrap();
    assert!(repo.show(&branch, "add.py").unwrap().contains("# try 4"), "the best artifact is delivered");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exceeded_working_time_escalates() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", ADD), Duration::from_millis(400))]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.timeout_minutes = Some(0.02);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let escalation = detail.escalation.unwrap();
    assert_eq!(escalation.reason, EscalationReason::TimeoutExceeded);
    assert!(!escalation.available_actions.contains(&ActionKind::AcceptBestEffort), "there is nothing to accept");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_stops_a_generation_and_resolve_lifts_it() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow("word ".repeat(100_000), Duration::from_millis(40))]);
    cluster.models.script("beta", vec![score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.deadline = Some(cfq_link::clock::unix_seconds() + 3);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("deadline"), "{}", detail.reason);
    assert_eq!(detail.escalation.unwrap().reason, EscalationReason::TimeoutExceeded);
    cluster.wait_until_nodes_idle().await;
    // The human continues the task although its time is used up.
    cluster.models.script("alpha", vec![add(2)]);
    let constraints = vec!["be quick".to_owned()];
    let action = EscalationAction::RetryWithConstraints { additional_constraints: constraints };
    cluster.client.resolve(task, action).await.unwrap();
    cluster.wait_for_state(task, TaskState::Merged).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dangerous_output_is_quarantined_and_never_acceptable() {
    let cluster = Cluster::start().await;
    let bad = file("add.py", "import os\n\ndef add(a, b):\n    os.system(\"rm -rf /\")\n    return a + b");
    cluster.models.script("alpha", vec![Reply::Text(bad), add(2)]);
    cluster.models.script("beta", vec![score(99)]);
    let repo = UserRepo::with_uncommitted_changes();
    let detail = run_escalating(&cluster, &repo, EscalationReason::DangerousOutputDetected).await;
    assert_eq!(cluster.models.call_count("beta"), 0, "dangerous output is not even reviewed");
    let key = cluster.key(&detail);
    let refused = cluster.client.resolve(key, EscalationAction::AcceptBestEffort).await;
    assert!(refused.is_err(), "quarantined output cannot be accepted");
    // The retry with a constraint gets a harmless reply, and the task is merged.
    let constraints = vec!["touch no files".to_owned()];
    let action = EscalationAction::RetryWithConstraints { additional_constraints: constraints };
    cluster.client.resolve(key, action).await.unwrap();
    cluster.wait_for_state(key, TaskState::Merged).await;
    assert!(cluster.models.prompts("alpha")[1].contains("touch no files"));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn escalation_can_be_aborted_failed_or_given_another_model() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2), add(1)]);
    cluster.models.script("alpha2", vec![add(9)]);
    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();

    let detail = run_escalating(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    let model = Some(cluster.model("alpha2"));
    let action = EscalationAction::SwitchLlm { target_agent: Agent::Alpha, suggested_model: model };
    cluster.client.resolve(key, action).await.unwrap();
    let done = cluster.wait_for_state(key, TaskState::Merged).await;
    assert!(done.iterations.last().unwrap().model.contains("alpha2"));

    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let detail = run_escalating(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    cluster.client.resolve(key, EscalationAction::Abort).await.unwrap();
    let aborted = cluster.wait_for_state(key, TaskState::Cancelled).await;
    assert_eq!(aborted.summary.loop_state, LoopState::Idle);

    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let detail = run_escalating(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    let action = EscalationAction::Fail { reason: Some("not worth it".into()) };
    cluster.client.resolve(key, action).await.unwrap();
    let failed = cluster.wait_for_state(key, TaskState::Failed).await;
    assert_eq!(failed.summary.loop_state, LoopState::Failed);
    assert!(failed.reason.contains("not worth it"), "{}", failed.reason);
    cluster.finish().await;
}
