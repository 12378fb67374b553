//! A repository has one main branch in cfq, wherever its tasks run: a result that conflicts with an earlier one is never
//! merged, not even if the mirror was removed, or if two runners have a mirror each.

use std::collections::BTreeSet;
use std::path::Path;

use cfq_proto::http::{GcRequest, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

/// Prepares the models so that the next task creates the file at `path`.
fn script(cluster: &Cluster, path: &str, content: &str) {
    cluster.models.script("alpha", vec![Reply::Text(file(path, content))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
}

async fn submit(cluster: &Cluster, repo: &UserRepo) -> TaskDetail {
    let task = cluster.submit(&cluster.spec(repo)).await;
    cluster.wait_until_settled(task).await
}

/// Paths of the files in the main branch of a runner's only mirror.
fn files_on_main(runner_data: &Path) -> BTreeSet<String> {
    let mirrors: Vec<_> = std::fs::read_dir(runner_data.join("mirrors")).unwrap().map(|m| m.unwrap().path()).collect();
    assert_eq!(mirrors.len(), 1, "{mirrors:?}");
    let mirror = git2::Repository::open_bare(&mirrors[0]).unwrap();
    let tree = mirror.find_reference("refs/heads/main").unwrap().peel_to_tree().unwrap();
    tree.iter().map(|entry| entry.name().unwrap().to_owned()).collect()
}

fn assert_conflicts(detail: &TaskDetail, path: &str) {
    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert!(detail.reason.contains("an earlier cfq task changed") && detail.reason.contains(path), "{}", detail.reason);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_result_conflicts_after_the_mirror_was_removed() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    script(&cluster, "add.py", "# try 1\n");
    assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    std::fs::remove_dir_all(cluster.runner_data("runner").join("mirrors")).unwrap();
    script(&cluster, "add.py", "# try 2\n");
    assert_conflicts(&submit(&cluster, &repo).await, "add.py");
    script(&cluster, "sub.py", "# sub\n");
    let third = submit(&cluster, &repo).await;
    assert_eq!(third.summary.state, TaskState::Merged, "{}", third.reason);
    let files = files_on_main(&cluster.runner_data("runner"));
    assert!(files.contains("add.py") && files.contains("sub.py"), "{files:?}");
    cluster.run_oracle(TaskKey::Id(third.summary.id), &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_result_conflicts_after_the_first_task_and_the_mirror_were_deleted() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    for path in ["add.py", "mul.py"] {
        script(&cluster, path, "# first\n");
        assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    }
    let request = GcRequest { older_than_days: Some(0.0), ..GcRequest::default() };
    assert_eq!(cluster.client.gc(&request).await.unwrap().tasks, 2);
    std::fs::remove_dir_all(cluster.runner_data("runner").join("mirrors")).unwrap();
    script(&cluster, "add.py", "# second\n");
    assert_conflicts(&submit(&cluster, &repo).await, "add.py");
    script(&cluster, "sub.py", "# second\n");
    assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    let files = files_on_main(&cluster.runner_data("runner"));
    assert!(["add.py", "mul.py", "sub.py"].iter().all(|path| files.contains(*path)), "{files:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_runner_merges_onto_the_first_runners_results() {
    let cluster = Cluster::start_with(Options { second_runner: true, ..Options::default() }).await;
    let repo = UserRepo::with_uncommitted_changes();
    cluster.stop("second_runner").await;
    for path in ["add.py", "mul.py"] {
        script(&cluster, path, "# by r1\n");
        assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    }
    cluster.stop("runner").await;
    cluster.start_service("second_runner");
    script(&cluster, "add.py", "# by r2\n");
    assert_conflicts(&submit(&cluster, &repo).await, "add.py");
    script(&cluster, "sub.py", "# by r2\n");
    assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    let files = files_on_main(&cluster.runner_data("second_runner"));
    assert!(["add.py", "mul.py", "sub.py"].iter().all(|path| files.contains(*path)), "{files:?}");
    // The first runner follows the merges of the second.
    cluster.stop("second_runner").await;
    cluster.start_service("runner");
    script(&cluster, "sub.py", "# by r1\n");
    assert_conflicts(&submit(&cluster, &repo).await, "sub.py");
    assert_eq!(files_on_main(&cluster.runner_data("runner")), files);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_conflicting_results_of_two_runners_one_is_merged() {
    let cluster = Cluster::start_with(Options { second_runner: true, ..Options::default() }).await;
    let repo = UserRepo::with_uncommitted_changes();
    let replies = (0..8).map(|n| match n % 2 {
        0 => Reply::Text(file("same.py", &format!("# try {n}\n"))),
        _ => Reply::Text(file(&format!("own{n}.py"), "# own\n")),
    });
    cluster.models.script("alpha", replies.collect());
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let mut tasks = Vec::new();
    for n in 0..8 {
        // The model's reply depends on the prompt.
        let mut spec = cluster.spec(&repo);
        spec.description = format!("Write file {n}.");
        tasks.push(cluster.submit(&spec).await);
    }
    let mut merged = 0;
    for task in tasks {
        let detail = cluster.wait_until_settled(task).await;
        match detail.summary.state {
            TaskState::Merged => merged += 1,
            _ => assert_conflicts(&detail, "same.py"),
        }
        cluster.run_oracle(task, &repo).await;
    }
    assert_eq!(merged, 5, "four files of their own, and one of the four files with the same name");
    // A later merge has all of them.
    cluster.stop("second_runner").await;
    script(&cluster, "last.py", "# last\n");
    assert_eq!(submit(&cluster, &repo).await.summary.state, TaskState::Merged);
    let files = files_on_main(&cluster.runner_data("runner"));
    let expected = ["same.py", "own1.py", "own3.py", "own5.py", "own7.py", "last.py"];
    assert!(expected.iter().all(|path| files.contains(*path)), "{files:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_with_a_link_is_refused_with_the_path_to_submit() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let link = cluster.dir.path().join("link");
    std::os::unix::fs::symlink(repo.path(), &link).unwrap();
    let mut spec = cluster.spec(&repo);
    spec.repo = link.to_str().unwrap().to_owned();
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    assert!(
        detail.reason.contains(&format!("submit the task with the path {}", spec_path(&repo))),
        "{}",
        detail.reason
    );
    cluster.finish().await;
}

fn spec_path(repo: &UserRepo) -> String {
    repo.path().canonicalize().unwrap().to_str().unwrap().to_owned()
}
