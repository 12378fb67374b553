//! Memory runs out: at the load of a model, where that is known before and where it is not, and in the middle of a
//! generation. The model is refused with the sum, or the node dies and is started again; the queue goes on.

use std::path::Path;
use std::process::{Command, Output};

use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::node::Residency;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, Options, PATIENCE, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::small::{self, SMALL};
use cfq_tests::up::{Home, Up};
use cfq_tests::{binary, wait};

fn add() -> Reply {
    Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))
}

#[track_caller]
fn refused_with_the_sum(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in ["does not fit", "are available: weights", "+ KV 2048 tokens", "memory_limit"] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// The small model is refused by the node, the task that wants it too, and another task is done beside it.
async fn the_queue_goes_on(cluster: &Cluster) {
    cluster.models.script("alpha", vec![add()]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let mut wanting = cluster.spec(&repo);
    wanting.agents.alpha.model = SMALL.parse().ok();
    let wanting = cluster.submit(&wanting).await;
    let task = cluster.submit(&cluster.spec(&other)).await;
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Merged);
    cluster.oracle(task, &other).await;
    let detail = cluster.rests(wanting).await;
    assert!(detail.reason.contains("does not fit"), "{}", detail.reason);
    assert!(matches!(detail.summary.state, TaskState::Failed | TaskState::Escalated), "{}", detail.summary.state);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_beyond_the_limit_is_refused_with_the_sum_and_so_is_its_task() {
    let cluster = Cluster::with(Options { memory_limit: Some(200 << 20), ..Options::default() }).await;
    let home = tempfile::tempdir().unwrap();
    tokio::task::spawn_blocking(small::file).await.unwrap();
    refused_with_the_sum(&cfq(&cluster, home.path(), &["models", "load", SMALL]));
    the_queue_goes_on(&cluster).await;
    cluster.finish().await;
}

fn mapped(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// A limit that the node was not told of: it finds it by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_on_the_process_is_found_before_an_allocation_fails() {
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    tokio::task::spawn_blocking(small::file).await.unwrap();
    cluster.limit_address_space(mapped(cluster.pid("node")) + (300 << 20));
    let before = cluster.client.nodes().await.unwrap()[0].boot;
    cluster.kill9("node");
    cluster.start_service("node");
    wait::until("the node's next start", PATIENCE, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        if node.boot != before && node.alive { Ok(()) } else { Err(format!("{node:?}")) }
    })
    .await;
    refused_with_the_sum(&cfq(&cluster, home.path(), &["models", "load", SMALL]));
    the_queue_goes_on(&cluster).await;
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
    wait::until(what, PATIENCE, || async {
        let node = api.nodes().await.map_err(|e| e.to_string())?.pop().ok_or("no node yet")?;
        if is(&node) { Ok(node) } else { Err(format!("{node:?}\n{}", up.story())) }
    })
    .await
}

async fn rests(api: &Client, up: &Up, task: TaskKey) -> cfq_proto::http::TaskDetail {
    wait::until("the task to rest", PATIENCE, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        if detail.summary.state.is_resting() { Ok(detail) } else { Err(format!("{:?}\n{}", detail.jobs, up.story())) }
    })
    .await
}

/// `cfq up` with the small model's file as Alpha's, and a model folder of its own.
async fn home_with(model: &Path) -> Home {
    let home = Home::new().await;
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    let text = text.replace("openai:s/alpha", &format!("path:{}", model.display()));
    let text = text.replace("[timing]\n", "[timing]\njob_step_ms = 60000\n");
    let node = format!("[node]\nmodel_dir = {:?}\nparked_weights = 0\n", home.path("models").display().to_string());
    std::fs::write(home.path("cfq.toml"), text + &node).unwrap();
    home
}

fn resident(node: &NodeView) -> bool {
    node.alive && node.ledger.models.iter().all(|m| m.residency == Residency::Resident)
}

/// Whether the limit could be set.
fn nothing_more_is_mapped(pid: u64) -> bool {
    #[cfg(target_os = "linux")]
    {
        let all = libc::rlimit { rlim_cur: 1 << 20, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a plain system call on a process of this test's.
        #[allow(unsafe_code)]
        let done = unsafe { libc::prlimit(pid as libc::pid_t, libc::RLIMIT_AS, &all, std::ptr::null_mut()) };
        done == 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        eprintln!("process {pid}: only Linux has prlimit");
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_runs_out_of_memory_in_the_middle_is_started_again_and_its_job_goes_on() {
    let home = home_with(&tokio::task::spawn_blocking(small::file).await.unwrap()).await;
    home.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let data = home.path("data");
    // Large pieces of memory are mapped anew each time, and not taken from what an earlier use left over or from what the
    // allocator reserved for a thread.
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
    // A long answer, so that there is a middle.
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    spec.agents.alpha.max_tokens = Some(500);
    let task = TaskKey::Id(api.submit(&spec, None).await.unwrap().id);
    node_until(&api, &up, "the model to write", |node| node.ledger.models.iter().any(|m| m.running > 0)).await;
    wait::until("the job to run", PATIENCE, || async {
        let detail = api.task(task).await.map_err(|e| e.to_string())?;
        let running = detail.jobs.iter().any(|job| job.state == JobState::Running);
        if running { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
    })
    .await;
    // From now on nothing more can be mapped, as the next step's scores have to be.
    if !nothing_more_is_mapped(pid) {
        eprintln!("skipped: this machine does not let a limit be set on another process");
        return;
    }
    let second = node_until(&api, &up, "the node's next start", |node| node.boot != first.boot && node.alive).await;
    assert_ne!(first.boot, second.boot);
    let log = std::fs::read_to_string(data.join("log/node.log")).unwrap();
    assert!(log.contains("memory allocation of"), "it died of something else:\n{}", up.story());
    let detail = rests(&api, &up, task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations.len(), 1, "{}", detail.reason);
    assert_eq!(
        (detail.jobs[0].attempt, detail.jobs[0].losses, detail.jobs[0].failures),
        (2, 1, 0),
        "{:?}",
        detail.jobs
    );
    assert!(up.ends().await.success());
}

/// The kernel ends the process in the middle of a load, at every start: after two the node stays up without that model.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_load_ends_the_node_is_not_tried_for_ever() {
    let model = tokio::task::spawn_blocking(small::file).await.unwrap();
    let home = home_with(&model).await;
    home.models.script("beta", vec![add(), Reply::Text(review(95, &[]))]);
    let data = home.path("data");
    let mut through = Command::new(tokio::task::block_in_place(binary::cfq));
    through.env("CFQ_FAILPOINT", "node.loading");
    let up = Up::start(&home, Some(through), &data, data.clone());
    let api = up.client().await;
    let refused = |node: &NodeView| {
        node.ledger.models.iter().find_map(|m| match &m.residency {
            Residency::Unusable { reason } => Some(reason.clone()),
            Residency::Resident | Residency::Available | Residency::Loading => None,
        })
    };
    let node = node_until(&api, &up, "a node that lives", |node| refused(node).is_some()).await;
    let reason = refused(&node).unwrap();
    assert!(reason.contains("ended the node the last 2 times") && reason.contains("cfq models load"), "{reason}");
    let log = std::fs::read_to_string(data.join("log/node.log")).unwrap();
    assert_eq!(log.matches("aborting at an armed failpoint").count(), 2);
    // It stays up, and its other model serves.
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = spec(&repo);
    spec.agents.alpha.model = "openai:s/beta".parse().ok();
    let task = TaskKey::Id(api.submit(&spec, None).await.unwrap().id);
    assert_eq!(rests(&api, &up, task).await.summary.state, TaskState::Merged);
    assert_eq!(api.nodes().await.unwrap()[0].boot, node.boot);
    assert!(up.stop().await.success());
}
