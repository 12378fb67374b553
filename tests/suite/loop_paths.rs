//! Tests of every path of the review loop, with scripted models behind the real protocol; everything else is the real
//! cfq.
//!
//! This is one file because the tests share the scripts and the checks of an escalation.

use std::time::{Duration, Instant};

use cfq_proto::loop_step::{ActionKind, Decision, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::Quarantine;
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{End, Reply, file, review};
use cfq_tests::wait;

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
    let detail = cluster.wait_until_resting(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 1);
    assert_eq!(detail.summary.best_score, Some(93.0));
    assert_eq!(repo.fingerprint(), before, "the user's repository was touched");
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
    let detail = cluster.wait_until_resting(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let scores: Vec<f64> = detail.iterations.iter().map(|i| i.review.as_ref().unwrap().quality_score).collect();
    assert_eq!(scores, vec![40.0, 60.0, 90.0]);
    assert!(cluster.models.prompts("beta").iter().all(|p| !p.contains("cabbage")), "beta saw alpha's reasoning");
    assert!(cluster.models.prompts("alpha")[1].contains("fix it"), "feedback did not reach alpha");
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
    let detail = cluster.wait_until_resting(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations[0].decided.as_ref().unwrap().decision, Decision::Revise);
    assert_eq!(detail.iterations.len(), 2);
    cluster.finish().await;
}

/// Runs a task that must escalate for this reason, and checks the properties that every escalation has.
async fn run_escalating(cluster: &Cluster, repo: &UserRepo, reason: EscalationReason) -> cfq_proto::http::TaskDetail {
    let before = repo.fingerprint();
    let task = cluster.submit(&cluster.spec(repo)).await;
    let detail = cluster.wait_until_resting(task).await;
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
    assert_eq!(detail.iterations.len(), 5, "cap 5 means five reviews");
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
    let detail = cluster.wait_until_resting(task).await;
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
    let detail = cluster.wait_until_resting(task).await;
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
async fn syntax_error_is_returned_as_a_finding_and_fixed() {
    let cluster = Cluster::start().await;
    let broken = file("add.py", "def add(a, b:\n    return a + b");
    cluster.models.script("alpha", vec![Reply::Text(broken), Reply::Text("I would rather not.".into()), add(3)]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_resting(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 3);
    assert!(detail.iterations[0].quarantine.is_some() && detail.iterations[1].quarantine.is_some());
    assert_eq!(cluster.models.call_count("beta"), 1, "only what parses is reviewed");
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
    let detail = cluster.wait_until_resting(task).await;
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
async fn unmergeable_result_is_delivered_and_waits_for_a_human() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    let first = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.wait_until_resting(first).await.summary.state, TaskState::Merged);
    let mut spec = cluster.spec(&repo);
    spec.description = "Write add(a, b) in add.py once more.".into();
    let before = repo.fingerprint();
    let second = cluster.submit(&spec).await;
    let detail = cluster.wait_until_resting(second).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Converged);
    assert!(detail.runner.is_none(), "a waiting task holds no lease");
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, cfq_proto::pr::PrState::Closed);
    for words in ["add.py", "cfq pull t2", "cfq pr show 2", "cfq resolve t2"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let branch = detail.delivered_branch.clone().unwrap();
    assert!(repo.show(&branch, "add.py").unwrap().contains("# try 2"), "the result is in the branch");
    assert_eq!(repo.fingerprint(), before);
    let actions = detail.escalation.unwrap().available_actions;
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    let again = EscalationAction::RetryWithConstraints { additional_constraints: vec!["x".into()] };
    assert!(cluster.client.resolve(second, again).await.is_err(), "the loop is over");

    cluster.client.resolve(second, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(second, TaskState::Accepted).await;
    assert!(done.reason.contains(&branch) && done.reason.contains("not merged"), "{}", done.reason);
    assert_eq!(done.summary.loop_state, LoopState::Idle);
    let after = cluster.run_oracle(second, &repo).await;
    assert_eq!(after.delivered_branch, Some(branch));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_delivery_waits_for_a_human_and_merges_once_possible() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    repo.branch("cfq");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_resting(task).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.delivered_branch, None);
    for words in ["has a branch cfq", "cfq pull t1", "cfq pr show 1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let late = cluster.client.cancel(task, "").await.unwrap_err().to_string();
    assert!(late.contains("merge has begun"), "{late}");

    repo.open().find_branch("cfq", git2::BranchType::Local).unwrap().rename("mine", false).unwrap();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(task, TaskState::Merged).await;
    assert!(repo.show(&done.delivered_branch.unwrap(), "add.py").unwrap().contains("def add"));
    assert!(done.escalation.is_none());
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_down_beyond_the_retry_ceiling_fails_the_task() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Status(503, "no".into())]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_resting(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Failed);
    assert!(cluster.models.call_count("alpha") > 1, "it was retried before it failed");
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
    let detail = cluster.wait_until_resting(task).await;
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
    assert!(detail.reason.contains("step 0 does not follow"), "{}", detail.reason);
    cluster.finish().await;
}
