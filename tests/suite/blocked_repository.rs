//! Tests of files that pass the check of a repository and then block their reader, and of processes that end while they
//! have a repository open. Each ends only its own operation, with a reason.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use cfq_agent_runner::workstream::branch_name;
use cfq_proto::ids::TaskNumber;
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, TOKEN, WAIT_LIMIT};
use cfq_tests::file_lease::FileLease;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::{binary, signal, wait};

/// A cluster whose operations on repositories are stopped after 8 s, well before the kernel ends a lease.
async fn cluster() -> Cluster {
    let mut options = Options::default();
    options.timing.task_step_timeout_ms = 10_000;
    Cluster::start_with(options).await
}

/// Scripts a task whose creator waits until the gate is opened.
fn scripts(cluster: &Cluster) -> Gate {
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b\n");
    let (first, rest) = text.split_at(4);
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    gate
}

/// The file in the git folder with the log of the delivery branch of the first task, empty.
fn empty_reflog(cluster: &Cluster, repo: &UserRepo) -> PathBuf {
    let branch = branch_name(TaskNumber(1), &cluster.spec(repo).description);
    let path = repo.path().join(".git/logs/refs/heads").join(branch);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "").unwrap();
    path
}

/// Creates a commit on HEAD that no branch reaches, and returns its id.
fn unreferenced_commit(repo: &UserRepo) -> String {
    let repository = repo.open();
    let head = repository.head().unwrap().peel_to_commit().unwrap();
    let author = head.author();
    repository.commit(None, &author, &author, "next", &head.tree().unwrap(), &[&head]).unwrap().to_string()
}

fn locks(repo: &UserRepo) -> usize {
    let Ok(entries) = std::fs::read_dir(repo.path().join(".git/refs/heads/cfq")) else { return 0 };
    entries.flatten().filter(|entry| entry.path().extension().is_some_and(|extension| extension == "lock")).count()
}

fn assert_delivered_once(repo: &UserRepo) {
    let branches = repo.branches();
    assert_eq!(branches.iter().filter(|branch| branch.starts_with("cfq/")).count(), 1, "{branches:?}");
    assert_eq!(locks(repo), 0);
}

/// Delivers into a repository in which `path` blocks its reader, and resumes the task once it does not.
async fn delivery_into_blocked_repository(path: impl Fn(&Cluster, &UserRepo) -> PathBuf, locked: usize) {
    let cluster = cluster().await;
    let gate = scripts(&cluster);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let lease = FileLease::take(&path(&cluster, &repo));
    gate.open();
    lease.wait_until_blocking(WAIT_LIMIT).await;
    assert_eq!(locks(&repo), locked);
    let next = cluster.submit(&cluster.spec(&other)).await;
    let detail = cluster.wait_until_settled(next).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);

    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    for words in [repo.path().to_str().unwrap(), "was stopped after 8 s", "git fsck", "cfq pull t1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    assert_eq!(detail.attempt, 1, "the runner kept the task");
    assert_eq!(signal::children_of(cluster.pid("runner")), [], "a blocked process is left");
    assert_eq!(locks(&repo), locked, "the killed process leaves its lock");
    drop(lease);
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    cluster.wait_for_state(task, TaskState::Merged).await;
    assert_delivered_once(&repo);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delivery_that_cannot_open_the_repository_is_stopped_and_resumed() {
    delivery_into_blocked_repository(|_, repo| repo.path().join(".git/config"), 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delivery_that_is_stopped_while_the_branch_is_locked_is_resumed() {
    delivery_into_blocked_repository(empty_reflog, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_delivery_is_repeated_and_creates_one_branch() {
    let cluster = cluster().await;
    let gate = scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let lease = FileLease::take(&empty_reflog(&cluster, &repo));
    gate.open();
    lease.wait_until_blocking(WAIT_LIMIT).await;
    assert_eq!(locks(&repo), 1);
    let children = signal::children_of(cluster.pid("runner"));
    assert_eq!(children.len(), 1, "the delivery is a process of its own");
    signal::send(children[0].pid, libc::SIGKILL);
    assert!(children[0].ended(WAIT_LIMIT).await);
    drop(lease);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.attempt, 1, "the runner kept the task");
    assert_delivered_once(&repo);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuilding_of_an_earlier_merge_from_a_blocked_repository_is_stopped() {
    let cluster = cluster().await;
    scripts(&cluster).open();
    let repo = UserRepo::with_uncommitted_changes();
    let first = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.wait_until_settled(first).await.summary.state, TaskState::Merged);
    // The mirror is lost, and the second task starts from another commit than the first one.
    cluster.kill9("runner");
    std::fs::remove_dir_all(cluster.runner_data("runner").join("mirrors")).unwrap();
    cluster.start_service("runner");
    let mut spec = cluster.spec(&repo);
    spec.base = Some(unreferenced_commit(&repo));
    let gate = scripts(&cluster);
    let task = cluster.submit(&spec).await;
    cluster.wait_until_generating(task).await;
    let lease = FileLease::take(&repo.path().join(".git/config"));
    gate.open();
    lease.wait_until_blocking(WAIT_LIMIT).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    for words in [repo.path().to_str().unwrap(), "more than 8 s"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    assert_eq!(detail.attempt, 1, "the runner kept the task");
    assert_eq!(signal::children_of(cluster.pid("runner")), [], "a blocked process is left");
    drop(lease);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn submit_reports_that_the_process_with_the_repository_ended() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let lease = FileLease::take(&repo.path().join(".git/config"));
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    command.args(["submit", "--repo"]).arg(repo.path()).arg("add a function").current_dir(cluster.dir.path());
    command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN).env("CFQ_DATA", cluster.dir.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let submit = command.spawn().unwrap();
    lease.wait_until_blocking(WAIT_LIMIT).await;
    let children = wait::until("the child of cfq submit", WAIT_LIMIT, || {
        let children = signal::children_of(submit.id());
        async move { if children.is_empty() { Err("none".to_owned()) } else { Ok(children) } }
    })
    .await;
    signal::send(children[0].pid, libc::SIGKILL);
    let output = tokio::task::block_in_place(|| submit.wait_with_output().unwrap());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    for words in [repo.path().to_str().unwrap(), "ended with signal: 9", "git fsck"] {
        assert!(text.contains(words), "{words:?} is not in {text:?}");
    }
    drop(lease);
    assert!(cluster.client.tasks(None, 10).await.unwrap().tasks.is_empty());
    cluster.finish().await;
}
