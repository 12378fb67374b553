//! Tests of `cfq up` and `cfq demo`: private Postgres and NATS, kill -9 of all processes, one `cfq up` per data folder,
//! a result in a branch, and no process left running.

mod background;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use cfq_proto::client::Client;
use cfq_proto::http::{PrFilter, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cli_json;
use cfq_tests::cluster::{WAIT_LIMIT, kill_with_parent, tail};
use cfq_tests::fake_gpus::{FakeGpus, rtx_3060};
use cfq_tests::hub::{Fault, HubServer};
use cfq_tests::oracle::assert_state_follows_review;
use cfq_tests::repo::{Fingerprint, UserRepo};
use cfq_tests::scripted::{ModelServer, Reply, file, review};
use cfq_tests::{binary, nats, signal, wait};

/// A temporary folder with a configuration. On drop, every process that still uses it is killed.
struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new(config: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("cfq-up-").tempdir().unwrap();
        nats::make_traversable(dir.path());
        std::fs::write(dir.path().join("cfq.toml"), config).unwrap();
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A `cfq` command with the data folder `data` below this folder.
    fn command(&self, data: &str, args: &[&str]) -> Command {
        let mut command = Command::new(binary::cfq());
        command.arg("--config").arg(self.path().join("cfq.toml")).arg("--data").arg(self.path().join(data)).args(args);
        command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN").stdin(Stdio::null());
        command
    }

    fn run(&self, data: &str, args: &[&str]) -> Output {
        tokio::task::block_in_place(|| self.command(data, args).output().unwrap())
    }

    #[track_caller]
    fn succeeds(&self, data: &str, args: &[&str]) -> String {
        let output = self.run(data, args);
        assert!(output.status.success(), "{args:?}: {output:?}; {}", tail(&self.path().join(data).join("log/up.log")));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts `cfq up` in the foreground.
    fn up(&self) -> Child {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path().join("up.log")).unwrap();
        let mut command = self.command("data", &["up", "--bind", &cfq_tests::cluster::free_address().to_string()]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        kill_with_parent(&mut command);
        command.spawn().unwrap()
    }

    async fn client(&self) -> Client {
        let data = self.path().join("data");
        wait::until("cfq up to be ready", WAIT_LIMIT, || async {
            let text = std::fs::read_to_string(data.join("run/server.json"))
                .map_err(|e| format!("{e}: {}", tail(&self.path().join("up.log"))))?;
            let server: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            let token = std::fs::read_to_string(data.join("keys/api.token")).map_err(|e| e.to_string())?;
            let http = cfq_link::outbound::api_client().unwrap();
            let client = Client::new(http, server["url"].as_str().unwrap(), token.trim());
            client.check_ready().await.map_err(|e| e.to_string())?;
            Ok(client)
        })
        .await
    }

    /// Id and command line of each process whose command line contains this folder's path.
    fn processes(&self) -> Vec<(i32, String)> {
        let needle = self.path().to_str().unwrap();
        let named = |entry: std::fs::DirEntry| {
            let pid: i32 = entry.file_name().to_string_lossy().parse().ok()?;
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(needle).then_some((pid, line))
        };
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(named).collect()
    }

    fn kill_all_processes(&self) {
        for (pid, _) in self.processes() {
            kill9(pid);
        }
    }

    async fn assert_no_process_left(&self) {
        wait::until("no process to be left", Duration::from_secs(10), || async {
            let left = self.processes();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }
}

impl Drop for TestFolder {
    /// Kills the processes, because a background server of a failed test would keep running.
    fn drop(&mut self) {
        self.kill_all_processes();
    }
}

fn kill9(pid: i32) {
    // SAFETY: a plain system call on a process that this test started.
    #[allow(unsafe_code)]
    unsafe {
        libc::kill(pid, libc::SIGKILL);
    }
}

/// A configuration with scripted models for both agents, and with short leases, so that a lost lease expires soon.
fn scripted_config(models: &ModelServer) -> String {
    format!(
        "[agents.alpha]\nmodel = \"openai:s/alpha\"\n[agents.beta]\nmodel = \"openai:s/beta\"\n[endpoints.s]\n\
         url = \"{}\"\nmax_sequences = 2\n[timing]\nlease_ttl_ms = 1500\nlease_margin_ms = 300\n\
         heartbeat_ms = 400\nsweep_ms = 200\npoll_ms = 200\n",
        models.url()
    )
}

/// `cfq up` with a task whose creator is generating.
struct RunningTask {
    base: TestFolder,
    repo: UserRepo,
    before: Fingerprint,
    // Keeps the scripted models running.
    _models: ModelServer,
    up: Child,
    api: Client,
    spec: TaskSpec,
    task: TaskKey,
}

impl RunningTask {
    async fn start(alpha: Reply) -> Self {
        let models = ModelServer::start().await;
        models.script("alpha", vec![alpha]);
        models.script("beta", vec![Reply::Text(review(95, &[]))]);
        let base = TestFolder::new(&scripted_config(&models));
        let repo = UserRepo::with_uncommitted_changes();
        let before = repo.fingerprint();
        let up = base.up();
        let api = base.client().await;
        let spec = serde_json::from_value(serde_json::json!({
            "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(), "base": before.commit,
        }))
        .unwrap();
        let task = TaskKey::Id(api.submit(&spec, Some("k")).await.unwrap().id);
        wait::until("a call to the model", WAIT_LIMIT, || async {
            if models.call_count("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
        })
        .await;
        Self { base, repo, before, _models: models, up, api, spec, task }
    }

    /// Waits until the task ends and asserts that it is merged: one task, one pull request, one commit on one branch,
    /// and the user's repository otherwise unchanged.
    async fn assert_merged_once(&self) -> TaskDetail {
        let detail = wait::until("the task to end", WAIT_LIMIT, || async {
            let detail = self.api.task(self.task).await.map_err(|e| e.to_string())?;
            if detail.summary.state.is_settled() { Ok(detail) } else { Err(format!("{:?}", detail.summary)) }
        })
        .await;
        assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
        let again = self.api.submit(&self.spec, Some("k")).await.unwrap();
        assert_eq!(again.id, detail.summary.id, "the accepted task exists once");
        assert_eq!(self.api.prs(&PrFilter { limit: 10, ..PrFilter::default() }).await.unwrap().prs.len(), 1);
        let branch = detail.delivered_branch.as_deref().unwrap();
        assert_eq!(self.repo.history(branch, &self.before.commit).len(), 1);
        assert_eq!(self.repo.fingerprint(), self.before);
        detail
    }

    async fn stop(mut self) {
        self.base.succeeds("data", &["down"]);
        assert!(self.up.wait().unwrap().success(), "{}", tail(&self.base.path().join("up.log")));
        self.base.assert_no_process_left().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn task_finishes_after_kill_9_of_everything_and_restart() {
    let slow = Duration::from_millis(30);
    let mut run = RunningTask::start(Reply::Slow(file("add.py", "def add(a, b):\n    return a + b"), slow)).await;

    // A second `cfq up` on the same folder reports the process that uses it.
    let second = run.base.run("data", &["up"]);
    let stderr = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        second.status.code() == Some(2) && stderr.contains("in use by") && stderr.contains(&run.up.id().to_string()),
        "{stderr}"
    );

    run.up.kill().unwrap();
    run.up.wait().unwrap();
    run.base.kill_all_processes();

    // With the files of the dead server, a client reports that no server answers.
    let output = run.base.run("data", &["ls"]);
    assert_eq!(output.status.code(), Some(5), "{output:?}");

    run.up = run.base.up();
    run.api = run.base.client().await;
    run.assert_merged_once().await;
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_postgres_is_restarted_without_loss() {
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(60)));
    let run = RunningTask::start(Reply::Slow(long, Duration::from_millis(40))).await;
    let postmaster = std::fs::read_to_string(run.base.path().join("data/postgres/postmaster.pid")).unwrap();
    kill9(postmaster.lines().next().unwrap().trim().parse().unwrap());
    let detail = run.assert_merged_once().await;
    assert!(detail.jobs.iter().all(|j| j.failures == 0), "{:?}", detail.jobs);
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_during_a_model_download_keeps_partial_data() {
    let server = HubServer::start().await;
    server.commit("maker/tiny", &[("tiny.gguf", &[0; 300_000])]);
    server.inject_faults(&[Fault::HangAfter(200_000)]);
    let base = TestFolder::new("");
    let config = format!(
        "[agents.alpha]\nmodel = \"hf:maker/tiny:tiny.gguf\"\n[node]\nmodel_dir = {:?}\n[hub]\nendpoint = \"http://{}\"\n",
        base.path().join("models"),
        server.addr
    );
    std::fs::write(base.path().join("cfq.toml"), config).unwrap();
    let mut child = base.up();
    let listed = || -> serde_json::Value {
        let listed: serde_json::Value =
            serde_json::from_str(&base.succeeds("data", &["--json", "models", "ls"])).unwrap();
        let serde_json::Value::Array(models) = &listed["models"] else { panic!("{listed}") };
        models.iter().find(|model| model["model"] == "hf:maker/tiny:tiny.gguf").cloned().unwrap_or_default()
    };
    // What the server has sent may still be on its way.
    wait::until("two thirds of the file to be written", WAIT_LIMIT, || async {
        let model = listed();
        if model["fetched_bytes"] == 200_000 { Ok(()) } else { Err(model.to_string()) }
    })
    .await;
    signal::send(child.id(), libc::SIGINT);
    let status = wait::until("cfq up to end", WAIT_LIMIT, || {
        let done = child.try_wait().unwrap();
        async move { done.ok_or_else(|| "still running".to_owned()) }
    })
    .await;
    let log = std::fs::read_to_string(base.path().join("up.log")).unwrap();
    assert_eq!(status.code(), Some(130), "{log}");
    assert!(log.contains("fetched files are kept"), "{log}");
    let model = listed();
    let fetched_bytes = model["fetched_bytes"].as_u64();
    assert_eq!((model["state"].as_str(), fetched_bytes), (Some("unfinished"), Some(200_000)), "{model}");
    base.assert_no_process_left().await;
}

/// Tests the first of the two commands in the README, without a configuration and with the real small model.
#[tokio::test(flavor = "multi_thread")]
async fn demo_delivers_a_branch_and_leaves_readable_data() {
    let base = TestFolder::new("");
    let mut demo = base.command("data", &["demo"]);
    kill_with_parent(&mut demo);
    let output = tokio::task::block_in_place(|| demo.output().unwrap());
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(base.processes(), [], "no process is left when the demo ends");
    assert!(!stdout.contains('\x1b') && !stderr.contains('\x1b'), "escapes without a terminal: {stdout:?} {stderr:?}");

    // The printed `git diff` command names a branch that exists and differs from HEAD.
    let hint = stdout.lines().find_map(|line| line.trim().strip_prefix("view it:"));
    let hint = hint.unwrap_or_else(|| panic!("{:?}\n{stdout}\n{stderr}", output.status));
    let words: Vec<&str> = hint.split_whitespace().collect();
    let ["git", "-C", repo, "diff", range] = words[..] else { panic!("{hint}") };
    let branch = range.strip_prefix("HEAD...").unwrap();
    assert!(branch.starts_with("cfq/t1-"), "{hint}");
    let repo = git2::Repository::open(repo).unwrap();
    let head = repo.head().unwrap().peel_to_tree().unwrap();
    let made = repo.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_tree().unwrap();
    let diff = repo.diff_tree_to_tree(Some(&head), Some(&made), None).unwrap();
    assert!(diff.stats().unwrap().insertions() > 0, "{stdout}");
    assert!(repo.statuses(None).unwrap().is_empty(), "the sample's working tree is unchanged");

    // The demo's data folder can be opened with `cfq up`.
    base.succeeds("data/demo", &["up", "-d", "--bind", "127.0.0.1:0"]);
    let detail: TaskDetail = cli_json::parse(&base.succeeds("data/demo", &["--json", "show", "t1"]));
    assert_state_follows_review(&detail);
    // Two exit codes are valid, because a real model decides: 0 if the task is merged, 3 if it is escalated.
    let code = if detail.summary.state == TaskState::Merged { 0 } else { 3 };
    assert_eq!(output.status.code(), Some(code), "{}\n{stdout}\n{stderr}", detail.reason);
    assert!(base.succeeds("data/demo", &["diff", "t1"]).contains("+def "));
    base.succeeds("data/demo", &["down"]);
    base.assert_no_process_left().await;
}
