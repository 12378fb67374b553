//! Tests of the processes that open users' repositories: what they may do, and that files which are replaced after the
//! check lead them to no other place.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, TOKEN, WAIT_LIMIT};
use cfq_tests::file_lease::FileLease;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::{binary, signal};

/// Starts a task, and lets its delivery begin while `path` in the git folder blocks its reader.
async fn blocked_delivery(cluster: &Cluster, repo: &UserRepo, path: &str) -> (TaskKey, FileLease) {
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b\n");
    let (first, rest) = text.split_at(4);
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let task = cluster.submit(&cluster.spec(repo)).await;
    cluster.wait_until_generating(task).await;
    let lease = FileLease::take(&repo.path().join(".git").join(path));
    gate.open();
    lease.wait_until_blocking(WAIT_LIMIT).await;
    (task, lease)
}

/// Starts `cfq submit`.
fn start_submit(cluster: &Cluster, repo: &Path) -> Child {
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    command.args(["submit", "add a function", "--repo"]).arg(repo).current_dir(cluster.dir.path());
    command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN).env("CFQ_DATA", cluster.dir.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn process_file(pid: u32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn process_with_a_repository_has_no_environment_and_no_rights() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let (task, lease) = blocked_delivery(&cluster, &repo, "HEAD").await;
    let children = signal::children_of(cluster.pid("runner"));
    assert_eq!(children.len(), 1, "the delivery is a process of its own");
    let pid = children[0].pid;
    let status = process_file(pid, "status");
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line:?} is not in {status}");
    }
    let limits = process_file(pid, "limits");
    let values = limits.lines().find_map(|line| line.strip_prefix("Max processes")).unwrap();
    assert!(values.split_whitespace().take(2).all(|value| value == "0"), "{limits}");
    let allowed =
        ["HOME", "XDG_CONFIG_HOME", "SUDO_UID", "TZ", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE", "CFQ_LOG"].map(Some);
    let environment = process_file(pid, "environ");
    let mut names = environment.split('\0').filter(|entry| !entry.is_empty()).map(|entry| entry.split('=').next());
    assert!(names.all(|name| allowed.contains(&name)), "{environment:?}");
    drop(lease);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}

/// A submodule that was removed leaves such a file behind. The restricted process may not read it.
#[tokio::test(flavor = "multi_thread")]
async fn pointer_to_a_missing_git_folder_is_passed_on_the_way_up() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let inner = repo.path().join("removed");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(inner.join(".git"), "gitdir: ../.git/modules/removed\n").unwrap();
    let output = start_submit(&cluster, &inner).wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let task = cluster.client.tasks(None, 1).await.unwrap().tasks[0].id;
    let detail = cluster.wait_until_settled(TaskKey::Id(task)).await;
    assert_eq!(Path::new(&detail.spec.repo), repo.path().canonicalize().unwrap());
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn alternate_that_is_added_after_the_check_is_not_read() {
    let cluster = Cluster::start().await;
    let (repo, private) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let secret = {
        let repository = private.open();
        let head = repository.head().unwrap().peel_to_commit().unwrap();
        let author = head.author();
        repository.commit(None, &author, &author, "secret", &head.tree().unwrap(), &[&head]).unwrap().to_string()
    };
    let head = repo.path().join(".git/HEAD");
    std::fs::write(&head, format!("{secret}\n")).unwrap();
    let lease = FileLease::take(&head);
    let submit = start_submit(&cluster, &repo.path());
    lease.wait_until_blocking(WAIT_LIMIT).await;
    let alternate = private.path().join(".git/objects");
    let list = repo.path().join(".git/objects/info/alternates");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, format!("{}\n", alternate.display())).unwrap();
    drop(lease);
    let output = tokio::task::block_in_place(|| submit.wait_with_output().unwrap());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_refused = text.contains(alternate.to_str().unwrap()) && text.contains("Permission denied");
    assert!(output.status.code() == Some(2) && is_refused, "{text}");
    // With the alternate from the start, it belongs to the repository.
    let submit = start_submit(&cluster, &repo.path());
    let output = tokio::task::block_in_place(|| submit.wait_with_output().unwrap());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn link_that_is_added_after_the_check_redirects_no_write() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let outside = tempfile::tempdir().unwrap();
    // The delivery reads HEAD after it has checked the paths that it writes.
    let (task, lease) = blocked_delivery(&cluster, &repo, "HEAD").await;
    let logs = repo.path().join(".git/logs/refs/heads");
    let moved = outside.path().join("heads");
    std::fs::rename(&logs, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &logs).unwrap();
    let before = std::fs::read_dir(&moved).unwrap().count();
    drop(lease);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert!(detail.reason.contains("cannot create the branch"), "{}", detail.reason);
    assert_eq!(std::fs::read_dir(&moved).unwrap().count(), before, "something was written outside");
    assert!(repo.branches().iter().all(|branch| !branch.starts_with("cfq/")), "{:?}", repo.branches());
    cluster.finish().await;
}
