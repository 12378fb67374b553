//! The private engines for real: started, killed in every way that happens, and looked at from outside.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test's helpers may fail it too")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::ConnectOptions;
use cfq_deploy::engines::{Kind, Origin};
use cfq_deploy::nats::NatsFacts;
use cfq_deploy::postgres::PostgresFacts;
use cfq_deploy::stack::Facts;
use cfq_deploy::{DataLock, EngineOptions, Options, Paths, Preference, Stack, StackError, Talk, doctor};
use cfq_link::child::{ProcessIdentity, Signal};
use cfq_proto::ids::NodeId;
use cfq_proto::subject::{self, Identity};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

/// A data folder of its own. The cache is the real one, so that engines are fetched once.
struct Lab {
    folder: tempfile::TempDir,
    paths: Paths,
}

impl Lab {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let cache = Paths::from_environment().unwrap().cache;
        let paths = Paths { data: folder.path().join("data"), cache, config: folder.path().join("config") };
        Self { folder, paths }
    }

    async fn start(&self) -> Stack {
        Stack::start(&self.paths, options()).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
    }
}

fn node() -> Identity {
    Identity::Node(NodeId::new("den").unwrap())
}

fn options() -> Options {
    Options { identities: vec![node()], talk: Talk::Stderr, ..Options::default() }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

async fn connect(facts: &PostgresFacts) -> Result<PgConnection, sqlx::Error> {
    let password = std::fs::read_to_string(&facts.password_file).unwrap();
    PgConnection::connect_with(&database(facts).password(&password)).await
}

fn database(facts: &PostgresFacts) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(&facts.host)
        .port(facts.port)
        .username(&facts.user)
        .database(&facts.database)
}

async fn join(facts: &NatsFacts, identity: &Identity) -> async_nats::Client {
    let seed = std::fs::read_to_string(facts.seed_file(identity)).unwrap();
    ConnectOptions::with_nkey(seed)
        .custom_inbox_prefix(identity.inbox_prefix())
        .max_reconnects(1)
        .connect(&facts.url)
        .await
        .unwrap()
}

async fn remember(facts: &PostgresFacts) {
    let mut connection = connect(facts).await.unwrap();
    sqlx::query("CREATE TABLE IF NOT EXISTS memory (n int)").execute(&mut connection).await.unwrap();
    sqlx::query("INSERT INTO memory VALUES (1)").execute(&mut connection).await.unwrap();
}

async fn remembered(facts: &PostgresFacts) -> i64 {
    let mut connection = connect(facts).await.unwrap();
    sqlx::query_scalar("SELECT count(*) FROM memory").fetch_one(&mut connection).await.unwrap()
}

fn running(paths: &Paths, name: &str) -> ProcessIdentity {
    let text = std::fs::read_to_string(paths.pidfile(name)).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let identity = ProcessIdentity {
        pid: record["pid"].as_u64().unwrap().try_into().unwrap(),
        started: record["started"].as_str().unwrap().to_owned(),
    };
    assert!(identity.is_alive(), "{name}");
    identity
}

#[tokio::test(flavor = "multi_thread")]
async fn first_start_second_start_and_what_stays() {
    let lab = Lab::new();
    // What an initdb killed half way leaves.
    std::fs::create_dir_all(lab.paths.data.join("postgres.new/data/base")).unwrap();
    std::fs::write(lab.paths.data.join("postgres.new/data/PG_VERSION"), "15\n").unwrap();
    let clock = Instant::now();
    let stack = lab.start().await;
    eprintln!("first start {:?}: {:?}", clock.elapsed(), stack.facts().engines);
    let facts = stack.facts().clone();
    remember(&facts.postgres).await;
    assert!(!lab.paths.data.join("postgres.new").exists());
    let clock = Instant::now();
    stack.stop().await.unwrap();
    eprintln!("stop {:?}", clock.elapsed());
    assert_eq!(std::fs::read_dir(lab.paths.run()).unwrap().count(), 0, "no pidfile is left");
    let clock = Instant::now();
    let stack = lab.start().await;
    let second = clock.elapsed();
    eprintln!("second start {second:?}");
    assert!(second < Duration::from_secs(10), "{second:?}");
    assert_eq!(stack.facts(), &facts, "the same places and the same port");
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_gets_in_without_a_secret() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let facts = stack.facts();
    for options in [database(&facts.postgres), database(&facts.postgres).password("guess")] {
        assert!(PgConnection::connect_with(&options).await.is_err());
        assert!(PgConnection::connect_with(&options.username("postgres").database("postgres")).await.is_err());
    }
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&facts.postgres.host), 0o700);
    assert_eq!(mode(&facts.postgres.password_file), 0o600);
    assert_eq!(mode(&facts.nats.seed_file(&node())), 0o600);
    assert!(ConnectOptions::new().max_reconnects(1).connect(&facts.nats.url).await.is_err());
    let stranger = nkeys::KeyPair::new_user().seed().unwrap();
    assert!(ConnectOptions::with_nkey(stranger).max_reconnects(1).connect(&facts.nats.url).await.is_err());
    let mut connection = connect(&facts.postgres).await.unwrap();
    let tcp: String = sqlx::query_scalar("SELECT setting FROM pg_settings WHERE name = 'listen_addresses'")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(tcp, "");
    let admin: bool = sqlx::query_scalar("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(!admin);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_speaks_and_hears_only_as_itself() {
    use futures::StreamExt;
    let lab = Lab::new();
    let stack = lab.start().await;
    let nats = &stack.facts().nats;
    let scheduler = join(nats, &Identity::Scheduler).await;
    let mut heard = scheduler.subscribe("cfq.v1.>").await.unwrap();
    scheduler.flush().await.unwrap();
    let client = join(nats, &node()).await;
    let other = NodeId::new("attic").unwrap();
    for forbidden in [subject::node(&other, "beat"), "cfq.v1.cmd.node.den".into(), "$JS.API.STREAM.CREATE.X".into()] {
        client.publish(forbidden, "forged".into()).await.unwrap();
    }
    let me = NodeId::new("den").unwrap();
    client.publish(subject::node(&me, "beat"), "mine".into()).await.unwrap();
    client.flush().await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(10), heard.next()).await.unwrap().unwrap();
    assert_eq!(&first.payload[..], b"mine", "the forged ones came before it and were dropped");
    let streams = async_nats::jetstream::new(scheduler.clone());
    let config = async_nats::jetstream::stream::Config {
        name: subject::WORK_STREAM.into(),
        subjects: vec![subject::WORK_ALL.into()],
        ..Default::default()
    };
    streams.create_stream(config).await.unwrap();
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_engine_is_started_again_at_the_same_place() {
    let lab = Lab::new();
    let mut stack = lab.start().await;
    let facts = stack.facts().clone();
    remember(&facts.postgres).await;
    for (name, kind) in [("postgres", Kind::Postgres), ("nats", Kind::Nats)] {
        assert!(running(&lab.paths, name).signal(Signal::Kill).unwrap());
        let restarted = tokio::time::timeout(Duration::from_secs(60), stack.tend()).await.unwrap().unwrap();
        assert_eq!((restarted.kind, restarted.attempt), (kind, 1));
    }
    assert_eq!(remembered(&facts.postgres).await, 1);
    join(&facts.nats, &node()).await;
    stack.stop().await.unwrap();
}

/// Not a test by itself: the process that `a_killed_supervisor_leaves_nothing_in_the_way` kills.
#[tokio::test(flavor = "multi_thread")]
async fn supervisor_process() {
    let Some(data) = std::env::var_os("CFQ_TEST_SUPERVISE").map(PathBuf::from) else { return };
    let cache = Paths::from_environment().unwrap().cache;
    let paths = Paths { config: data.with_file_name("config"), data, cache };
    let stack = Stack::start(&paths, options()).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    remember(&stack.facts().postgres).await;
    let ready = paths.data.join("ready");
    std::fs::write(ready.with_extension("part"), serde_json::to_vec(stack.facts()).unwrap()).unwrap();
    std::fs::rename(ready.with_extension("part"), &ready).unwrap();
    std::future::pending::<()>().await;
}

async fn supervisor(lab: &Lab) -> (std::process::Child, Facts) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "supervisor_process", "--nocapture"])
        .env("CFQ_TEST_SUPERVISE", &lab.paths.data)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ready = lab.paths.data.join("ready");
    let wait = async {
        while !ready.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), wait).await.unwrap();
    (child, serde_json::from_slice(&std::fs::read(ready).unwrap()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_start_is_told_who_is_there() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let error = Stack::start(&lab.paths, options()).await.unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, StackError::Lock(_)), "{said}");
    assert!(said.contains(&format!("process {}", child.id())) && said.contains("supervisor_process"), "{said}");
    assert_eq!(DataLock::holder(&lab.paths).unwrap().process.pid, child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(DataLock::holder(&lab.paths), None);
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_supervisor_leaves_nothing_in_the_way() {
    let lab = Lab::new();
    let (mut child, facts) = supervisor(&lab).await;
    let engines = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    // Suspended, they cannot act on the parent-death signal: what a machine too busy to run them looks like.
    for engine in &engines {
        let stopped = Command::new("kill").args(["-STOP", &engine.pid.to_string()]).status().unwrap();
        assert!(stopped.success());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(engines.iter().all(ProcessIdentity::is_alive), "there is something to reclaim");
    let stack = lab.start().await;
    assert!(!engines.iter().any(ProcessIdentity::is_alive));
    assert_eq!(stack.facts(), &facts);
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_of_a_killed_supervisor_end_by_themselves() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let engines = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    child.kill().unwrap();
    child.wait().unwrap();
    for engine in engines {
        assert!(engine.ended(Duration::from_secs(30)).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_without_a_pidfile_are_found_too() {
    let lab = Lab::new();
    let (mut child, facts) = supervisor(&lab).await;
    let engines = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    for engine in &engines {
        assert!(Command::new("kill").args(["-STOP", &engine.pid.to_string()]).status().unwrap().success());
    }
    for name in ["postgres", "nats"] {
        std::fs::remove_file(lab.paths.pidfile(name)).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(engines.iter().all(ProcessIdentity::is_alive), "there is something to find");
    let stack = lab.start().await;
    assert!(!engines.iter().any(ProcessIdentity::is_alive));
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

/// The machine lost its power, and after the boot the id in Postgres's own lock file belongs to somebody else.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_postgres_that_names_a_stranger_is_removed() {
    let lab = Lab::new();
    lab.start().await.stop().await.unwrap();
    let stranger = std::process::id();
    let lock = format!("{stranger}\n{}\n1\n5432\n\n\n        1         1\n", lab.paths.postgres().display());
    std::fs::write(lab.paths.postgres().join("postmaster.pid"), lock).unwrap();
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_port_taken_meanwhile_is_replaced_and_a_fixed_one_refused() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let url = stack.facts().nats.url.clone();
    stack.stop().await.unwrap();
    let port: u16 = url.rsplit(':').next().unwrap().parse().unwrap();
    let taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let stack = lab.start().await;
    assert_ne!(stack.facts().nats.url, url);
    stack.stop().await.unwrap();
    let error = Stack::start(&lab.paths, Options { nats_port: Some(port), ..options() }).await.unwrap_err();
    assert!(chain(&error).contains(&format!("port {port} on 127.0.0.1 is in use")), "{}", chain(&error));
    drop(taken);
    let fixed = Stack::start(&lab.paths, Options { nats_port: Some(port), ..options() }).await.unwrap();
    assert_eq!(fixed.facts().nats.url, url);
    fixed.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deep_data_folder_and_fetched_engines_work() {
    let lab = Lab::new();
    let data = lab.folder.path().join("deep, and with a \"name\"").join("x".repeat(100)).join("data");
    let paths = Paths { data, ..lab.paths.clone() };
    let engines = EngineOptions { source: Preference::Fetched, ..EngineOptions::default() };
    let stack = Stack::start(&paths, Options { engines, ..options() })
        .await
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let facts = stack.facts().clone();
    assert!(facts.engines.iter().all(|engine| engine.origin == Origin::Fetched), "{:?}", facts.engines);
    assert!(facts.postgres.host.as_os_str().len() < 100);
    remember(&facts.postgres).await;
    stack.stop().await.unwrap();
    std::fs::remove_dir_all(&facts.postgres.host).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_sees_what_runs_and_what_is_weakened() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let find = |checks: &[doctor::Check], name: &str| checks.iter().find(|check| check.name == name).unwrap().clone();
    let checks = doctor::checks(&lab.paths, &EngineOptions::default()).await;
    for name in [
        "postgres fsync",
        "postgres full_page_writes",
        "postgres synchronous_commit",
        "postgres data_checksums",
        "nats port",
        "keys",
    ] {
        assert_eq!(find(&checks, name).status, doctor::Status::Ok, "{checks:?}");
    }
    assert!(find(&checks, "running").what.contains(&std::process::id().to_string()));
    let mut connection = connect(&stack.facts().postgres).await.unwrap();
    sqlx::query("ALTER ROLE cfq SET synchronous_commit = off").execute(&mut connection).await.unwrap();
    let checks = doctor::checks(&lab.paths, &EngineOptions::default()).await;
    let weakened = find(&checks, "postgres synchronous_commit");
    assert_eq!(weakened.status, doctor::Status::Fail);
    assert!(weakened.next_step.is_some());
    stack.stop().await.unwrap();
    let checks = doctor::checks(&lab.paths, &EngineOptions::default()).await;
    assert_eq!(find(&checks, "running").what, "nothing runs on this data folder");
    serde_json::to_string(&checks).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_major_is_refused_with_the_way_out() {
    let lab = Lab::new();
    std::fs::create_dir_all(lab.paths.postgres()).unwrap();
    std::fs::write(lab.paths.postgres().join("PG_VERSION"), "12\n").unwrap();
    let said = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(
        said.contains("made by Postgres 12") && said.contains("--postgres-bin DIR") && said.contains("CFQ_DATA=DIR"),
        "{said}"
    );
    assert_eq!(std::fs::read_dir(lab.paths.postgres()).unwrap().count(), 1, "nothing is touched");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_the_way_of_the_data_folder_is_named() {
    let lab = Lab::new();
    std::fs::write(&lab.paths.data, "").unwrap();
    let said = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(said.contains("a file stands where a folder is needed") && said.contains("/data"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn under_root_a_closed_folder_above_the_data_is_named() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root runs the engines as another user");
        return;
    }
    let lab = Lab::new();
    let closed = lab.folder.path().canonicalize().unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
    let said = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(said.contains(&format!("chmod o+x {}", closed.display())), "{said}");
}
