//! Tests of repositories that would harm the machine: links in the `.git` folder that lead outside, and commits that
//! describe a huge checkout. The task ends or waits with the reason, and nothing is written outside.

use cfq_proto::task::TaskState;
use cfq_tests::cluster::Cluster;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

fn scripts(cluster: &Cluster) {
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn link_out_of_the_git_folder_stops_the_delivery() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let outside = tempfile::tempdir().unwrap();
    let link = repo.path().join(".git/logs/refs/heads/cfq");
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    repo.open().config().unwrap().set_str("user.name", "$(payload)").unwrap();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    for words in [link.to_str().unwrap(), "is a symbolic link", "cfq pull t1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
    assert!(repo.branches().iter().all(|branch| !branch.starts_with("cfq/")), "{:?}", repo.branches());
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn base_that_describes_a_huge_checkout_fails_the_task() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let repository = repo.open();
    let first = repository.head().unwrap().peel_to_commit().unwrap();
    // 10 to the power of 12 folders in 12 objects.
    let mut tree = first.tree_id();
    for _ in 0..12 {
        let mut above = repository.treebuilder(None).unwrap();
        for n in 0..10 {
            above.insert(format!("d{n}"), tree, git2::FileMode::Tree.into()).unwrap();
        }
        tree = above.write().unwrap();
    }
    let (author, tree) = (first.author(), repository.find_tree(tree).unwrap());
    let base = repository.commit(None, &author, &author, "huge", &tree, &[&first]).unwrap();
    let mut spec = cluster.spec(&repo);
    spec.base = Some(base.to_string());
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    for words in ["more than 2000000 files and folders", "submit a smaller repository"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    assert_eq!(cluster.models.call_count("alpha"), 0);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifo_in_the_git_folder_fails_the_task_and_the_next_task_goes_on() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let commit = repo.open().head().unwrap().peel_to_commit().unwrap().id().to_string();
    // Opening any of these files waits for a writer of the FIFO.
    for (name, base) in [("config", None), ("refs/heads/other", None), ("loose", Some(commit.clone()))] {
        let name = match name {
            "loose" => format!("objects/{}/{}", &commit[..2], &commit[2..]),
            name => name.to_owned(),
        };
        let (mut spec, path) = (cluster.spec(&repo), repo.path().join(".git").join(name));
        spec.base = base;
        let kept = std::fs::read(&path).ok();
        std::fs::remove_file(&path).ok();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let task = cluster.submit(&spec).await;
        let detail = cluster.wait_until_settled(task).await;
        assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
        for words in [path.to_str().unwrap(), "neither a file nor a folder", "replace it"] {
            assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
        }
        std::fs::remove_file(&path).unwrap();
        kept.map_or(Ok(()), |kept| std::fs::write(&path, kept)).unwrap();
    }
    assert_eq!(cluster.models.call_count("alpha"), 0);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}
