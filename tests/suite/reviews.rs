//! The critic reviews changes that the loop did not make: commits of a repository, and results of tasks.

use cfq_proto::client::ClientError;
use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::{Decision, EscalationAction, LoopState};
use cfq_proto::task::{CoverageTarget, ReviewDepth, ReviewRequest, TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, cfq};
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use serde_json::json;

use crate::mcp::{ADD, add, follow, score};

/// A repository whose last commit adds a function that is wrong.
fn repo_with_change() -> UserRepo {
    let repo = UserRepo::with_uncommitted_changes();
    repo.commit(&[("sum.py", "def total(numbers):\n    return 0\n")]);
    repo
}

/// The review of the last commit of a repository.
fn spec(cluster: &Cluster, repo: &UserRepo, depth: ReviewDepth) -> TaskSpec {
    let repository = repo.open();
    let head = repository.head().unwrap().peel_to_commit().unwrap();
    TaskSpec {
        description: "total returns the sum of the numbers.".into(),
        base: Some(head.parent_id(0).unwrap().to_string()),
        review: Some(ReviewRequest { head: head.id().to_string(), artifact: None, depth }),
        ..cluster.spec(repo)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_are_reviewed_and_the_repository_is_left_as_it_is() {
    let cluster = Cluster::start().await;
    let defects = review(35, &[("critical", "total always returns 0"), ("minor", "no docstring")]);
    cluster.models.script("beta", vec![Reply::Text(defects)]);
    let repo = repo_with_change();
    let before = repo.fingerprint();
    let home = tempfile::tempdir().unwrap();
    let path = repo.path().to_string_lossy().into_owned();
    let output = cfq(&cluster, home.path(), &["review", "--repo", &path, "-m", "total returns the sum."]);
    let (text, notes) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{notes}");
    assert!(notes.contains("t1 accepted"), "{notes}");
    assert!(text.starts_with("t1  reviewed  staged.txt, sum.py\n"), "only the review: {text}");
    for words in ["review  35/100 by", "critical", "total always returns 0", "no docstring"] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let prompt = cluster.models.prompts("beta").concat();
    assert!(prompt.contains("def total(numbers)") && prompt.contains("total returns the sum."), "{prompt}");
    assert!(cluster.models.prompts("alpha").is_empty(), "the creator is not called");
    let detail = cluster.client.task("t1".parse().unwrap()).await.unwrap();
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::Reviewed, LoopState::Idle));
    assert_eq!(detail.summary.title, "Review: total returns the sum.");
    assert_eq!(detail.reason, "score 35, defects: 1 critical, 1 minor");
    assert_eq!((detail.best_iteration, detail.pr, detail.delivered_branch), (None, None, None));
    assert_eq!(detail.iterations[0].decided.as_ref().unwrap().decision, Decision::ReviewComplete);
    assert_eq!(repo.fingerprint(), before);
    // A review that has ended is neither answered, cancelled nor retried.
    let answer = EscalationAction::AcceptBestEffort;
    for refused in [
        cluster.client.resolve("t1".parse().unwrap(), answer).await,
        cluster.client.cancel("t1".parse().unwrap(), "").await,
    ] {
        assert!(matches!(refused, Err(ClientError::Refused { status: 409, .. })), "{refused:?}");
    }
    let shown = cfq(&cluster, home.path(), &["show", "t1"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("review      standard of"), "{shown:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn comprehensive_review_runs_the_checks_and_asks_about_each_subject() {
    let cluster = Cluster::start().await;
    let reply = |score, defects: &[(&str, &str)]| Reply::Text(review(score, defects));
    let critic = vec![
        reply(60, &[("major", "wrong for an empty list")]),
        reply(90, &[]),
        reply(75, &[("minor", "no test"), ("major", "wrong for an empty list")]),
    ];
    cluster.models.script("beta", critic);
    let repo = UserRepo::with_uncommitted_changes();
    let check = "[[check]]\nname = \"style\"\nrun = [\"sh\", \"-c\", \"! grep -n 'return 0' sum.py\"]\n";
    repo.commit(&[(".cfq/checks.toml", check), ("sum.py", "def total(numbers):\n    return sum(numbers)\n")]);
    repo.commit(&[("sum.py", "def total(numbers):\n    return 0\n")]);
    let task = cluster.submit(&spec(&cluster, &repo, ReviewDepth::Comprehensive)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Reviewed, "{}", detail.reason);
    let iteration = &detail.iterations[0];
    let merged = iteration.review.as_ref().unwrap();
    assert_eq!(merged.quality_score, 60.0, "the lowest score");
    let found: Vec<&str> = merged.defects.iter().map(|defect| defect.description.as_str()).collect();
    assert_eq!(found, ["wrong for an empty list", "no test"], "each defect once, the worst first");
    assert!(iteration.findings.iter().any(|finding| finding.message.contains("style")), "{:?}", iteration.findings);
    assert_eq!(iteration.quarantine, None, "a failed check does not prevent the review");
    let prompts = cluster.models.prompts("beta");
    assert_eq!(prompts.len(), 3);
    for (prompt, subject) in prompts.iter().zip(["missing cases", "only its security", "only its tests"]) {
        assert!(prompt.contains(subject) && prompt.contains("Findings of the checks"), "{subject}: {prompt}");
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn review_continues_after_the_runner_is_killed_between_two_calls() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let second = review(80, &[("minor", "second")]);
    let (head, rest) = second.split_at(10);
    let critic = vec![
        Reply::Text(review(70, &[("minor", "first")])),
        Reply::Gated(head.to_owned(), rest.to_owned(), gate.clone()),
        Reply::Text(review(90, &[])),
    ];
    cluster.models.script("beta", critic);
    let repo = repo_with_change();
    let task = cluster.submit(&spec(&cluster, &repo, ReviewDepth::Comprehensive)).await;
    cluster.wait_until_generating(task).await;
    cfq_tests::wait::until("the second call runs", cfq_tests::cluster::WAIT_LIMIT, || async {
        let calls = cluster.models.prompts("beta").len();
        if calls == 2 { Ok(()) } else { Err(format!("{calls} calls")) }
    })
    .await;
    cluster.kill9("runner");
    cluster.start_service("runner");
    gate.open();
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Reviewed, "{}", detail.reason);
    let merged = detail.iterations[0].review.as_ref().unwrap();
    let found: Vec<&str> = merged.defects.iter().map(|defect| defect.description.as_str()).collect();
    assert_eq!((merged.quality_score, found), (70.0, vec!["first", "second"]));
    assert_eq!(cluster.models.prompts("beta").len(), 3, "no call is made twice");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn review_that_cannot_be_made_fails_with_its_reason_and_needs_no_human() {
    let cluster = Cluster::start().await;
    let nonsense = || Reply::Text("I like it.".into());
    cluster.models.script("beta", vec![nonsense(), nonsense(), nonsense()]);
    let repo = repo_with_change();
    let standard = spec(&cluster, &repo, ReviewDepth::Standard);
    let unreadable = cluster.submit(&standard).await;
    let detail = cluster.wait_until_settled(unreadable).await;
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("could not be parsed") && detail.escalation.is_none(), "{}", detail.reason);
    assert_eq!(cluster.client.status().await.unwrap().unacknowledged_failures, 1);
    let absent = ReviewRequest { head: "1".repeat(40), artifact: None, depth: ReviewDepth::Quick };
    let task = cluster.submit(&TaskSpec { review: Some(absent), ..standard.clone() }).await;
    let missing = cluster.wait_until_settled(task).await;
    assert_eq!(missing.summary.state, TaskState::Failed);
    assert!(missing.reason.contains("has no commit 1111"), "{}", missing.reason);
    let head = standard.review.clone().unwrap().head;
    for (spec, field) in [
        (TaskSpec { base: Some(head.clone()), ..standard.clone() }, "review.head"),
        (TaskSpec { base: None, ..standard.clone() }, "base"),
        (
            TaskSpec {
                review: Some(ReviewRequest { head: "main".into(), artifact: None, depth: ReviewDepth::Quick }),
                ..standard.clone()
            },
            "review.head",
        ),
    ] {
        let refused = cluster.client.submit(&spec, None).await;
        assert!(
            matches!(&refused, Err(ClientError::Refused { body, .. }) if body.field.as_deref() == Some(field)),
            "{refused:?}"
        );
    }
    // A failure is counted until it is acknowledged or its task is retried.
    let acknowledged = cluster.client.acknowledge(task).await.unwrap();
    assert_eq!(acknowledged.note, "");
    assert_eq!(cluster.client.acknowledge(task).await.unwrap().note, "its failure was acknowledged before");
    assert_eq!(cluster.client.status().await.unwrap().unacknowledged_failures, 1);
    cluster.models.script("beta", vec![score(88)]);
    let home = tempfile::tempdir().unwrap();
    let TaskKey::Id(id) = unreadable else { panic!("{unreadable:?}") };
    let retried = cfq(&cluster, home.path(), &["retry", &id.to_string()]);
    assert!(retried.status.success(), "{retried:?}");
    assert_eq!(cluster.client.status().await.unwrap().unacknowledged_failures, 0);
    cluster.wait_for_state("t3".parse().unwrap(), TaskState::Reviewed).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_reviews_results_writes_tests_and_reports_defects() {
    let cluster = Cluster::start().await;
    let tests = "def test_add():\n    assert add(1, 2) == 3\n";
    let wrong = Reply::Text(file("add.py", "def add(a, b):\n    return a - b\n"));
    cluster.models.script("alpha", vec![wrong, add()]);
    // Beta's model writes the tests, and reviews everything.
    let critic = vec![
        score(40),
        Reply::Text(review(30, &[("critical", "subtracts")])),
        score(95),
        score(91),
        Reply::Text(file("test_add.py", tests)),
        score(97),
    ];
    cluster.models.script("beta", critic);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let delegated = json!({ "spec": { "description": "Add add.py with a function add." }, "max_iterations": 1 });
    let session = mcp.call("execute_task_spec", delegated).await["session_id"].clone();
    assert_eq!(follow(&mut mcp, &session).await["needs_decision"], json!(true));
    let artifact = mcp.call("get_artifact", json!({ "session_id": session })).await["artifact_id"].clone();
    // While the task waits for a decision, its artifact is reviewed again, even by a runner that does not have it.
    std::fs::remove_dir_all(cluster.runner_data("runner").join("mirrors")).unwrap();
    let quick = json!({ "artifact_id": artifact, "review_depth": "quick", "idempotency_key": "again" });
    let accepted = mcp.call("run_critic_review", quick.clone()).await;
    assert_eq!(mcp.call("run_critic_review", quick).await["session_id"], accepted["session_id"]);
    let reviewed = follow(&mut mcp, &accepted["session_id"]).await;
    assert_eq!((&reviewed["state"], &reviewed["ended"]), (&json!("reviewed"), &json!(true)), "{reviewed}");
    let feedback = &reviewed["untrusted_content"]["reviews"][0]["review"];
    assert_eq!(feedback["defects"][0]["description"], json!("subtracts"), "{reviewed}");
    assert!(cluster.models.prompts("beta")[1].contains("return a - b"));
    let early = json!({ "artifact_id": session, "framework": "pytest" });
    let refused = mcp.call_error("generate_test_suite", early.clone()).await;
    assert!(refused.contains("has no delivered result"), "{refused}");
    let report = json!({ "session_id": session, "severity": "major", "description": "add(0.1, 0.2) is inexact" });
    let refused = mcp.call_error("report_defect", report.clone()).await;
    assert!(refused.contains("is escalated: defects can be reported only for merged or accepted tasks"), "{refused}");
    mcp.call("revise_code", json!({ "artifact_id": session, "feedback": { "required_changes": ["add"] } })).await;
    assert_eq!(follow(&mut mcp, &session).await["state"], json!("merged"));
    // The result of a task is reviewed by its session, too.
    let accepted = mcp.call("run_critic_review", json!({ "artifact_id": session })).await;
    assert_eq!(follow(&mut mcp, &accepted["session_id"]).await["state"], json!("reviewed"));
    assert!(cluster.models.prompts("beta")[3].contains("return a + b"));

    let suite = json!({ "artifact_id": session, "framework": "pytest", "coverage_target": 80 });
    let accepted = mcp.call("generate_test_suite", suite).await;
    assert!(accepted["warnings"].to_string().contains("is measured only if a check"), "{accepted}");
    let created: TaskKey = accepted["session_id"].as_str().unwrap().parse().unwrap();
    let target = CoverageTarget { percent: 80, files: vec!["add.py".to_owned()] };
    assert_eq!(cluster.client.task(created).await.unwrap().spec.coverage, Some(target));
    let ended = follow(&mut mcp, &accepted["session_id"]).await;
    assert_eq!(ended["state"], json!("merged"), "{ended}");
    let branch = ended["result"]["branch"].as_str().unwrap();
    assert_eq!(repo.show(branch, "test_add.py").as_deref(), Some(tests));
    assert_eq!(repo.show(branch, "add.py").as_deref(), Some(ADD), "the tests are on top of the result");
    let prompt = &cluster.models.prompts("beta")[4];
    assert!(prompt.contains("pytest") && prompt.contains("80 %") && prompt.contains("return a + b"), "{prompt}");
    let wrong = mcp.call_error("generate_test_suite", json!({ "artifact_id": session, "framework": "mocha" })).await;
    assert!(wrong.contains("framework") && wrong.contains("pytest"), "{wrong}");

    // Texts of the permitted length that no index row can hold.
    let long: String = (0..1365).map(|n: u32| format!("{:06x}", n.wrapping_mul(2_654_435_761) >> 8)).collect();
    let mut longest = report.clone();
    (longest["description"], longest["location"]) = (json!(long), json!(long));
    assert_eq!(mcp.call("report_defect", longest.clone()).await["created"], json!(true));
    longest["description"] = json!(format!("{long}{long}"));
    let refused = mcp.call_error("report_defect", longest).await;
    assert!(refused.contains("description: at most 8192 bytes"), "{refused}");
    for created in [true, false] {
        let reported = mcp.call("report_defect", report.clone()).await;
        assert_eq!((&reported["created"], &reported["defects"]), (&json!(created), &json!(2)), "{reported}");
    }
    let home = tempfile::tempdir().unwrap();
    let shown = cfq(&cluster, home.path(), &["show", "t1"]);
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(cfq(&cluster, home.path(), &["pull", "t2"]).status.code() == Some(2), "a review has no result");
    assert!(shown.contains("defect reported: major add(0.1, 0.2) is inexact"), "{shown}");
    let refused = mcp.call_error("acknowledge_failure", json!({ "session_id": session })).await;
    assert!(refused.contains("t1 is merged: only the failure of a task can be acknowledged"), "{refused}");
    cluster.finish().await;
}
