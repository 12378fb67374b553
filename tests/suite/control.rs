//! Tests of how users control tasks, on the command line, with real processes and scripted models.

use std::process::Output;

use cfq_proto::job::JobState;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, SERVICES, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{End, Gate, Reply, file, review};
use cfq_tests::wait;

mod bulk;
mod dead_letters;
mod list;
mod requests;
mod status;

const ADD: &str = "def add(a, b):\n    return a + b\n";

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether a command exited with this code and named all these words on stderr.
fn refused(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in {text}"));
}

/// A creator's reply that stops in the middle until the gate is opened.
fn gated(gate: &Gate) -> Reply {
    let text = file("add.py", ADD);
    let (first, rest) = text.split_at(text.len() / 2);
    Reply::Gated(first.into(), rest.into(), gate.clone())
}

/// Waits until the first call to the model has ended.
async fn wait_until_call_ended(cluster: &Cluster, model: &str) -> End {
    wait::until("the end of the call", WAIT_LIMIT, || async {
        let calls = cluster.models.all_calls();
        calls.iter().find(|call| call.model == model).and_then(|call| call.end).ok_or_else(|| format!("{calls:?}"))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_task_stops_its_generation_survives_restarts_and_resumes() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![gated(&gate)]);
    cluster.models.script("alpha2", vec![Reply::Text(file("other.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;

    let paused = stdout(&run(&["pause", "t1", "--reason", "the machine is needed"]));
    assert_eq!(paused.trim(), "t1 is paused");
    assert_eq!(wait_until_call_ended(&cluster, "alpha").await, End::Disconnected, "the generation stops");
    cluster.wait_until_nodes_idle().await;
    let shown = stdout(&run(&["show", "t1"]));
    assert!(shown.contains("paused by a client: the machine is needed"), "{shown}");
    assert!(stdout(&run(&["ls", "--state", "paused"])).contains("t1"));

    for service in SERVICES {
        cluster.kill9(service);
    }
    SERVICES.iter().for_each(|service| cluster.start_service(service));
    cluster.wait_until_ready().await;
    // Another task runs from its beginning to its end meanwhile.
    let mut other = cluster.spec(&repo);
    other.agents.alpha.model = Some(cluster.model("alpha2"));
    let other = cluster.submit(&other).await;
    cluster.wait_for_state(other, TaskState::Merged).await;
    let detail = cluster.client.task(task).await.unwrap();
    assert_eq!((detail.summary.state, detail.runner), (TaskState::Paused, None));
    let job = &detail.jobs[0];
    assert_eq!((job.state, job.losses, job.failures), (JobState::Queued, 0, 0));
    assert_eq!(cluster.models.call_count("alpha"), 1, "no model is called for a paused task");

    gate.open();
    assert_eq!(stdout(&run(&["resume", "t1"])).trim(), "t1 is ready");
    let detail = cluster.wait_for_state(task, TaskState::Merged).await;
    assert_eq!(detail.jobs.len(), 2, "the same jobs continue: {:?}", detail.jobs);
    assert!(detail.jobs.iter().all(|job| job.losses == 0 && job.failures == 0), "{:?}", detail.jobs);
    refused(&run(&["pause", "t1"]), 2, &["t1 is already merged"]);
    refused(&run(&["resume", "t1"]), 2, &["only a paused task"]);
    refused(&run(&["pause", "t99"]), 2, &["t99", "cfq ls"]);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn task_paused_during_a_step_keeps_the_step() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![gated(&gate)]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    // A stopped runner is still in its step when the model has answered.
    cluster.signal("runner", libc::SIGSTOP);
    gate.open();
    wait::until("the answer", WAIT_LIMIT, || async {
        let detail = cluster.client.task(task).await.map_err(|e| e.to_string())?;
        let done = detail.jobs.iter().all(|job| job.state == JobState::Done);
        if done { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
    })
    .await;
    let paused = run(&["pause", "t1"]);
    cluster.signal("runner", libc::SIGCONT);
    // If the machine is slow, the lease of the stopped runner has expired before the pause.
    let text = stdout(&paused);
    assert!(text.contains("it will be paused after the running step") || text.contains("t1 is paused"), "{text}");
    let detail = cluster.wait_for_state(task, TaskState::Paused).await;
    assert_eq!(detail.runner, None);
    assert_eq!(cluster.models.call_count("beta"), 0, "the critic is not called");
    run(&["resume", "t1"]);
    cluster.wait_for_state(task, TaskState::Merged).await;
    assert_eq!(cluster.models.call_count("alpha"), 1, "the answer is kept");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_errors_of_control_commands_name_the_next_step() {
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    for command in ["cancel", "pause", "resume", "retry"] {
        refused(&run(&[command]), 2, &["Usage:", "--help"]);
        refused(&run(&[command, "nonsense"]), 2, &["nonsense", "t42"]);
        refused(&run(&[command, "t1", "--all"]), 2, &["--all", "--help"]);
        refused(&run(&[command, "--state", "running", "--all"]), 2, &["--all", "--help"]);
        refused(&run(&[command, "--state", "runing"]), 2, &["runing", "waiting_on_human"]);
        let help = stdout(&run(&[command, "--help"]));
        assert!(help.contains("[TASK]...") && help.contains("--dry-run"), "{help}");
    }
    refused(&run(&["prioritize", "t1", "P0"]), 2, &["t1", "P0, P1, P2 or P3"]);
    refused(&run(&["prioritize", "P0"]), 2, &["Usage:", "--help"]);
    cluster.finish().await;
}
