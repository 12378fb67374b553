//! Tests of `cfq backup` and `cfq restore`: the backup of a running server is restored into a new data folder, where its
//! tasks continue. What cannot be restored is refused, and leaves nothing behind.

use std::path::Path;
use std::process::Output;

use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;

fn cfq(home: &Home, data: &Path, args: &[&str]) -> Output {
    let mut command = home.cfq(None, data, args);
    // A folder of its own, with the Postgres that is downloaded once per machine.
    let (cache, shared) = (home.path("cache"), cfq_tests::postgres::user_paths().services());
    if !cache.exists() {
        std::fs::create_dir(&cache).unwrap();
        std::os::unix::fs::symlink(&shared, cache.join("engines")).unwrap();
    }
    command.env("CFQ_CACHE", cache);
    tokio::task::block_in_place(|| command.output().unwrap())
}

/// Asserts that a command ended with this exit code, and that stdout and stderr together contain these texts.
#[track_caller]
fn assert_ends(output: &Output, code: i32, texts: &[&str]) {
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{text}");
    for expected in texts {
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
}

async fn submit(client: &Client, repo: &UserRepo, name: &str) -> TaskKey {
    let spec: TaskSpec = serde_json::from_value(serde_json::json!({
        "description": format!("Write {name}."), "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit,
    }))
    .unwrap();
    TaskKey::Id(client.submit(&spec, None).await.unwrap().id)
}

async fn wait_until_merged(client: &Client, task: TaskKey, up: &Up) -> TaskDetail {
    wait::until("the task to be merged", WAIT_LIMIT, || async {
        let detail = client.task(task).await.map_err(|e| e.to_string())?;
        let is_merged = detail.summary.state == TaskState::Merged;
        if is_merged { Ok(detail) } else { Err(format!("{:?}\n{}", detail.summary, up.diagnostics())) }
    })
    .await
}

/// Names in the folder that begin like the temporary files of a backup or a restore.
fn leftovers(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(".cfq-")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_server_continues_the_tasks_of_the_backup() {
    let home = Home::new().await;
    let gate = Gate::closed();
    let text = |name: &str| file(&format!("{name}.py"), &format!("def {name}():\n    return 1"));
    let gated = Reply::Gated(text("second")[..20].to_owned(), text("second")[20..].to_owned(), gate.clone());
    home.models.script("alpha", vec![Reply::Text(text("first")), gated]);
    home.models.script("beta", vec![Reply::Text(review(95, &[])), Reply::Text(review(95, &[]))]);
    let (old, new, file) = (home.path("old"), home.path("new"), home.path("backup.tar.zst"));
    let (first_repo, second_repo) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());

    let up = Up::start(&home, None, &old, old.clone());
    let client = up.client().await;
    let first = submit(&client, &first_repo, "first").await;
    let before = wait_until_merged(&client, first, &up).await;
    let second = submit(&client, &second_repo, "second").await;
    wait::until("the second task to generate", WAIT_LIMIT, || async {
        if home.models.call_count("alpha") == 2 { Ok(()) } else { Err("it does not".to_owned()) }
    })
    .await;
    let events = client.events(first, 0).await.unwrap();

    let output = cfq(&home, &old, &["--json", "backup", file.to_str().unwrap()]);
    assert_ends(&output, 0, &[]);
    let written: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(written["tasks"], 2, "{written}");
    let token = std::fs::read_to_string(old.join("keys/api.token")).unwrap();

    // The machine is lost: nothing of its data folder can be used.
    drop(up);
    std::fs::rename(&old, home.path("lost")).unwrap();
    assert_ends(&cfq(&home, &new, &["restore", file.to_str().unwrap()]), 0, &["2 tasks", "cfq up"]);
    assert!(leftovers(home.dir.path()).is_empty());
    let up = Up::start(&home, None, &new, new.clone());
    let client = up.client().await;
    assert_eq!(std::fs::read_to_string(new.join("keys/api.token")).unwrap(), token);

    let after = client.task(first).await.unwrap();
    assert_eq!(after.summary, before.summary);
    assert_eq!(client.events(first, 0).await.unwrap(), events);
    gate.open();
    let after = wait_until_merged(&client, second, &up).await;
    assert!(after.jobs.iter().all(|job| job.losses == 0 && job.failures == 0), "{:?}", after.jobs);
    assert_eq!(home.models.call_count("alpha"), 3, "the call of the second task is made again, and no other");
    for (repo, name) in [(&first_repo, "first.py"), (&second_repo, "second.py")] {
        let branches: Vec<String> = repo.branches().into_iter().filter(|branch| branch.starts_with("cfq/")).collect();
        assert_eq!(branches.len(), 1, "{branches:?}");
        assert!(repo.show(&branches[0], name).is_some(), "{name} in {branches:?}");
    }
    up.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_backed_up_or_restored_is_refused_and_leaves_nothing() {
    let home = Home::new().await;
    let (data, new, file) = (home.path("data"), home.path("new"), home.path("backup.tar.zst"));
    let path = file.to_str().unwrap();
    assert_ends(&cfq(&home, &data, &["backup", path]), 2, &["has no database", "cfq up"]);
    assert_ends(&cfq(&home, &data, &["restore", path]), 4, &["cannot read", path]);
    let mut of_another_server = home.cfq(None, &data, &["backup", path]);
    of_another_server.env("CFQ_URL", "http://127.0.0.1:1");
    let refused = tokio::task::block_in_place(|| of_another_server.output().unwrap());
    assert_ends(&refused, 2, &["CFQ_URL is http://127.0.0.1:1", "unset CFQ_URL"]);
    let up = Up::start(&home, None, &data, data.clone());
    up.client().await;
    up.stop().await;

    // A server that does not run is backed up, too.
    assert_ends(&cfq(&home, &data, &["backup", path]), 0, &["0 tasks", "keys"]);
    assert_ends(&cfq(&home, &data, &["backup", path]), 2, &["exists already"]);
    assert_ends(&cfq(&home, &data, &["backup", "/nowhere/backup"]), 4, &["cannot write the backup /nowhere/backup"]);
    assert_ends(&cfq(&home, &data, &["restore", path]), 2, &["is not empty", "--data"]);
    assert_ends(&cfq(&home, &new, &["restore", "--check", path]), 0, &["can be restored", "0 tasks"]);
    assert!(leftovers(&home.path("cache")).is_empty());

    let whole = std::fs::read(&file).unwrap();
    let damaged = home.path("damaged");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for content in [&whole[..whole.len() - 10], &whole[..whole.len() / 2], b"", b"a text", &flipped] {
        std::fs::write(&damaged, content).unwrap();
        let refused = cfq(&home, &new, &["restore", damaged.to_str().unwrap()]);
        assert_ends(&refused, 4, &["not a complete backup", damaged.to_str().unwrap()]);
    }
    assert!(!new.exists());
    // An empty folder is not in the way.
    std::fs::create_dir(&new).unwrap();
    assert_ends(&cfq(&home, &new, &["restore", path]), 0, &["0 tasks"]);
    assert!(leftovers(home.dir.path()).is_empty());
}
