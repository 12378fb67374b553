//! Tests with a full file system, from the start or while tasks run.
//!
//! If the file system of Postgres and NATS is full, accepted tasks are kept, other submissions are refused with the
//! reason, and work continues when there is space again. If the runner's file system is full, its tasks escalate. Both
//! cases have a test of their own, with the runner's folder on another file system. In the default layout, which has one
//! file system for all, it depends on timing which of the two cases a task meets, so its test resolves a task that
//! escalates.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::mount_namespace::MountNamespace;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::{binary, wait};

const ADD: &str = "def add(a, b):\n    return a + b";

#[tokio::test(flavor = "multi_thread")]
async fn disk_too_small_at_start_is_reported_with_the_next_step() {
    let home = Home::new().await;
    let disk = home.path("disk");
    std::fs::create_dir(&disk).unwrap();
    // Sizes in MiB: no space for anything; too little for initdb; enough for initdb, but too little for the database.
    for mib in [1, 24, 40] {
        let test = "disk_too_small_at_start_is_reported_with_the_next_step";
        let Some(mount) = MountNamespace::with_tmpfs(test, &disk, mib) else { return };
        let data = disk.join("data");
        let refused = home.run_failing_up(Some(mount.command(&binary::cfq())), &data, &[]);
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(4), "{mib} MiB: {stderr}");
        assert!(stderr.contains("no space is left") && stderr.contains("CFQ_DATA"), "{mib} MiB: {stderr}");
        assert!(!stderr.contains("panicked") && !stderr.contains("initdb failed"), "{mib} MiB: {stderr}");
        let left = std::fs::read_dir(mount.path(&data).join("run")).map_or(0, |run| {
            run.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "pid")).count()
        });
        assert_eq!(left, 0, "{mib} MiB: a pid file was left");
    }
}

/// Time for which the disk is full: longer than a lease and longer than the generation, so that the result arrives
/// while the database cannot be written.
const FULL_FOR: Duration = Duration::from_secs(4);

/// Moves the runner's folder below the data folder `data` to `target`, by a symbolic link.
fn link_runner_folder(data: &Path, target: &Path) {
    std::fs::create_dir(data).unwrap();
    std::os::unix::fs::symlink(target, data.join("workstreams")).unwrap();
}

/// Writes until the file system is full.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![7; size]).is_ok() {}
    }
}

/// 2^64 divided by the golden ratio: its multiples look random (Fibonacci hashing).
const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

fn spec(repo: &UserRepo, more: &str) -> TaskSpec {
    serde_json::from_value(serde_json::json!({
        "description": format!("Write add(a, b) in add.py. {more}"), "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit,
    }))
    .unwrap()
}

async fn wait_until_settled(up: &Up, api: &Client, task: TaskId) -> TaskDetail {
    wait::until("an accepted task to end or wait for a human", WAIT_LIMIT, || async {
        let detail = api.task(TaskKey::Id(task)).await.map_err(|e| e.to_string())?;
        let settled = detail.summary.state.is_settled();
        if settled { Ok(detail) } else { Err(format!("{:?}\n{}", detail.summary, up.diagnostics())) }
    })
    .await
}

/// File system of the runner's folder.
#[derive(Clone, Copy, PartialEq)]
enum RunnerFolder {
    /// That of Postgres and NATS, which is the default.
    OnTheFullDisk,
    /// Another one, which always has space.
    Elsewhere,
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_full_during_work_loses_no_accepted_task() {
    fill_the_disk_during_work("disk_full_during_work_loses_no_accepted_task", RunnerFolder::Elsewhere).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_of_all_processes_loses_no_accepted_task() {
    fill_the_disk_during_work("full_disk_of_all_processes_loses_no_accepted_task", RunnerFolder::OnTheFullDisk).await;
}

/// Fills the disk while a task runs, submits tasks until one is refused, then removes the ballast: every accepted task
/// is merged.
async fn fill_the_disk_during_work(test: &str, layout: RunnerFolder) {
    let home = Home::new().await;
    let disk = home.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let Some(mount) = MountNamespace::with_tmpfs(test, &disk, 160) else { return };
    home.models.script("alpha", vec![Reply::Slow(file("add.py", ADD), Duration::from_millis(100))]);
    home.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let data = disk.join("data");
    if layout == RunnerFolder::Elsewhere {
        let runner_folder = home.path("workstreams");
        std::fs::create_dir(&runner_folder).unwrap();
        link_runner_folder(&mount.path(&data), &runner_folder);
    }
    let up = Up::start(&home, Some(mount.command(&binary::cfq())), &data, mount.path(&data));
    let api = up.client().await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let mut accepted = vec![api.submit(&spec(&repo, ""), Some("first")).await.unwrap().id];
    wait::until("a call to the model", WAIT_LIMIT, || async {
        if home.models.call_count("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;

    let ballast = mount.path(&disk.join("ballast"));
    fill(&ballast);
    let mut refused = None;
    for n in 0..200_u64 {
        // The content is not compressible.
        let words: String = (1..400).map(|i| format!("{:016x}", (n * 400 + i).wrapping_mul(HASH_FACTOR))).collect();
        match api.submit(&spec(&repo, &words), Some(&format!("k{n}"))).await {
            Ok(reply) => accepted.push(reply.id),
            Err(error) => {
                refused = Some((n, words, error.to_string()));
                break;
            }
        }
    }
    let (n, words, error) = refused.expect("a full disk accepts no more tasks");
    assert!(error.contains("cfq doctor"), "{error}");
    tokio::time::sleep(FULL_FOR).await;

    std::fs::remove_file(&ballast).unwrap();
    let again = wait::until("the refused task to be accepted", WAIT_LIMIT, || async {
        api.submit(&spec(&repo, &words), Some(&format!("k{n}"))).await.map_err(|e| format!("{e}\n{}", up.diagnostics()))
    })
    .await;
    accepted.push(again.id);
    for id in &accepted {
        let mut detail = wait_until_settled(&up, &api, *id).await;
        if layout == RunnerFolder::OnTheFullDisk && detail.summary.state == TaskState::Escalated {
            assert!(detail.reason.contains("No space left"), "{}", detail.reason);
            resolve(&api, *id).await;
            detail = wait_until_settled(&up, &api, *id).await;
        }
        assert_eq!(detail.summary.state, TaskState::Merged, "{}: {}", detail.summary.number, detail.reason);
    }
    assert_eq!(api.tasks(None, 500).await.unwrap().tasks.len(), accepted.len(), "no task was created twice");
    assert_eq!(repo.fingerprint(), before);
    let status = up.stop().await;
    assert!(status.success(), "{status}");
}

/// Continues an escalated task.
async fn resolve(api: &Client, task: TaskId) {
    let action = EscalationAction::RetryWithConstraints { additional_constraints: vec!["no imports".to_owned()] };
    api.resolve(TaskKey::Id(task), action).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn full_runner_folder_escalates_and_resolve_continues() {
    let home = Home::new().await;
    let disk = home.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let test = "full_runner_folder_escalates_and_resolve_continues";
    let Some(mount) = MountNamespace::with_tmpfs(test, &disk, 8) else { return };
    home.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    home.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let data = home.path("data");
    link_runner_folder(&data, &disk);
    let up = Up::start(&home, Some(mount.command(&binary::cfq())), &data, data.clone());
    let api = up.client().await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();

    let ballast = mount.path(&disk.join("ballast"));
    fill(&ballast);
    let task = api.submit(&spec(&repo, ""), None).await.unwrap().id;
    let detail = wait_until_settled(&up, &api, task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("No space left"), "{}", detail.reason);

    std::fs::remove_file(&ballast).unwrap();
    resolve(&api, task).await;
    let detail = wait_until_settled(&up, &api, task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(repo.fingerprint(), before);
    let status = up.stop().await;
    assert!(status.success(), "{status}");
}
