//! Every path of the loop, with scripted models behind the real protocol and everything else real.

use std::time::{Duration, Instant};

use cfq_proto::looping::{ActionKind, Decision, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::Quarantine;
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, PATIENCE};
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
    let detail = cluster.rests(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 1);
    assert_eq!(detail.summary.best_score, Some(93.0));
    assert_eq!(repo.fingerprint(), before, "the user's repository was touched");
    let new: Vec<String> = repo.branches().into_iter().filter(|b| !branches.contains(b)).collect();
    assert_eq!(new, vec![detail.delivered_branch.clone().unwrap()]);
    assert!(new[0].starts_with("cfq/t"), "{new:?}");
    assert!(repo.show(&new[0], "add.py").unwrap().contains("def add"));
    // What the user had not committed is not part of it.
    assert_eq!(repo.show(&new[0], "README.md").unwrap(), "# sample\n");
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, cfq_proto::pr::PrState::Merged);
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn converges_after_two_revisions_and_beta_never_sees_alphas_words() {
    let cluster = Cluster::start().await;
    let secret = "my private reasoning about the cabbage";
    let first = format!("{secret}\n\n{}", file("add.py", ADD));
    cluster.models.script("alpha", vec![Reply::Text(first), add(2), add(3)]);
    cluster.models.script("beta", vec![score(40), score(60), score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let scores: Vec<f64> = detail.iterations.iter().map(|i| i.review.as_ref().unwrap().quality_score).collect();
    assert_eq!(scores, vec![40.0, 60.0, 90.0]);
    assert!(cluster.models.prompts("beta").iter().all(|p| !p.contains("cabbage")), "beta saw alpha's reasoning");
    assert!(cluster.models.prompts("alpha")[1].contains("mend it"), "feedback did not reach alpha");
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_critical_defect_prevents_passing_whatever_the_score() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![Reply::Text(review(99, &[("critical", "adds wrongly")])), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations[0].decided.as_ref().unwrap().decision, Decision::Revise);
    assert_eq!(detail.iterations.len(), 2);
    cluster.finish().await;
}

/// Runs a task that must escalate, and checks what every escalation carries.
async fn escalates(cluster: &Cluster, repo: &UserRepo, reason: EscalationReason) -> cfq_proto::http::TaskDetail {
    let before = repo.fingerprint();
    let task = cluster.submit(&cluster.spec(repo)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Escalated);
    let escalation = detail.escalation.clone().expect("an escalation carries its question");
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
    let detail = escalates(&cluster, &repo, EscalationReason::StagnationDetected).await;
    assert_eq!(detail.iterations.len(), 3, "the first without improvement still revises");
    assert!(detail.best_iteration.is_some());
    assert_eq!(detail.escalation.unwrap().final_critique.unwrap().quality_score, 50.0);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn oscillation_escalates_when_the_same_content_comes_again() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2), add(1)]);
    cluster.models.script("beta", vec![score(20), score(40), score(60)]);
    let repo = UserRepo::with_uncommitted_changes();
    escalates(&cluster, &repo, EscalationReason::OscillationDetected).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cap_escalates_and_accepting_delivers_the_best_not_the_last() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", (1..=5).map(add).collect());
    // Rises, then falls a little: iteration 4 is the best.
    cluster.models.script("beta", vec![score(20), score(40), score(60), score(80), score(70)]);
    let repo = UserRepo::with_uncommitted_changes();
    let detail = escalates(&cluster, &repo, EscalationReason::MaxIterationsReached).await;
    assert_eq!(detail.iterations.len(), 5, "cap 5 means five reviews");
    assert_eq!(detail.best_iteration, Some(4));

    let key = cluster.key(&detail);
    cluster.client.resolve(key, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.becomes(key, TaskState::Accepted).await;
    let branch = done.delivered_branch.unwrap();
    assert!(repo.show(&branch, "add.py").unwrap().contains("# try 4"), "the best artifact is delivered");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn working_time_beyond_the_limit_escalates() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", ADD), Duration::from_millis(400))]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.timeout_minutes = Some(0.02);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let escalation = detail.escalation.unwrap();
    assert_eq!(escalation.reason, EscalationReason::TimeoutExceeded);
    assert!(!escalation.available_actions.contains(&ActionKind::AcceptBestEffort), "there is nothing to accept");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_running_generation_and_a_later_answer_lifts_it() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow("word ".repeat(100_000), Duration::from_millis(40))]);
    cluster.models.script("beta", vec![score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.deadline = Some(cfq_link::clock::unix_seconds() + 3);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("deadline"), "{}", detail.reason);
    assert_eq!(detail.escalation.unwrap().reason, EscalationReason::TimeoutExceeded);
    cluster.node_is_idle().await;
    // A human who knows that it is late goes on with it.
    cluster.models.script("alpha", vec![add(2)]);
    let constraints = vec!["be quick".to_owned()];
    let action = EscalationAction::RetryWithConstraints { additional_constraints: constraints };
    cluster.client.resolve(task, action).await.unwrap();
    cluster.becomes(task, TaskState::Merged).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dangerous_output_is_quarantined_and_never_acceptable() {
    let cluster = Cluster::start().await;
    let bad = file("add.py", "import os\n\ndef add(a, b):\n    os.system(\"rm -rf /\")\n    return a + b");
    cluster.models.script("alpha", vec![Reply::Text(bad), add(2)]);
    cluster.models.script("beta", vec![score(99)]);
    let repo = UserRepo::with_uncommitted_changes();
    let detail = escalates(&cluster, &repo, EscalationReason::DangerousOutputDetected).await;
    assert_eq!(cluster.models.calls("beta"), 0, "dangerous output is not even reviewed");
    let key = cluster.key(&detail);
    let refused = cluster.client.resolve(key, EscalationAction::AcceptBestEffort).await;
    assert!(refused.is_err(), "quarantined output cannot be accepted");
    // The way on: try again with a constraint; the second reply is harmless.
    let constraints = vec!["touch no files".to_owned()];
    let action = EscalationAction::RetryWithConstraints { additional_constraints: constraints };
    cluster.client.resolve(key, action).await.unwrap();
    cluster.becomes(key, TaskState::Merged).await;
    assert!(cluster.models.prompts("alpha")[1].contains("touch no files"));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_syntax_error_goes_back_as_a_finding_and_is_mended() {
    let cluster = Cluster::start().await;
    let broken = file("add.py", "def add(a, b:\n    return a + b");
    cluster.models.script("alpha", vec![Reply::Text(broken), Reply::Text("I would rather not.".into()), add(3)]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 3);
    assert!(detail.iterations[0].quarantine.is_some() && detail.iterations[1].quarantine.is_some());
    assert_eq!(cluster.models.calls("beta"), 1, "only what parses is reviewed");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_off_is_neither_committed_nor_passed() {
    let cluster = Cluster::start().await;
    let half = "Here it is.\n\nadd.py\n```python\ndef add(a, b):\n    return a + b\n";
    cluster.models.script("alpha", vec![Reply::Cut(half.into()), add(2), add(3)]);
    let half = r#"{"quality_score":92,"defects":[{"severity":"critical","#;
    cluster.models.script("beta", vec![Reply::Cut(half.into()), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [file, report, whole] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!((file.quarantine, &file.commit), (Some(Quarantine::Unparsable), &None));
    assert!(file.findings[0].message.contains("cut"), "{:?}", file.findings);
    assert!(report.review.as_ref().unwrap().has_critical(), "92, but what was cut off is not known");
    assert_eq!(report.decided.as_ref().unwrap().decision, Decision::Revise);
    assert_eq!(cluster.models.calls("beta"), 4, "a report that was cut is asked for twice more");
    assert_eq!(whole.review.as_ref().unwrap().quality_score, 95.0);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_cannot_be_merged_is_delivered_and_waits_for_a_human() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    let first = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.rests(first).await.summary.state, TaskState::Merged);
    let mut spec = cluster.spec(&repo);
    spec.description = "Write add(a, b) in add.py once more.".into();
    let before = repo.fingerprint();
    let second = cluster.submit(&spec).await;
    let detail = cluster.rests(second).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Converged);
    assert!(detail.runner.is_none(), "a task that waits holds no lease");
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, cfq_proto::pr::PrState::Closed);
    for words in ["add.py", "cfq pull t2", "cfq pr show 2", "cfq resolve t2"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let branch = detail.delivered_branch.clone().unwrap();
    assert!(repo.show(&branch, "add.py").unwrap().contains("# try 2"), "nothing is lost");
    assert_eq!(repo.fingerprint(), before);
    let actions = detail.escalation.unwrap().available_actions;
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    let again = EscalationAction::RetryWithConstraints { additional_constraints: vec!["x".into()] };
    assert!(cluster.client.resolve(second, again).await.is_err(), "the loop is over");

    cluster.client.resolve(second, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.becomes(second, TaskState::Accepted).await;
    assert!(done.reason.contains(&branch) && done.reason.contains("not merged"), "{}", done.reason);
    assert_eq!(done.summary.loop_state, LoopState::Idle);
    let after = cluster.oracle(second, &repo).await;
    assert_eq!(after.delivered_branch, Some(branch));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_refused_waits_for_a_human_and_ends_as_merged_once_it_is_possible() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    repo.branch("cfq");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.delivered_branch, None);
    for words in ["branch named cfq", "cfq pull t1", "cfq pr show 1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let late = cluster.client.cancel(task, "").await.unwrap_err().to_string();
    assert!(late.contains("merge has begun"), "{late}");

    repo.open().find_branch("cfq", git2::BranchType::Local).unwrap().rename("mine", false).unwrap();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.becomes(task, TaskState::Merged).await;
    assert!(repo.show(&done.delivered_branch.unwrap(), "add.py").unwrap().contains("def add"));
    assert!(done.escalation.is_none());
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_down_beyond_the_ceiling_fails_the_task() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Status(503, "no".into())]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Failed);
    assert!(cluster.models.calls("alpha") > 1, "it was tried again before giving up");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_comes_back_in_time_does_no_harm() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(90)]);
    cluster.models.set_down(true);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.waits_for_a_model(task).await;
    cluster.models.set_down(false);
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_reaches_a_running_generation() {
    // The documents say about a second; the rest is for a loaded machine.
    const BOUND: Duration = Duration::from_secs(10);
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow("word ".repeat(5_000), Duration::from_millis(30))]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("a model that writes", PATIENCE, || async {
        let calls = cluster.models.seen();
        if calls.iter().any(|c| !c.sent.is_empty()) { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;
    let asked = Instant::now();
    let reply = cluster.client.cancel(task, "changed my mind").await.unwrap();
    assert_eq!(reply.state, TaskState::Cancelled);
    // The model server sees its client leave: nothing is computed any more.
    let ends = wait::until("the model's call to end", BOUND, || async {
        let ends: Vec<End> = cluster.models.seen().iter().filter_map(|c| c.end).collect();
        if ends.is_empty() { Err("it goes on".to_owned()) } else { Ok(ends) }
    })
    .await;
    println!("the model server saw its client leave {:?} after the cancel was asked for", asked.elapsed());
    assert_eq!(ends, [End::Left], "one call, which was broken off");
    cluster.node_is_idle().await;
    let detail = cluster.client.task(task).await.unwrap();
    assert_eq!(detail.summary.state, TaskState::Cancelled);
    assert_eq!(detail.summary.loop_state, LoopState::Idle);
    // Again: nothing changes, and there is still one terminal event.
    drop(cluster.client.cancel(task, "").await);
    let after = cluster.oracle(task, &repo).await;
    assert_eq!(after.summary.state, TaskState::Cancelled, "a terminal state never changes");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_escalation_can_be_aborted_failed_or_given_another_model() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2), add(1)]);
    cluster.models.script("alpha2", vec![add(9)]);
    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();

    let detail = escalates(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    let model = Some(cluster.model("alpha2"));
    let action = EscalationAction::SwitchLlm { target_agent: Agent::Alpha, suggested_model: model };
    cluster.client.resolve(key, action).await.unwrap();
    let done = cluster.becomes(key, TaskState::Merged).await;
    assert!(done.iterations.last().unwrap().model.contains("alpha2"));

    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let detail = escalates(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    cluster.client.resolve(key, EscalationAction::Abort).await.unwrap();
    let aborted = cluster.becomes(key, TaskState::Cancelled).await;
    assert_eq!(aborted.summary.loop_state, LoopState::Idle);

    cluster.models.script("beta", vec![score(20), score(40), score(60), score(95)]);
    let detail = escalates(&cluster, &repo, EscalationReason::OscillationDetected).await;
    let key = cluster.key(&detail);
    let action = EscalationAction::Fail { reason: Some("not worth it".into()) };
    cluster.client.resolve(key, action).await.unwrap();
    let failed = cluster.becomes(key, TaskState::Failed).await;
    assert_eq!(failed.summary.loop_state, LoopState::Failed);
    assert!(failed.reason.contains("not worth it"), "{}", failed.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_no_runner_can_drive_fails_with_the_reason() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    cluster.models.script("beta", vec![score(90)]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    cluster.kill9("runner");
    // What is there does not follow from nothing, whoever reads it.
    cluster.database.raw(r#"update steps set step = '{"kind": "merged", "commit": "c"}'"#).await;
    cluster.start_service("runner");
    let detail = cluster.becomes(task, TaskState::Failed).await;
    assert!(detail.reason.contains("step 0 does not follow"), "{}", detail.reason);
    cluster.finish().await;
}
