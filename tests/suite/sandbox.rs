//! Tests of the child processes that parse untrusted model files: files that exhaust memory or time harm only their
//! child, and a child has neither secrets nor rights.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cfq_engine::{ChatMessage, ChatRole, JobFailure, PromptRequest, PromptTokenizer, PromptTokens};
use cfq_inference_node::sandbox::{MAX_CONSECUTIVE_KILLS, Sandbox, SandboxError, SandboxLimits, SandboxedPrompts};
use cfq_proto::http::ModelRequest;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::{SMALL_MODEL, rejection};
use cfq_tests::{binary, signal, wait};
use serde_json::{Value, json};

/// How long a test waits for work that must end.
const PATIENCE: Duration = Duration::from_secs(60);
/// A list whose text has 1e24 characters.
const NESTED: &str = "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(80) %}{% set ns.x = [ns.x, ns.x] %}\
                      {% set ns.y = [ns.y, ns.y] %}{% endfor %}";
/// Ends the rendering unless the message is "bomb".
const UNLESS_BOMB: &str = "{% if messages[0].content != 'bomb' %}x{% else %}";

fn limits() -> SandboxLimits {
    SandboxLimits { memory_bytes: 1 << 30, start: Duration::from_secs(15), prompt: Duration::from_secs(15) }
}

fn sandbox(limits: SandboxLimits) -> Sandbox {
    let program = tokio::task::block_in_place(binary::cfq);
    Sandbox { program, args: ["serve", "sandbox"].map(OsString::from).to_vec(), limits }
}

/// A tiny model in the Hugging Face layout whose JSON file `name` is changed by `change`.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models/llama");
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(original).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, copy.path().join(from.file_name().unwrap())).unwrap();
    }
    let path = copy.path().join(name);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    copy
}

fn with_template(template: &str) -> tempfile::TempDir {
    changed("tokenizer_config.json", |config| config["chat_template"] = json!(template))
}

fn model() -> ModelId {
    "path:/some/model".parse().unwrap()
}

fn start(limits: SandboxLimits, folder: &tempfile::TempDir) -> SandboxedPrompts {
    sandbox(limits).start(&model(), folder.path()).unwrap().0
}

async fn tokenize(prompts: &SandboxedPrompts, content: &str) -> Result<PromptTokens, JobFailure> {
    let messages = vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }];
    let tokens =
        prompts.tokenize(PromptRequest { form: cfq_proto::job::PromptForm::Chat, messages, previous: String::new() });
    tokio::time::timeout(PATIENCE, tokens).await.expect("the prompt fails or succeeds")
}

fn process_file(pid: u32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

/// The value of a line of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> String {
    let status = process_file(pid, "status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("process {pid} has no {name}: {status:?}")).trim().to_owned()
}

async fn wait_until_gone(pid: u32) {
    // A zombie has a folder in /proc too.
    wait::until(&format!("the end of process {pid}"), PATIENCE, || async {
        let gone = !PathBuf::from(format!("/proc/{pid}")).exists();
        if gone { Ok(()) } else { Err(process_file(pid, "status")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn template_that_exhausts_memory_or_time_ends_only_its_child() {
    let long = "{% set a = 'ab' * 20000000 %}{% set b = 'ab' * 20000000 %}";
    let loops = "{% for i in range(99999) %}{% for j in range(9) %}";
    let templates = [
        ("~ of a nested list", format!("{NESTED}{{{{ (ns.x ~ '') | length }}}}")),
        ("== of nested lists", format!("{NESTED}{{{{ ns.x == ns.y }}}}")),
        ("== of long strings", format!("{long}{loops}{{% if a == b %}}{{% endif %}}{{% endfor %}}{{% endfor %}}")),
    ];
    let short = SandboxLimits { start: Duration::from_secs(5), ..limits() };
    for (name, template) in templates {
        let folder = with_template(&template);
        let error = sandbox(short).inspect(folder.path()).map(|_| ()).unwrap_err();
        assert!(matches!(error, SandboxError::Ended { .. } | SandboxError::OutOfTime { .. }), "{name}: {error}");
    }
    let facts = sandbox(limits()).inspect(with_template("{{ messages[0].content }}").path()).unwrap();
    assert_eq!((facts.architecture.as_str(), facts.several_turns), ("llama", true));
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_that_exhausts_memory_fails_alone_and_repeated_kills_end_the_model() {
    let template = format!("{UNLESS_BOMB}{NESTED}{{{{ (ns.x ~ '') | length }}}}{{% endif %}}");
    let folder = with_template(&template);
    let prompts = start(SandboxLimits { prompt: Duration::from_secs(3), ..limits() }, &folder);
    let first = prompts.child().unwrap();
    for _ in 1..MAX_CONSECUTIVE_KILLS {
        let Err(JobFailure::Engine { reason }) = tokenize(&prompts, "bomb").await else { panic!("no failure") };
        let killed = reason.contains("ended with signal") || reason.contains("longer than");
        assert!(reason.contains(model().as_str()) && killed, "{reason}");
    }
    assert_eq!(prompts.failure(), None);
    tokenize(&prompts, "a").await.unwrap();
    assert_ne!(prompts.child().unwrap(), first, "a new child has replaced the first one");
    for _ in 0..MAX_CONSECUTIVE_KILLS {
        tokenize(&prompts, "bomb").await.unwrap_err();
    }
    let failure = prompts.failure().expect("the model takes no more prompts");
    assert!(failure.contains("cfq models unload path:/some/model"), "{failure}");
    tokenize(&prompts, "a").await.unwrap_err();
    assert_eq!(prompts.child(), None, "and it has no child any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokenizer_that_exhausts_memory_or_time_ends_only_its_child() {
    // Each rule makes the text 64 times as long.
    let grows = changed("tokenizer.json", |tokenizer| {
        let rule = json!({ "type": "Replace", "pattern": { "String": "z" }, "content": "z".repeat(64) });
        tokenizer["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![rule; 6] });
    });
    let prompts = start(limits(), &grows);
    let Err(JobFailure::Engine { reason }) = tokenize(&prompts, "z").await else { panic!("no failure") };
    assert!(reason.contains("ended with signal") && reason.contains("1.0 GiB"), "{reason}");
    tokenize(&prompts, "a").await.unwrap();

    let slow = changed("tokenizer.json", |tokenizer| {
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({ "Regex": r"(?=[^\x00]*\x00)|[\s\S]" });
    });
    let prompts = start(SandboxLimits { prompt: Duration::from_secs(1), ..limits() }, &slow);
    let child = prompts.child();
    let Err(JobFailure::Engine { reason }) = tokenize(&prompts, &"a".repeat(1 << 20)).await else {
        panic!("no failure")
    };
    assert!(reason.contains("longer than 1 s"), "{reason}");
    tokenize(&prompts, "a").await.unwrap();
    assert_eq!(prompts.child(), child, "the child stopped by itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_that_ignores_its_time_limit_is_killed() {
    let template = format!("{UNLESS_BOMB}{NESTED}{{{{ ns.x == ns.y }}}}{{% endif %}}");
    let folder = with_template(&template);
    let prompts = Arc::new(start(SandboxLimits { prompt: Duration::from_secs(1), ..limits() }, &folder));
    let child = prompts.child().unwrap();
    let Err(JobFailure::Engine { reason }) = tokenize(&prompts, "bomb").await else { panic!("no failure") };
    assert!(reason.contains("longer than"), "{reason}");
    wait_until_gone(child).await;

    // A child is killed also if its prompt was cancelled.
    tokenize(&prompts, "a").await.unwrap();
    let child = prompts.child().unwrap();
    let cancelled = tokio::spawn({
        let prompts = prompts.clone();
        async move { tokenize(&prompts, "bomb").await.map(drop) }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    cancelled.abort();
    wait_until_gone(child).await;
    tokenize(&prompts, "a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_child_is_replaced_and_a_dropped_one_leaves_no_zombie() {
    let folder = with_template("{{ messages[0].content }}");
    let prompts = start(limits(), &folder);
    let killed = prompts.child().unwrap();
    signal::send(killed, libc::SIGKILL);
    let Err(JobFailure::Engine { reason }) = tokenize(&prompts, "a").await else { panic!("no failure") };
    assert!(reason.contains("signal 9"), "{reason}");
    wait_until_gone(killed).await;
    tokenize(&prompts, "a").await.unwrap();
    let child = prompts.child().unwrap();
    drop(prompts);
    wait_until_gone(child).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn child_has_no_secrets_and_no_rights() {
    let folder = with_template("{{ messages[0].content }}");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let prompts = start(limits(), &folder);
    let child = prompts.child().unwrap();
    let environment = process_file(child, "environ");
    let variables = environment.split('\0').filter(|variable| !variable.is_empty());
    assert!(variables.clone().all(|variable| variable.starts_with("LD_LIBRARY_PATH=")), "{environment:?}");
    assert!(!process_file(child, "cmdline").contains(folder.path().to_str().unwrap()));
    let limits = process_file(child, "limits");
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    for (name, value) in
        [("Max processes", "0"), ("Max file size", "0"), ("Max core file size", "0"), ("Max open files", "32")]
    {
        assert_eq!(limit(name), value, "{limits}");
    }
    let address_space: u64 = limit("Max address space").parse().unwrap();
    assert!((1 << 30..3 << 30).contains(&address_space), "{limits}");
    assert_eq!(process_file(child, "oom_score_adj").trim(), "1000");
    assert_eq!((status(child, "NoNewPrivs"), status(child, "Seccomp")), ("1".to_owned(), "2".to_owned()));
    if status(std::process::id(), "Uid").starts_with('0') {
        assert!(status(child, "Uid").starts_with("65534"), "{}", status(child, "Uid"));
        // The folder is private, so the child needs the capability to read it.
        assert_eq!(status(child, "CapEff"), "0000000000000004");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let prompts = start(self::limits(), &folder);
        let child = prompts.child().unwrap();
        for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            assert_eq!(status(child, set), "0000000000000000", "{set}");
        }
        tokenize(&prompts, "a").await.unwrap();
    }
    let open: Vec<String> = std::fs::read_dir(format!("/proc/{child}/fd"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(open.len(), 3, "stdin, stdout and stderr: {open:?}");
}

/// A model whose template creates a text of three gigabytes. Fuel is charged only after that.
fn large_model(folder: &Path) -> PathBuf {
    let template = "{% set text = 'a' * 1000000 %}{% set list = [text] * 3000 %}{{ (list ~ '') | length }}";
    let path = folder.join("hostile");
    std::fs::rename(with_template(template).keep(), &path).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn node_serves_another_model_while_a_hostile_one_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let hostile = large_model(home.path());
    let models = vec![SMALL_MODEL.parse().unwrap()];
    // The weight cache would keep the thread.
    let mut options = Options { models, alpha: SMALL_MODEL.into(), weight_cache_bytes: 0, ..Options::default() };
    options.timing.job_step_timeout_ms = 60_000;
    let cluster = Cluster::start_with(options).await;
    let node = cluster.pid("node");
    let peak_kb = || -> u64 { status(node, "VmHWM").trim_end_matches(" kB").parse().unwrap() };
    let before = peak_kb();

    cluster.models.script("beta", vec![rejection()]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(60);
    let task = cluster.submit(&spec).await;
    let output = cfq(&cluster, home.path(), &["models", "load", &format!("path:{}", hostile.display())]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let grown = peak_kb().saturating_sub(before) >> 10;
    assert!(grown < 512, "the node's memory grew by {grown} MiB");
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(hostile.to_str().unwrap()) && stderr.contains("cannot be read"), "{stderr}");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL_MODEL);
    let ledger = cluster.client.nodes().await.unwrap().remove(0).ledger;
    let unusable = ledger.models.iter().filter(|m| matches!(m.residency, Residency::Unusable { .. })).count();
    assert_eq!((unusable, cluster.pid("node")), (1, node));
    // The small model has one child, which ends with the model.
    assert_eq!(sandbox_threads(node), 1);
    assert!(cfq(&cluster, home.path(), &["models", "unload", SMALL_MODEL]).status.success());
    wait::until("the end of the child's thread", PATIENCE, || async move {
        let (threads, children) = (sandbox_threads(node), children(node));
        if (threads, children.len()) == (0, 0) { Ok(()) } else { Err(format!("{threads} threads, {children:?}")) }
    })
    .await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_child_ends_with_a_killed_node() {
    let folder = with_template(&format!("{NESTED}{{{{ ns.x == ns.y }}}}"));
    let cluster = Cluster::start().await;
    let node = cluster.pid("node");
    let model = format!("path:{}", folder.path().display()).parse().unwrap();
    cluster.client.load_model(&ModelRequest { model, node: None }).await.unwrap();
    let child = wait::until("the child that reads the file", PATIENCE, || async {
        let is_restricted = |pid: &u32| process_file(*pid, "status").contains("Seccomp:\t2");
        children(node).into_iter().find(is_restricted).ok_or_else(|| "no child".to_owned())
    })
    .await;
    cluster.kill9("node");
    wait_until_gone(child).await;
    cluster.finish().await;
}

/// Number of the node's threads that own a child.
fn sandbox_threads(node: u32) -> usize {
    let threads = std::fs::read_dir(format!("/proc/{node}/task")).unwrap().flatten();
    threads
        .filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|name| name.trim() == "sandbox"))
        .count()
}

/// Process ids of all children, including zombies.
fn children(node: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{node}/task")).unwrap().flatten();
    let listed = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    listed.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()).collect()
}
