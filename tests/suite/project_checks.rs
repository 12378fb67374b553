//! Checks that a project declares in `.cfq/checks.toml`: cfq runs them in a sandbox, and no result with a failing check is
//! merged without a human.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use cfq_proto::event::{Event, EventBody};
use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::{ActionKind, EscalationAction, EscalationReason, Step};
use cfq_proto::review::{CheckKind, CheckRun, Quarantine};
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// A test of the project: prints what is wrong and fails unless the function adds.
const TEST: &str = "if ! grep -q 'return a + b' add.py; then echo \"add is wrong\"; cat add.py; exit 1; fi\n";

fn check(name: &str, run: &[&str], timeout_s: u32) -> String {
    format!("[[check]]\nname = \"{name}\"\nrun = {run:?}\ntimeout_s = {timeout_s}\n")
}

fn repo_with(checks: &str) -> UserRepo {
    let repo = UserRepo::with_uncommitted_changes();
    repo.commit(&[("test.sh", TEST), (".cfq/checks.toml", checks)]);
    repo
}

fn wrong(n: u32) -> Reply {
    Reply::Text(file("add.py", &format!("# try {n}\ndef add(a, b):\n    return a - b\n")))
}

fn right() -> Reply {
    Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))
}

fn praise() -> Reply {
    Reply::Text(review(99, &[]))
}

/// Number of checkouts that exist, apart from those that are kept for later runs.
fn checkouts(cluster: &Cluster) -> usize {
    let folders = ["checks", "runner-data"].map(|name| cluster.dir.path().join(name));
    let roots = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let roots = roots.filter(|entry| entry.file_name().to_string_lossy().starts_with("cfq-checks-"));
    let entries = roots.flat_map(|root| std::fs::read_dir(root.path()).into_iter().flatten().flatten());
    entries.filter(|entry| entry.file_name() != "kept").count()
}

/// Inode of the file `name` in the checkout that is kept for later runs; `None` if none is kept.
fn kept_inode(cluster: &Cluster, name: &str) -> Option<u64> {
    let entries = std::fs::read_dir(cluster.dir.path().join("runner-data")).unwrap().flatten();
    let root = entries.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("/cfq-checks-"))?;
    let mut kept = std::fs::read_dir(root.join("kept")).ok()?.flatten();
    let (first, second) = (kept.next()?, kept.next());
    assert!(second.is_none(), "the tasks ran one after the other");
    Some(std::fs::metadata(first.path().join(name)).unwrap().ino())
}

/// The checks of the project that ran, as the task's events record them.
async fn runs(cluster: &Cluster, task: TaskKey) -> Vec<CheckRun> {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    let of_event = |event: Event| match event.body {
        EventBody::StepCommitted { step: Step::Checked { ran, .. }, .. } => ran,
        _ => Vec::new(),
    };
    events.into_iter().flat_map(of_event).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_check_is_feedback_and_its_result_is_neither_reviewed_nor_merged() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![wrong(1), right()]);
    cluster.models.script("beta", vec![praise()]);
    let checks = [check("tests", &["sh", "test.sh"], 60), check("style", &["sh", "-c", "! grep -n '\t' add.py"], 60)];
    let repo = repo_with(&checks.concat());
    let before = repo.fingerprint();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [first, second] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!((first.quarantine, first.findings.len()), (Some(Quarantine::FailedChecks), 1), "{:?}", first.findings);
    let finding = &first.findings[0];
    assert_eq!(finding.check, CheckKind::Project);
    for part in ["`tests` failed (exit code 1)", "add is wrong", "return a - b"] {
        assert!(finding.message.contains(part), "{}", finding.message);
    }
    assert_eq!((second.quarantine, second.findings.as_slice()), (None, &[][..]));
    assert!(cluster.models.prompts("alpha")[1].contains("add is wrong"), "the creator gets the output");
    assert_eq!(cluster.models.call_count("beta"), 1, "only the result that passes is reviewed");
    assert_eq!(repo.fingerprint(), before);
    let home = tempfile::tempdir().unwrap();
    let shown = cfq(&cluster, home.path(), &["show", &detail.summary.number.to_string()]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("check   the project's check `tests` failed"), "{shown}");
    let ran = runs(&cluster, task).await;
    let ran: Vec<_> = ran.iter().map(|run| (run.name.as_str(), run.passed)).collect();
    assert_eq!(ran, [("tests", false), ("style", true), ("tests", true), ("style", true)]);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

/// A run may use the checkout of an earlier one. What the earlier one changed must not be in it.
#[tokio::test(flavor = "multi_thread")]
async fn changes_that_a_check_makes_to_its_checkout_do_not_reach_the_next_run() {
    const VANDAL: &str = "set -e\n[ ! -e stray ]; [ ! -e conftest.py ]; [ \"$(cat kept.txt)\" = whole ]\n\
        grep -q 'return a + b' add.py\n\
        touch stray; mkdir -p lib/.git; touch lib/conftest.py conftest.py; mv kept.txt moved.txt\n\
        echo broken > add.py; ln -s moved.txt kept.txt; rm -rf folder\n";
    let cluster = Cluster::start().await;
    let reply = |n: u32| Reply::Text(file("add.py", &format!("# try {n}\ndef add(a, b):\n    return a + b\n")));
    cluster.models.script("alpha", (1..=3).map(reply).collect());
    cluster.models.script("beta", [40, 60, 99].map(|score| Reply::Text(review(score, &[]))).to_vec());
    let repo = UserRepo::with_uncommitted_changes();
    let checks = check("vandal", &["sh", "vandal.sh"], 60);
    repo.commit(&[
        ("vandal.sh", VANDAL),
        ("kept.txt", "whole\n"),
        ("folder/a.txt", "a\n"),
        (".cfq/checks.toml", &checks),
    ]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let passed: Vec<bool> = runs(&cluster, task).await.iter().map(|run| run.passed).collect();
    assert_eq!(passed, [true; 3]);
    assert_eq!(checkouts(&cluster), 0);
    match kept_inode(&cluster, "vandal.sh") {
        None => cfq_test_skip::skip(
            "changes_that_a_check_makes_to_its_checkout_do_not_reach_the_next_run/kept",
            "checkouts are not kept for tests of root, nor on this file system",
        ),
        before => {
            cluster.models.script("alpha", vec![reply(4)]);
            cluster.models.script("beta", vec![praise()]);
            let task = cluster.submit(&cluster.spec(&repo)).await;
            // It conflicts with the first one, but its check has run before.
            cluster.wait_until_settled(task).await;
            assert_eq!(runs(&cluster, task).await.iter().filter(|run| run.passed).count(), 1);
            assert_eq!(kept_inode(&cluster, "vandal.sh"), before, "the file was written again");
        }
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn praise_never_merges_a_failing_result_but_a_human_may_accept_it() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", (1..=5).map(wrong).collect());
    cluster.models.script("beta", vec![praise(); 5]);
    let repo = repo_with(&check("tests", &["sh", "test.sh"], 60));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let escalation = detail.escalation.unwrap();
    assert_eq!(escalation.reason, EscalationReason::MaxIterationsReached);
    assert!(escalation.available_actions.contains(&ActionKind::AcceptBestEffort), "{escalation:?}");
    assert_eq!((detail.iterations.len(), cluster.models.call_count("beta")), (5, 0));
    let branches = repo.branches();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let detail = cluster.wait_for_state(task, TaskState::Accepted).await;
    assert_eq!(repo.branches().len(), branches.len() + 1, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_that_hangs_is_killed_and_reported() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("slow.txt", "600\n")), Reply::Text(file("slow.txt", "0\n"))]);
    cluster.models.script("beta", vec![praise()]);
    let repo = repo_with(&check("tests", &["sh", "-c", "echo waiting; sleep $(cat slow.txt)"], 2));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let message = &detail.iterations[0].findings[0].message;
    assert!(message.contains("it ran too long") && message.contains("waiting"), "{message}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_that_cannot_run_never_passes_and_the_reason_says_what_to_do() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![right()]);
    cluster.models.script("beta", vec![praise()]);
    let repo = repo_with(&check("tests", &["no-such-program"], 60));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.escalation.unwrap().reason, EscalationReason::WorkflowError);
    assert!(detail.reason.contains("no-such-program cannot be executed in the sandbox"), "{}", detail.reason);
    assert!(detail.iterations[0].unchecked);
    let home = tempfile::tempdir().unwrap();
    let number = detail.summary.number.to_string();
    let pulled = cfq(&cluster, home.path(), &["pull", &number, "--repo", repo.path().to_str().unwrap()]);
    let error = String::from_utf8(pulled.stderr).unwrap();
    assert!(error.contains("has not been checked"), "{error}");
    // Nothing can be checked against an invalid declaration, so no model is called.
    let repo = repo_with("[[check]]\nname = \"tests\"\n");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert!(detail.reason.contains(".cfq/checks.toml of the base commit is invalid"), "{}", detail.reason);
    assert_eq!((cluster.models.call_count("alpha"), cluster.models.call_count("beta")), (1, 0));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn change_can_neither_remove_nor_weaken_a_check() {
    let cluster = Cluster::start().await;
    let reply = format!("{}\n{}", file("add.py", "def add(a, b):\n    return a - b\n"), file(".cfq/checks.toml", ""));
    cluster.models.script("alpha", vec![Reply::Text(reply)]);
    cluster.models.script("beta", vec![praise()]);
    let repo = repo_with(&check("tests", &["sh", "test.sh"], 60));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.escalation.unwrap().reason, EscalationReason::DangerousOutputDetected, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn protected_test_can_be_neither_weakened_nor_removed() {
    let cluster = Cluster::start().await;
    let wrong = "def add(a, b):\n    return a - b\n";
    let weakened = format!("{}\n{}", file("add.py", wrong), file("test.sh", "exit 0\n"));
    let removed =
        format!("{}\n```\n*** Begin Patch\n*** Delete File: test.sh\n*** End Patch\n```\n", file("add.py", wrong));
    cluster.models.script("alpha", vec![Reply::Text(weakened), Reply::Text(removed), right()]);
    cluster.models.script("beta", vec![praise()]);
    let repo = repo_with(&format!("protected = [\"test.sh\"]\n{}", check("tests", &["sh", "test.sh"], 60)));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    let [first, second, ..] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    for (iteration, change) in [(first, "was changed"), (second, "was removed")] {
        assert_eq!(iteration.quarantine, Some(Quarantine::FailedChecks), "{iteration:?}");
        let finding = iteration.findings[0].to_string();
        assert!(finding.starts_with("test.sh: ") && finding.contains(change), "{finding}");
        assert_eq!(iteration.ran, [], "no check runs");
    }
    assert_eq!(cluster.models.call_count("beta"), 0, "neither is reviewed");
    cluster.finish().await;
}

/// A test script with a JUnit report: one test of `add.py`, and one that always fails.
const REPORTING_TEST: &str = r#"mkdir -p out
{
    echo '<testsuite name="s">'
    if grep -q 'return a + b' add.py
    then echo '<testcase name="adds"/>'
    else echo '<testcase name="adds" file="add.py" line="2"><failure message="add is wrong"/></testcase>'
    fi
    echo '<testcase name="old"><failure message="never worked"/></testcase></testsuite>'
} >out/report.xml
exit 1
"#;

#[tokio::test(flavor = "multi_thread")]
async fn report_tells_new_failures_from_old_ones_and_notices_removed_tests() {
    let cluster = Cluster::start().await;
    let wrong_code = file("add.py", "def add(a, b):\n    return a - b\n");
    let fewer_tests = REPORTING_TEST.replace("name=\"adds\"", "name=\"other\"");
    let without_report = file("test.sh", "exit 0\n");
    let correct = file("add.py", "def add(a, b):\n    \"\"\"The sum.\"\"\"\n    return a + b\n");
    let replies = [
        wrong_code,
        format!("{correct}\n{}", file("test.sh", &fewer_tests)),
        format!("{correct}\n{without_report}"),
        format!("{correct}\n{}", file("test.sh", REPORTING_TEST)),
    ];
    cluster.models.script("alpha", replies.into_iter().map(Reply::Text).collect());
    cluster.models.script("beta", vec![praise()]);
    let repo = UserRepo::with_uncommitted_changes();
    let declared = format!("{}report = \"out/report.xml\"\n", check("tests", &["sh", "test.sh"], 60));
    let stale = "<testsuite><testcase name=\"stale\"/></testsuite>";
    let code = "def add(a, b):\n    return a + b\n";
    repo.commit(&[
        ("add.py", code),
        ("test.sh", REPORTING_TEST),
        ("out/report.xml", stale),
        (".cfq/checks.toml", &declared),
    ]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let findings: Vec<String> = detail.iterations.iter().flat_map(|i| &i.findings).map(ToString::to_string).collect();
    let [failed, removed, unreported] = findings.as_slice() else { panic!("{findings:#?}") };
    assert!(failed.starts_with("add.py:2: the test `s::adds` of the check `tests` fails"), "{failed}");
    assert!(failed.contains("add is wrong"), "{failed}");
    let expected = "tests of the check `tests` that did not run, but run on the base commit; restore them";
    assert!(removed.starts_with(expected) && removed.ends_with(": s::adds"), "{removed}");
    let expected = "the report out/report.xml of the check `tests` was not written";
    assert!(unreported.starts_with(expected), "{unreported}");
    assert_eq!(cluster.models.call_count("beta"), 1, "only the last one passes");
    assert!(cluster.models.prompts("beta")[0].contains("# Failing tests"), "{:?}", cluster.models.prompts("beta"));
    let ran = runs(&cluster, task).await;
    let last = ran.last().unwrap();
    assert_eq!(
        (last.passed, last.tests, last.known_failures.names.as_slice()),
        (true, Some(2), &["s::old".to_owned()][..])
    );
    assert!(last.flaky.is_empty(), "{:?}", last.flaky);
    let home = tempfile::tempdir().unwrap();
    let shown = cfq(&cluster, home.path(), &["show", &detail.summary.number.to_string()]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(", 2 tests); known failures: s::old"), "{shown}");
    assert_eq!(checkouts(&cluster), 0, "no checkout is left");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_check_is_run_again_and_a_flaky_one_is_named() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![right()]);
    cluster.models.script("beta", vec![praise()]);
    let mode = cluster.readable_folder().join("exit-code");
    std::fs::write(&mode, "1").unwrap();
    // The first run reads the code before it sleeps; meanwhile the code is changed for the second one.
    let marker = format!("2.{}", std::process::id());
    let script = format!("code=$(cat {}); sleep {marker}; exit $code", mode.display());
    let repo = repo_with(&check("tests", &["sh", "-c", &script], 60));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("the first run", WAIT_LIMIT, || {
        let runs = processes_of(&["sleep", &marker]) > 0;
        async move { if runs { Ok(()) } else { Err("not yet".to_owned()) } }
    })
    .await;
    std::fs::write(&mode, "0").unwrap();
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let ran = runs(&cluster, task).await;
    assert_eq!((ran.len(), ran[0].passed, ran[0].flaky.names.as_slice()), (1, true, &["tests".to_owned()][..]));
    assert_eq!(cluster.models.call_count("alpha"), 1);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_that_writes_no_report_on_the_base_commit_escalates() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![right()]);
    cluster.models.script("beta", vec![praise()]);
    let declared = format!("{}report = \"r.xml\"\n", check("tests", &["sh", "-c", "echo no module x; exit 2"], 60));
    let repo = repo_with(&declared);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let expected = "cannot compare the check `tests` with the base commit: there, its report r.xml was not written";
    assert!(
        detail.reason.contains(expected) && detail.reason.contains("end of its stdout:\nno module x"),
        "{}",
        detail.reason
    );
    assert!(detail.iterations[0].unchecked);
    cluster.finish().await;
}

/// Number of processes that run with these arguments.
fn processes_of(args: &[&str]) -> usize {
    let ids = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = ids.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.starts_with(args.join("\0").as_bytes())).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn user_sees_which_check_runs_and_for_how_long() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![right()]);
    cluster.models.script("beta", vec![praise()]);
    let go = cluster.readable_folder().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.1; done", go.display());
    let repo = repo_with(&check("tests", &["sh", "-c", &script], 600));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let activity = wait::until("the activity to be shown", WAIT_LIMIT, || async {
        let detail = cluster.client.task(task).await.map_err(|error| error.to_string())?;
        detail.activity.ok_or_else(|| "nothing yet".to_owned())
    })
    .await;
    assert_eq!(activity.text, "running the check `tests` on the result");
    let home = tempfile::tempdir().unwrap();
    let show = || String::from_utf8(cfq(&cluster, home.path(), &["show", "t1"]).stdout).unwrap();
    let shown = show();
    assert!(shown.contains("  now         running the check `tests` on the result, for "), "{shown}");
    std::fs::write(&go, "").unwrap();
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!((detail.summary.state, detail.activity), (TaskState::Merged, None), "{}", detail.reason);
    assert!(!show().contains("  now  "));
    let events = cluster.client.events(task, 0).await.unwrap().events;
    let reports = events.iter().filter(|event| matches!(event.body, EventBody::RunnerActivity { .. })).count();
    assert_eq!(reports, 1, "{events:#?}");
    let watched = String::from_utf8(cfq(&cluster, home.path(), &["watch", "t1"]).stdout).unwrap();
    assert!(watched.contains("t1 is running the check `tests` on the result"), "{watched}");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runner_killed_during_a_check_leaves_no_process_and_the_task_continues() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![right()]);
    cluster.models.script("beta", vec![praise()]);
    let marker = format!("3.{}", std::process::id());
    let repo = repo_with(&check("tests", &["sh", "-c", &format!("sleep {marker}; sh test.sh")], 60));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let until = |wanted: bool| {
        let state = (processes_of(&["sleep", &marker]) > 0) == wanted;
        async move { if state { Ok(()) } else { Err("not yet".to_owned()) } }
    };
    wait::until("the check to run", WAIT_LIMIT, || until(true)).await;
    cluster.kill9("runner");
    wait::until("the check to end with its runner", Duration::from_secs(2), || until(false)).await;
    cluster.start_service("runner");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(cluster.models.call_count("alpha"), 1, "the committed artifact is kept");
    assert_eq!(checkouts(&cluster), 0, "no checkout is left");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
