//! Checks of a merge: results of which each passes the project's checks alone, and not together, are not merged.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;
use serde_json::Value;

/// A project whose check permits one file in the folder `limited`.
fn repo(before: &str) -> UserRepo {
    let script =
        format!("{before} n=$(ls limited 2>/dev/null | wc -l); if [ $n -gt 1 ]; then echo too many: $n; exit 1; fi");
    let repo = UserRepo::with_uncommitted_changes();
    let declared = format!("[[check]]\nname = \"limit\"\nrun = {:?}\n", ["sh", "-c", &script]);
    repo.commit(&[(".cfq/checks.toml", &declared)]);
    repo
}

/// Creates the file that the task names: its description is `Please add FILE. Task N.`
fn named_file(messages: &Value) -> String {
    let prompt = messages.to_string();
    let path = prompt.split_once("Please add ").unwrap().1.split_once(". Task").unwrap().0;
    let task = prompt.split_once(". Task ").unwrap().1.split_once('.').unwrap().0;
    file(path, &format!("# of task {task}\n"))
}

fn script(cluster: &Cluster) {
    cluster.models.script("alpha", vec![Reply::Computed(named_file, Duration::ZERO)]);
    cluster.models.script("beta", vec![Reply::Text(review(99, &[]))]);
}

async fn submit(cluster: &Cluster, repo: &UserRepo, path: &str, number: u32) -> TaskKey {
    let mut spec = cluster.spec(repo);
    spec.description = format!("Please add {path}. Task {number}.");
    cluster.submit(&spec).await
}

async fn settled(cluster: &Cluster, repo: &UserRepo, path: &str, number: u32) -> TaskDetail {
    let task = submit(cluster, repo, path, number).await;
    cluster.wait_until_settled(task).await
}

/// Files of each commit on the main branch of a runner's only mirror, newest first, with the subject of the commit.
fn main_history(runner_data: &Path) -> Vec<(String, BTreeSet<String>)> {
    let mirrors: Vec<_> = std::fs::read_dir(runner_data.join("mirrors")).unwrap().map(|m| m.unwrap().path()).collect();
    assert_eq!(mirrors.len(), 1, "{mirrors:?}");
    let mirror = git2::Repository::open_bare(&mirrors[0]).unwrap();
    let mut next = Some(mirror.find_reference("refs/heads/main").unwrap().peel_to_commit().unwrap());
    let mut history = Vec::new();
    while let Some(commit) = next {
        let mut files = BTreeSet::new();
        let tree = commit.tree().unwrap();
        tree.walk(git2::TreeWalkMode::PreOrder, |folder, entry| {
            files.insert(format!("{folder}{}", entry.name().unwrap()));
            git2::TreeWalkResult::Ok
        })
        .unwrap();
        history.push((commit.summary().unwrap().unwrap_or_default().to_owned(), files));
        next = commit.parent(0).ok();
    }
    history
}

fn limited(files: &BTreeSet<String>) -> usize {
    files.iter().filter(|path| path.starts_with("limited/")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn results_that_pass_only_alone_are_not_merged_together() {
    let cluster = Cluster::start().await;
    script(&cluster);
    let repo = repo("");
    let first = settled(&cluster, &repo, "limited/a.py", 1).await;
    assert_eq!(first.summary.state, TaskState::Merged, "{}", first.reason);
    assert_eq!(first.merge_checks, [], "a fast-forward has the files that were checked");

    let second = settled(&cluster, &repo, "limited/b.py", 2).await;
    assert_eq!(second.summary.state, TaskState::WaitingOnHuman, "{}", second.reason);
    for words in [
        "its merge with the results of earlier cfq tasks (merged before: t1: Please add limited/a.py. Task 1.) breaks the \
         project's checks:",
        "the project's check `limit` failed (exit code 1)",
        "too many: 2",
        "\nnext: `cfq pr show 2`",
        "cfq resolve t2",
    ] {
        assert!(second.reason.contains(words), "{words:?} is not in {:?}", second.reason);
    }
    assert!(second.iterations[0].ran[0].passed);
    let pr = cluster.client.pr(second.pr.unwrap()).await.unwrap();
    assert_eq!((pr.state, pr.merge_commit, pr.merge_checks), (PrState::Closed, None, vec![]));
    let branch = second.delivered_branch.unwrap();
    assert!(repo.show(&branch, "limited/b.py").is_some() && repo.show(&branch, "limited/a.py").is_none());

    let third = settled(&cluster, &repo, "other/c.py", 3).await;
    assert_eq!(third.summary.state, TaskState::Merged, "{}", third.reason);
    let [check] = third.merge_checks.as_slice() else { panic!("{:?}", third.merge_checks) };
    assert!(check.passed && check.name == "limit", "{check:?}");
    let pr = cluster.client.pr(third.pr.unwrap()).await.unwrap();
    assert_eq!(pr.merge_checks, third.merge_checks);
    let home = tempfile::tempdir().unwrap();
    for (args, expected) in [
        (["show", "t3"].as_slice(), "  checks      of the merge: limit passed in "),
        (&["pr", "show", "3"], "merge checks: limit passed in "),
        (&["watch", "t3"], "merge checks: limit passed in "),
    ] {
        let shown = String::from_utf8(cfq(&cluster, home.path(), args).stdout).unwrap();
        assert!(shown.contains(expected), "{args:?}: {shown}");
    }
    let shown = String::from_utf8(cfq(&cluster, home.path(), &["show", "t2"]).stdout).unwrap();
    assert_eq!(shown.matches("too many: 2").count(), 1, "a long reason is printed once: {shown}");
    let history = main_history(&cluster.runner_data("runner"));
    assert!(history.iter().all(|(_, files)| limited(files) <= 1), "{history:?}");
    for task in [first.summary.id, second.summary.id, third.summary.id] {
        cluster.run_oracle(TaskKey::Id(task), &repo).await;
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_twenty_tasks_those_that_conflict_wait_and_the_main_branch_stays_green() {
    let cluster = Cluster::start_with(Options { second_runner: true, ..Options::default() }).await;
    script(&cluster);
    let repo = repo("");
    let mut tasks = Vec::new();
    for number in 1..=20 {
        let path = match number {
            n if n % 3 == 0 => "same.py".to_owned(),
            1 | 8 => format!("limited/{number}.py"),
            _ => format!("own/{number}.py"),
        };
        tasks.push((number, path.clone(), submit(&cluster, &repo, &path, number).await));
    }
    let (mut merged, mut waiting) = (Vec::new(), Vec::new());
    for (number, path, task) in &tasks {
        let detail = cluster.wait_until_settled(*task).await;
        match detail.summary.state {
            TaskState::Merged => merged.push(path.as_str()),
            TaskState::WaitingOnHuman => {
                let expected = match number % 3 {
                    0 => "an earlier cfq task changed the same lines of same.py (t",
                    _ => "its merge with the results of earlier cfq tasks (merged before: t",
                };
                assert!(detail.reason.contains(expected), "{number}: {}", detail.reason);
                waiting.push(path.as_str());
            }
            state => panic!("{number}: {state}: {}", detail.reason),
        }
        cluster.run_oracle(*task, &repo).await;
    }
    assert_eq!((merged.len(), waiting.len()), (14, 6), "one of six files with one name, one of two limited files");
    assert_eq!(waiting.iter().filter(|path| **path == "same.py").count(), 5, "{waiting:?}");
    // The mirror of the runner that merges last has all merges.
    cluster.stop("second_runner").await;
    let last = settled(&cluster, &repo, "own/last.py", 21).await;
    assert_eq!(last.summary.state, TaskState::Merged, "{}", last.reason);
    let history = main_history(&cluster.runner_data("runner"));
    for (subject, files) in &history {
        assert!(limited(files) <= 1, "{subject}: {files:?}");
    }
    let newest = &history[0].1;
    assert!(merged.iter().all(|path| newest.contains(*path)), "{newest:?}");
    let merges = history.iter().filter(|(subject, _)| subject.contains("Task ")).count();
    assert_eq!(merges, 15, "{history:?}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runner_killed_during_the_check_of_a_merge_merges_once() {
    let cluster = Cluster::start().await;
    script(&cluster);
    let marker = format!("4.{}", std::process::id());
    // Both files exist only in the merge.
    let repo = repo(&format!("if [ -e own/a.py ] && [ -e own/b.py ]; then sleep {marker}; fi;"));
    assert_eq!(settled(&cluster, &repo, "own/a.py", 1).await.summary.state, TaskState::Merged);
    let task = submit(&cluster, &repo, "own/b.py", 2).await;
    wait::until("the check of the merge to run", WAIT_LIMIT, || {
        let line = format!("sleep\0{marker}");
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
        let runs = lines.any(|found| found.starts_with(line.as_bytes()));
        async move { if runs { Ok(()) } else { Err("not yet".to_owned()) } }
    })
    .await;
    let running = cluster.client.task(task).await.unwrap();
    assert_eq!((running.summary.state, running.merge_checks.len()), (TaskState::Running, 0));
    cluster.kill9("runner");
    cluster.start_service("runner");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.merge_checks.len(), 1);
    assert_eq!(cluster.models.call_count("alpha"), 2, "one call for each task");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn merge_is_checked_only_with_what_its_lock_files_install() {
    let cluster = Cluster::start().await;
    script(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let declared = format!(
        "[[prepare]]\nname = \"deps\"\nrun = {:?}\nlock_files = [\"deps.lock\"]\nkeep = [\"deps/\"]\n\
         [[check]]\nname = \"deps\"\nrun = {:?}\n",
        ["sh", "-c", "mkdir deps; cp deps.lock deps/installed"],
        ["cmp", "deps.lock", "deps/installed"]
    );
    repo.commit(&[("deps.lock", "1\n"), (".cfq/checks.toml", &declared)]);
    let old = repo.fingerprint().commit;
    assert_eq!(settled(&cluster, &repo, "own/1.py", 1).await.summary.state, TaskState::Merged);
    // The user installs something else.
    repo.commit(&[("deps.lock", "2\n")]);
    let newer = settled(&cluster, &repo, "own/2.py", 2).await;
    assert_eq!(newer.summary.state, TaskState::Merged, "{}", newer.reason);
    assert!(newer.merge_checks[0].passed);
    let on_old = async |path: &str, number: u32| {
        let mut spec = cluster.spec(&repo);
        spec.base = Some(old.clone());
        spec.description = format!("Please add {path}. Task {number}.");
        let task = cluster.submit(&spec).await;
        cluster.wait_until_settled(task).await
    };
    // Its merge has the newer lock file, which was installed for the task before.
    let older = on_old("own/3.py", 3).await;
    assert_eq!(older.summary.state, TaskState::Merged, "{}", older.reason);
    assert!(older.merge_checks[0].passed);
    // Without that, it is not installed: the merge contains code that models wrote.
    let stores = ["checks", "runner-data"].map(|name| cluster.dir.path().join(name));
    let stores = stores.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let mut removed = 0;
    for store in stores.filter(|entry| entry.file_name().to_string_lossy().starts_with("cfq-prepared-")) {
        for prepared in std::fs::read_dir(store.path()).unwrap().flatten().map(|entry| entry.path()) {
            let installed = std::fs::read_to_string(prepared.join("checkout/deps/installed"));
            if installed.is_ok_and(|installed| installed == "2\n") {
                std::fs::remove_dir_all(prepared).unwrap();
                removed += 1;
            }
        }
    }
    assert_eq!(removed, 1);
    let refused = on_old("own/4.py", 4).await;
    assert_eq!(refused.summary.state, TaskState::WaitingOnHuman, "{}", refused.reason);
    for words in [
        "cannot be checked",
        "the merge has another preparation `deps` or other lock files",
        "(merged before: t3: Please add own/3.py",
    ] {
        assert!(refused.reason.contains(words), "{words:?} is not in {:?}", refused.reason);
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_that_no_longer_works_on_the_machine_neither_passes_nor_refuses_a_merge() {
    let cluster = Cluster::start().await;
    script(&cluster);
    let tool = cluster.readable_folder().join("tool");
    std::fs::write(&tool, "").unwrap();
    let repo = repo(&format!("if [ ! -e {} ]; then echo no tool; exit 127; fi;", tool.display()));
    assert_eq!(settled(&cluster, &repo, "own/a.py", 1).await.summary.state, TaskState::Merged);
    let gate = Gate::closed();
    let review = review(99, &[]);
    let (first, rest) = review.split_at(10);
    cluster.models.script("beta", vec![Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone())]);
    let task = submit(&cluster, &repo, "own/b.py", 2).await;
    wait::until("the result to pass its check", WAIT_LIMIT, || async {
        let detail = cluster.client.task(task).await.map_err(|error| error.to_string())?;
        let passed = detail.iterations.iter().any(|iteration| iteration.ran.iter().any(|run| run.passed));
        if passed { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    std::fs::remove_file(&tool).unwrap();
    gate.open();
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    let expected = "the check `limit` passed on the result before, and does not pass on it now";
    assert!(detail.reason.contains(expected), "{}", detail.reason);
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, PrState::Approved, "the merge can still be carried out");
    std::fs::write(&tool, "").unwrap();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let detail = cluster.wait_for_state(task, TaskState::Merged).await;
    assert!(detail.merge_checks[0].passed, "{:?}", detail.merge_checks);
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

/// A test script with a JUnit report of two tests: each passes if its file exists, and neither if both exist.
const TWO_TESTS: &str = r#"for name in a b
do
    if [ -e own/$name.py ] && ! { [ -e own/a.py ] && [ -e own/b.py ]; }
    then echo "<testcase name=\"$name\"/>"
    else echo "<testcase name=\"$name\"><failure message=\"$name fails\"/></testcase>"
    fi
done | { echo '<testsuite name="s">'; cat; echo '<testcase name="c"/></testsuite>'; } >report.xml
! grep -q failure report.xml
"#;

#[tokio::test(flavor = "multi_thread")]
async fn merge_must_not_undo_what_one_side_has_repaired() {
    let cluster = Cluster::start().await;
    script(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let declared = "[[check]]\nname = \"tests\"\nrun = [\"sh\", \"test.sh\"]\nreport = \"report.xml\"\n";
    repo.commit(&[("test.sh", TWO_TESTS), (".cfq/checks.toml", declared)]);
    // Both tests fail on the base commit, and each result repairs one of them.
    assert_eq!(settled(&cluster, &repo, "own/a.py", 1).await.summary.state, TaskState::Merged);
    let second = settled(&cluster, &repo, "own/b.py", 2).await;
    assert_eq!(second.summary.state, TaskState::WaitingOnHuman, "{}", second.reason);
    for test in ["a", "b"] {
        let expected = format!("the test `s::{test}` of the check `tests` fails; it does not fail on both sides");
        assert!(second.reason.contains(&expected), "{expected:?} is not in {}", second.reason);
    }
    // A failure that all have in common stops no merge.
    let third = settled(&cluster, &repo, "other/c.py", 3).await;
    assert_eq!(third.summary.state, TaskState::Merged, "{}", third.reason);
    assert_eq!(third.merge_checks[0].known_failures.names, ["s::b"]);
    cluster.finish().await;
}
