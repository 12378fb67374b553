//! Tests of running out of memory: when a model is loaded, whether or not the estimate predicts it, and during a
//! generation. The model is refused with its estimate, or the node dies and is restarted; other tasks continue.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::node::Residency;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_test_skip::skip;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::small_model::{self, SMALL_MODEL, rejection};
use cfq_tests::{binary, wait};

fn add() -> Reply {
    Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))
}

#[track_caller]
fn assert_refused_with_estimate(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in ["does not fit", "are available: weights", "+ KV 2048 tokens", "memory_limit"] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// Asserts that a task with the small model fails because the model does not fit, and that another task is merged
/// meanwhile.
async fn assert_other_tasks_continue(cluster: &Cluster) {
    cluster.models.script("alpha", vec![add()]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let mut too_large = cluster.spec(&repo);
    too_large.agents.alpha.model = SMALL_MODEL.parse().ok();
    let too_large = cluster.submit(&too_large).await;
    let task = cluster.submit(&cluster.spec(&other)).await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged);
    cluster.run_oracle(task, &other).await;
    let detail = cluster.wait_until_settled(too_large).await;
    assert!(detail.reason.contains("does not fit"), "{}", detail.reason);
    // No node accepts the job, so it fails at the retry ceiling.
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
}

#[tokio::test(flavor = "multi_thread")]
async fn model_over_the_memory_limit_is_refused_with_its_estimate() {
    let cluster = Cluster::start_with(Options { memory_limit: Some(200 << 20), ..Options::default() }).await;
    let home = tempfile::tempdir().unwrap();
    tokio::task::spawn_blocking(small_model::file).await.unwrap();
    assert_refused_with_estimate(&cfq(&cluster, home.path(), &["models", "load", SMALL_MODEL]));
    assert_other_tasks_continue(&cluster).await;
    cluster.finish().await;
}

/// Mapped address space of a process, in bytes.
fn mapped(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The memory limit is set for the process and not in the node's configuration, so the node must read it from the
/// operating system.
#[tokio::test(flavor = "multi_thread")]
async fn process_memory_limit_is_found_before_an_allocation_fails() {
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    tokio::task::spawn_blocking(small_model::file).await.unwrap();
    cluster.limit_address_space(mapped(cluster.pid("node")) + (300 << 20));
    let before = cluster.client.nodes().await.unwrap()[0].boot;
    cluster.kill9("node");
    cluster.start_service("node");
    wait::until("the node's next start", WAIT_LIMIT, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        if node.boot != before && node.alive { Ok(()) } else { Err(format!("{node:?}")) }
    })
    .await;
    assert_refused_with_estimate(&cfq(&cluster, home.path(), &["models", "load", SMALL_MODEL]));
    assert_other_tasks_continue(&cluster).await;
    cluster.finish().await;
}

fn spec(repo: &UserRepo) -> TaskSpec {
    serde_json::from_value(serde_json::json!({
        "description": "Write add(a, b) in add.py.", "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit, "max_iterations": 1,
    }))
    .unwrap()
}

async fn node_until(api: &Client, up: &Up, what: &str, is: impl Fn(&NodeView) -> bool) -> NodeView {
    wait::until(what, WAIT_LIMIT, || async {
        let node = api.nodes().await.map_err(|e| e.to_string())?.pop().ok_or("no node yet")?;
        if is(&node) { Ok(node) } else { Err(format!("{node:?}\n{}", up.diagnostics())) }
    })
    .await
}

async fn wait_until_settled(api: &Client, up: &Up, task: TaskKey) -> cfq_proto::http::TaskDetail {
    wait::until("the task to end or wait for a human", WAIT_LIMIT, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        if detail.summary.state.is_settled() {
            Ok(detail)
        } else {
            Err(format!("{:?}\n{}", detail.jobs, up.diagnostics()))
        }
    })
    .await
}

/// A configuration with the small model's file as Alpha's model, and a separate model folder.
async fn home_with(model: &Path) -> Home {
    let home = Home::new().await;
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    let text = text.replace("openai:s/alpha", &format!("path:{}", model.display()));
    let text = text.replace("[timing]\n", "[timing]\njob_step_timeout_ms = 60000\n");
    let node = format!("[node]\nmodel_dir = {:?}\nweight_cache_bytes = 0\n", home.path("models").display().to_string());
    std::fs::write(home.path("cfq.toml"), text + &node).unwrap();
    home
}

fn resident(node: &NodeView) -> bool {
    node.alive && node.ledger.models.iter().all(|m| m.residency == Residency::Resident)
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Prevents a process from mapping further memory. The error says why the limit cannot be set. A program of the same
/// account sets it, because root needs a capability for processes of other accounts, which containers lack.
fn forbid_further_mappings(pid: u64) -> Result<(), String> {
    let failed = |error: String| format!("cannot limit another process: {error}");
    let account = std::fs::metadata(format!("/proc/{pid}")).map_err(|error| failed(error.to_string()))?;
    let mut prlimit = Command::new("prlimit");
    prlimit.arg(format!("--pid={pid}")).arg("--as=1048576:unlimited").current_dir("/");
    if is_root() {
        prlimit.uid(account.uid()).gid(account.gid());
    }
    let output = prlimit.output().map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn out_of_memory_during_generation_restarts_the_node_and_the_job() {
    let home = home_with(&tokio::task::spawn_blocking(small_model::file).await.unwrap()).await;
    home.models.script("beta", vec![rejection()]);
    let data = home.path("data");
    // With these variables the allocator maps large blocks each time, instead of reusing freed memory or a thread's
    // arena.
    let mut through = Command::new(tokio::task::block_in_place(binary::cfq));
    through.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_ARENA_MAX", "1");
    let up = Up::start(&home, Some(through), &data, data.clone());
    let api = up.client().await;
    let first = node_until(&api, &up, "the model", resident).await;
    let repo = UserRepo::with_uncommitted_changes();
    let pidfile = std::fs::read_to_string(data.join("run/node.pid")).unwrap();
    let pidfile: serde_json::Value = serde_json::from_str(&pidfile).unwrap();
    let pid = pidfile["pid"].as_u64().unwrap_or_else(|| panic!("{pidfile}"));
    let mut spec = spec(&repo);
    // The generation is long enough to set the limit while it runs.
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    spec.agents.alpha.max_tokens = Some(500);
    let task = TaskKey::Id(api.submit(&spec, None).await.unwrap().id);
    node_until(&api, &up, "the model to generate", |node| node.ledger.models.iter().any(|m| m.running > 0)).await;
    wait::until("the job to run", WAIT_LIMIT, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        let running = detail.jobs.iter().any(|job| job.state == JobState::Running);
        if running { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
    })
    .await;
    // The next step has to map memory for its attention scores, and cannot.
    if let Err(reason) = forbid_further_mappings(pid) {
        return skip("out_of_memory_during_generation_restarts_the_node_and_the_job", &reason);
    }
    let second = node_until(&api, &up, "the node's next start", |node| node.boot != first.boot && node.alive).await;
    assert_ne!(first.boot, second.boot);
    let log = std::fs::read_to_string(data.join("log/node.log")).unwrap();
    assert!(log.contains("memory allocation of"), "the node died for another reason:\n{}", up.diagnostics());
    let detail = wait_until_settled(&api, &up, task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 1, "{}", detail.reason);
    assert_eq!(
        (detail.jobs[0].attempt, detail.jobs[0].losses, detail.jobs[0].failures),
        (2, 1, 0),
        "{:?}",
        detail.jobs
    );
    assert!(up.terminate().await.success());
}

/// The node's process dies whenever it loads one model. After two attempts the node must start without loading that
/// model.
#[tokio::test(flavor = "multi_thread")]
async fn model_whose_load_kills_the_node_is_not_retried_endlessly() {
    let model = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    let home = home_with(&model).await;
    home.models.script("beta", vec![add(), Reply::Text(review(95, &[]))]);
    let data = home.path("data");
    let mut through = Command::new(tokio::task::block_in_place(binary::cfq));
    through.env("CFQ_FAILPOINT", "node.loading");
    let up = Up::start(&home, Some(through), &data, data.clone());
    let api = up.client().await;
    let unusable = |node: &NodeView| {
        node.ledger.models.iter().find_map(|m| match &m.residency {
            Residency::Unusable { reason } => Some(reason.clone()),
            Residency::Resident | Residency::Available | Residency::Loading => None,
        })
    };
    let node = node_until(&api, &up, "a node that stays up", |node| unusable(node).is_some()).await;
    let reason = unusable(&node).unwrap();
    assert!(reason.contains("ended the node the last 2 times") && reason.contains("cfq models load"), "{reason}");
    let log = std::fs::read_to_string(data.join("log/node.log")).unwrap();
    assert_eq!(log.matches("aborting at an armed failpoint").count(), 2);
    // The node stays up, and its other model serves.
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = spec(&repo);
    spec.agents.alpha.model = "openai:s/beta".parse().ok();
    let task = TaskKey::Id(api.submit(&spec, None).await.unwrap().id);
    assert_eq!(wait_until_settled(&api, &up, task).await.summary.state, TaskState::Merged);
    assert_eq!(api.nodes().await.unwrap()[0].boot, node.boot);
    assert!(up.stop().await.success());
}
