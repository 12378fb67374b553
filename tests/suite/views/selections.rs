//! Tests of what the commands select: filters of lists, paths of a diff, labels of a wait; and of what is submitted from a
//! schedule and from an editor.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_filtered() {
    let (cluster, repo) = with_two_tasks().await;
    let lines = |args: &[&str]| text(&run(&cluster, args)).lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&["ls", "--quiet", "--sort", "oldest"]), ["t1", "t2"]);
    assert_eq!(lines(&["ls", "-q", "--state", "escalated"]), ["t2"]);

    assert!(lines(&["nodes", "n1", "--state", "alive"])[0].starts_with("n1  alive"));
    assert_eq!(lines(&["nodes", "--state", "unreachable,draining"]), ["no such nodes"]);
    assert_eq!(lines(&["nodes", "--model", "openai:scripted/none"]), ["no such nodes"]);
    assert!(lines(&["nodes", "--model", "openai:scripted/alpha", "--sort", "running"])[0].starts_with("n1  "));
    let unknown = run(&cluster, &["nodes", "n2"]);
    let error = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(unknown.status.code() == Some(2) && error.contains("the nodes are n1"), "{error}");

    let all = lines(&["jobs"]).len();
    assert_eq!(lines(&["jobs", "--state", "done,failed"]).len(), all);
    assert_eq!(lines(&["jobs", "--state", "queued,failed"]).len(), 1);

    let here = repo.path().to_str().unwrap().to_owned();
    assert_eq!(lines(&["pr", "ls", "--repo", &here, "--since", "1h"]).len(), 2);
    let elsewhere = tempfile::tempdir().unwrap();
    assert_eq!(lines(&["pr", "ls", "--repo", elsewhere.path().to_str().unwrap()]), ["no such pull requests"]);
    assert_eq!(lines(&["pr", "ls", "--since", "2100-01-01T00:00:00Z"]), ["no such pull requests"]);
    assert_eq!(lines(&["pr", "ls", "--label", "nightly"]), ["no such pull requests"]);
    assert_eq!(lines(&["pr", "ls", "--state", "merged", "--sort", "oldest"]).len(), 2);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn diff_of_some_paths() {
    let cluster = Cluster::start().await;
    let files = format!("{}{}", file("src/add.py", "x = 1\n"), file("src_2.py", "y = 2\n"));
    cluster.models.script("alpha", vec![Reply::Text(files)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged);
    let names = |paths: &[&str]| text(&run(&cluster, &[&["diff", "t1", "--name-only"], paths].concat()));
    assert_eq!(names(&[]), "src/add.py\nsrc_2.py\n");
    for (paths, expected) in [
        (&["src"][..], "src/add.py\n"),
        (&["./src/"], "src/add.py\n"),
        (&["src/add.py", "src_2.py"], "src/add.py\nsrc_2.py\n"),
        (&["."], "src/add.py\nsrc_2.py\n"),
    ] {
        assert_eq!(names(paths), expected, "{paths:?}");
    }
    let patch = text(&run(&cluster, &["diff", "t1", "src_2.py"]));
    assert!(patch.starts_with("diff --git a/src_2.py b/src_2.py\n") && !patch.contains("add.py"), "{patch}");
    let none = run(&cluster, &["diff", "t1", "src", "docs"]);
    let error = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(none.status.code() == Some(2) && error.contains("nothing in docs is changed"), "{error}");
    assert!(error.contains("the changed files are src/add.py, src_2.py"), "{error}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_labelled_tasks_and_for_the_first_failure() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    let repo = UserRepo::with_uncommitted_changes();
    let path = repo.path();
    for text in ["one", "two"] {
        let submit = ["submit", text, "--label", "nightly", "--repo", path.to_str().unwrap()];
        assert!(run(&cluster, &submit).status.success());
    }
    assert!(run(&cluster, &["submit", "three", "--repo", path.to_str().unwrap()]).status.success());
    let late = run(&cluster, &["wait", "--label", "nightly", "--timeout", "1s"]);
    assert_eq!(late.status.code(), Some(6), "{late:?}");
    assert!(String::from_utf8_lossy(&late.stderr).contains("not ended in time: t2 t1"), "{late:?}");
    assert!(run(&cluster, &["cancel", "t1"]).status.success());
    // It has ended; the other task still runs.
    let other = run(&cluster, &["wait", "--label", "nightly", "--timeout", "1s"]);
    assert!(String::from_utf8_lossy(&other.stderr).contains("not ended in time: t2;"), "{other:?}");
    let named = run(&cluster, &["wait", "t1", "t2", "--fail-fast", "--timeout", "60s"]);
    assert_eq!((named.status.code(), &*named.stdout), (Some(4), &b"t1 is cancelled\n"[..]), "{named:?}");
    let none = run(&cluster, &["wait", "--label", "weekly"]);
    let error = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(none.status.code() == Some(2) && error.contains("no task has the label weekly"), "{error}");
    // A task that failed before the wait counts, until its failure is acknowledged.
    assert!(run(&cluster, &["cancel", "t2"]).status.success());
    assert!(run(&cluster, &["wait", "--label", "nightly"]).status.success(), "cancelled tasks are no failures");
    cluster.models.script("alpha", vec![Reply::Status(400, "no such model".into())]);
    let submit = ["submit", "four", "--label", "nightly", "--max-iterations", "1", "--repo", path.to_str().unwrap()];
    assert!(run(&cluster, &submit).status.success());
    let escalated = run(&cluster, &["wait", "--label", "nightly", "--timeout", "60s"]);
    assert_eq!((escalated.status.code(), &*escalated.stdout), (Some(3), &b"t4 is escalated\n"[..]), "{escalated:?}");
    assert!(run(&cluster, &["resolve", "t4", "--action", "fail"]).status.success());
    let failed = run(&cluster, &["wait", "--label", "nightly", "--timeout", "60s"]);
    assert_eq!((failed.status.code(), &*failed.stdout), (Some(4), &b"t4 is failed\n"[..]), "{failed:?}");
    assert!(run(&cluster, &["acknowledge", "t4"]).status.success());
    assert!(run(&cluster, &["wait", "--label", "nightly"]).status.success());
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedule_runs_now_and_description_is_written_in_an_editor() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    let repo = UserRepo::with_uncommitted_changes();
    let path = repo.path().to_str().unwrap().to_owned();
    let add =
        ["schedule", "add", "nightly", "--cron", "0 6 * * *", "--zone", "UTC", "Fix the warnings", "--repo", &path];
    assert!(run(&cluster, &add).status.success());
    assert_eq!(text(&run(&cluster, &["schedule", "run", "nightly"])), "t1 accepted\n");
    let detail = cluster.client.task(TaskKey::Number("t1".parse().unwrap())).await.unwrap();
    assert_eq!(detail.spec.description, "Fix the warnings");
    let unknown = run(&cluster, &["schedule", "run", "nightli"]);
    let error = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(unknown.status.code() == Some(2) && error.contains("there is no schedule"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    // An editor that replaces the file, as many do.
    let script = folder.path().join("my editor");
    std::fs::write(&script, "#!/bin/sh\n(echo 'Write mul(a, b)'; cat \"$2\") > \"$2.new\" && mv \"$2.new\" \"$2\"\n")
        .unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let edit = |editor: String| {
        let mut edit = command(&cluster, &["submit", "--edit", "--repo", &path]);
        edit.env_remove("VISUAL").env("EDITOR", editor);
        edit
    };
    let (_, rows) = on_terminal(edit(format!("'{}' --wait", script.display())), 100).await;
    assert!(rows.join("\n").contains("t2 accepted"), "{}", rows.join("\n"));
    let detail = cluster.client.task(TaskKey::Number("t2".parse().unwrap())).await.unwrap();
    assert_eq!(detail.spec.description, "Write mul(a, b)");
    // The text of a task that is refused is kept.
    let mut refused = edit(format!("'{}' --wait", script.display()));
    refused.args(["--context", "nothing.py"]).env("TMPDIR", folder.path());
    let (code, rows) = Terminal::run(refused, 200).wait_for_exit(WAIT_LIMIT).await;
    let all = rows.join("\n");
    assert!(
        code == Some(2) && all.contains("your text is kept; to submit it, use the same flags and: cfq submit - < "),
        "{all}"
    );
    let kept = all.split_once("submit - < ").unwrap().1.split_whitespace().next().unwrap();
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "Write mul(a, b)\n");
    for (editor, words) in [
        ("true", "there is no description"),
        ("false", "the editor false ended with"),
        ("/nowhere/editor", "cannot be started: set EDITOR"),
    ] {
        let (_, rows) = Terminal::run(edit(editor.to_owned()), 100).wait_for_exit(WAIT_LIMIT).await;
        assert!(rows.join("\n").contains(words), "{}", rows.join("\n"));
    }
    assert_eq!(cluster.client.tasks(None, 100).await.unwrap().tasks.len(), 2);
    // As a firing does, a run uses the model that the agent has now.
    assert!(run(&cluster, &["agents", "set", "alpha", "openai:scripted/alpha2"]).status.success());
    assert_eq!(text(&run(&cluster, &["schedule", "run", "nightly"])), "t3 accepted\n");
    let detail = cluster.client.task(TaskKey::Number("t3".parse().unwrap())).await.unwrap();
    assert_eq!(detail.spec.agents.alpha.model.unwrap().as_str(), "openai:scripted/alpha2");
    cluster.finish().await;
}
