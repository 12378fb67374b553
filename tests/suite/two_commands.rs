//! `cfq up` itself: private engines, kill -9 of the whole of it, one holder a folder, and nothing left running.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{PATIENCE, die_with_parent, tail};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{ModelServer, Reply, file, review};
use cfq_tests::{binary, nats, wait};

fn write_config(dir: &Path, models: &ModelServer) {
    let text = format!(
        "[agents.alpha]\nmodel = \"openai:s/alpha\"\n[agents.beta]\nmodel = \"openai:s/beta\"\n[endpoints.s]\nurl = \"{}\"\n\
         max_sequences = 2\n[timing]\nlease_ttl_ms = 1500\nlease_margin_ms = 300\nbeat_ms = 400\nsweep_ms = 200\npoll_ms = 200\n",
        models.url()
    );
    std::fs::write(dir.join("cfq.toml"), text).unwrap();
}

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(binary::cfq());
    command.arg("--config").arg(dir.join("cfq.toml")).arg("--data").arg(dir.join("data")).args(args);
    command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN").stdin(Stdio::null());
    command
}

fn up(dir: &Path) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join("up.log")).unwrap();
    let mut command = command(dir, &["up", "--bind", &cfq_tests::cluster::free_address().to_string()]);
    command.stdout(log.try_clone().unwrap()).stderr(log);
    die_with_parent(&mut command);
    command.spawn().unwrap()
}

async fn client(dir: &Path) -> cfq_proto::client::Client {
    let file = dir.join("data/run/server.json");
    wait::until("cfq up to be ready", PATIENCE, || async {
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{e}: {}", tail(&dir.join("up.log"))))?;
        let server: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        let token = std::fs::read_to_string(dir.join("data/keys/api.token")).map_err(|e| e.to_string())?;
        let http = cfq_link::outbound::api_client().unwrap();
        let client = cfq_proto::client::Client::new(http, server["url"].as_str().unwrap(), token.trim());
        client.ready().await.map_err(|e| e.to_string())?;
        Ok(client)
    })
    .await
}

/// Processes whose command line names this folder.
fn processes(dir: &Path) -> Vec<String> {
    let needle = dir.to_str().unwrap();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        if !entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(needle) {
            found.push(line);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_of_everything_in_the_middle_then_up_again_finishes_the_task() {
    let dir = tempfile::Builder::new().prefix("cfq-up-").tempdir().unwrap();
    nats::open_to_all(dir.path());
    let models = ModelServer::start().await;
    let slow = Duration::from_millis(30);
    models.script("alpha", vec![Reply::Slow(file("add.py", "def add(a, b):\n    return a + b"), slow)]);
    models.script("beta", vec![Reply::Text(review(95, &[]))]);
    write_config(dir.path(), &models);
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();

    let mut first = up(dir.path());
    let api = client(dir.path()).await;
    let spec = serde_json::from_value(serde_json::json!({
        "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(), "base": before.commit,
    }))
    .unwrap();
    let reply = api.submit(&spec, Some("k")).await.unwrap();
    wait::until("a call to the model", PATIENCE, || async {
        if models.calls("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;

    // A second one on the same folder is told who holds it.
    let second = command(dir.path(), &["up"]).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        second.status.code() == Some(2) && said.contains("in use by") && said.contains(&first.id().to_string()),
        "{said}"
    );

    first.kill().unwrap();
    first.wait().unwrap();
    for pid in pids(dir.path()) {
        // SAFETY: plain system calls on processes this test started.
        #[allow(unsafe_code)]
        unsafe {
            libc::kill(pid, libc::SIGKILL);
        }
    }

    // What the dead server left behind does not mislead: nothing answers there.
    let asked = command(dir.path(), &["ls"]).output().unwrap();
    assert_eq!(asked.status.code(), Some(5), "{asked:?}");

    let mut again = up(dir.path());
    let api = client(dir.path()).await;
    let task = TaskKey::Id(reply.id);
    let detail = wait::until("the task to end", PATIENCE, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        if detail.summary.state.is_resting() { Ok(detail) } else { Err(format!("{:?}", detail.summary)) }
    })
    .await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(api.submit(&spec, Some("k")).await.unwrap().id, reply.id, "still one task");
    assert_eq!(api.prs().await.unwrap().len(), 1);
    assert_eq!(repo.commits_since(&detail.delivered_branch.unwrap(), &before.commit), 1);
    assert_eq!(repo.fingerprint(), before);

    let down = command(dir.path(), &["down"]).output().unwrap();
    assert!(down.status.success(), "{down:?}");
    assert!(again.wait().unwrap().success(), "{}", tail(&dir.path().join("up.log")));
    wait::until("no process to be left", Duration::from_secs(10), || async {
        let left = processes(dir.path());
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_killed_in_the_middle_comes_back_and_nothing_is_lost() {
    let dir = tempfile::Builder::new().prefix("cfq-pg-").tempdir().unwrap();
    nats::open_to_all(dir.path());
    let models = ModelServer::start().await;
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(60)));
    models.script("alpha", vec![Reply::Slow(long, Duration::from_millis(40))]);
    models.script("beta", vec![Reply::Text(review(95, &[]))]);
    write_config(dir.path(), &models);
    let repo = UserRepo::with_uncommitted_changes();
    let base = repo.fingerprint().commit;

    let mut up = up(dir.path());
    let api = client(dir.path()).await;
    let spec = serde_json::from_value(serde_json::json!({
        "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(), "base": base,
    }))
    .unwrap();
    let reply = api.submit(&spec, Some("k")).await.unwrap();
    wait::until("a call to the model", PATIENCE, || async {
        if models.calls("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;
    let data = dir.path().join("data/postgres");
    let postmaster = std::fs::read_to_string(data.join("postmaster.pid")).unwrap();
    let pid: i32 = postmaster.lines().next().unwrap().trim().parse().unwrap();
    // SAFETY: a plain system call on the server that this test's cfq started.
    #[allow(unsafe_code)]
    unsafe {
        libc::kill(pid, libc::SIGKILL);
    }
    let task = TaskKey::Id(reply.id);
    let detail = wait::until("the task to end", PATIENCE, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        if detail.summary.state.is_resting() { Ok(detail) } else { Err(format!("{:?}", detail.summary)) }
    })
    .await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(api.submit(&spec, Some("k")).await.unwrap().id, reply.id, "the acknowledged task is still there, once");
    assert_eq!(api.prs().await.unwrap().len(), 1);
    assert_eq!(repo.commits_since(&detail.delivered_branch.unwrap(), &base), 1);
    assert!(detail.jobs.iter().all(|j| j.failures == 0), "{:?}", detail.jobs);

    let down = command(dir.path(), &["down"]).output().unwrap();
    assert!(down.status.success(), "{down:?}");
    assert!(up.wait().unwrap().success(), "{}", tail(&dir.path().join("up.log")));
}

fn pids(dir: &Path) -> Vec<i32> {
    let needle = dir.to_str().unwrap();
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| {
            let pid: i32 = e.file_name().to_string_lossy().parse().ok()?;
            let line = std::fs::read(e.path().join("cmdline")).ok()?;
            String::from_utf8_lossy(&line).contains(needle).then_some(pid)
        })
        .collect()
}
