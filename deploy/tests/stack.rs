//! Tests of the private Postgres and NATS with the real servers: they are started, killed in every way that occurs in
//! practice, and inspected from outside.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of a test may fail it too")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::ConnectOptions;
use cfq_deploy::nats::NatsFacts;
use cfq_deploy::postgres::PostgresFacts;
use cfq_deploy::services::{ServiceKind, ServiceOrigin};
use cfq_deploy::stack::Facts;
use cfq_deploy::{
    DataLock, Paths, ServiceOptions, ServiceSource, Stack, StackError, StackOptions, StatusOutput, doctor,
};
use cfq_link::child::{ProcessIdentity, Signal};
use cfq_proto::ids::NodeId;
use cfq_proto::subject::{self, Identity};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

/// Test environment with its own data folder. The cache folder is the user's, so that the services are fetched only
/// once.
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

fn options() -> StackOptions {
    StackOptions { identities: vec![node()], status: StatusOutput::Stderr, ..StackOptions::default() }
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
async fn restart_keeps_data_addresses_and_port() {
    let lab = Lab::new();
    // Create the folder that an interrupted initdb leaves.
    std::fs::create_dir_all(lab.paths.data.join("postgres.new/data/base")).unwrap();
    std::fs::write(lab.paths.data.join("postgres.new/data/PG_VERSION"), "15\n").unwrap();
    let clock = Instant::now();
    let stack = lab.start().await;
    eprintln!("first start {:?}: {:?}", clock.elapsed(), stack.facts().programs);
    let facts = stack.facts().clone();
    remember(&facts.postgres).await;
    assert!(!lab.paths.data.join("postgres.new").exists());
    let clock = Instant::now();
    stack.stop().await.unwrap();
    eprintln!("stop {:?}", clock.elapsed());
    assert_eq!(std::fs::read_dir(lab.paths.run()).unwrap().count(), 0, "no pidfile remains");
    let clock = Instant::now();
    let stack = lab.start().await;
    let second = clock.elapsed();
    eprintln!("second start {second:?}");
    assert!(second < Duration::from_secs(10), "{second:?}");
    assert_eq!(stack.facts(), &facts, "same folders and same port");
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_without_credentials_are_refused() {
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
async fn node_grants_cover_only_its_own_subjects() {
    use futures::StreamExt;
    let lab = Lab::new();
    let stack = lab.start().await;
    let nats = &stack.facts().nats;
    let scheduler = join(nats, &Identity::Scheduler).await;
    let mut heard = scheduler.subscribe("cfq.v1.>").await.unwrap();
    scheduler.flush().await.unwrap();
    let client = join(nats, &node()).await;
    let other = NodeId::new("attic").unwrap();
    let other_heartbeat = subject::node(&other, "heartbeat");
    let forbidden = [other_heartbeat, "cfq.v1.cmd.node.den".into(), "$JS.API.STREAM.CREATE.X".into()];
    for forbidden in forbidden {
        client.publish(forbidden, "forged".into()).await.unwrap();
    }
    let me = NodeId::new("den").unwrap();
    client.publish(subject::node(&me, "heartbeat"), "mine".into()).await.unwrap();
    client.flush().await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(10), heard.next()).await.unwrap().unwrap();
    assert_eq!(&first.payload[..], b"mine", "the forged messages were sent first and dropped");
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
async fn killed_service_restarts_at_the_same_address() {
    let lab = Lab::new();
    let mut stack = lab.start().await;
    let facts = stack.facts().clone();
    remember(&facts.postgres).await;
    for (name, kind) in [("postgres", ServiceKind::Postgres), ("nats", ServiceKind::Nats)] {
        assert!(running(&lab.paths, name).signal(Signal::Kill).unwrap());
        let restarted = tokio::time::timeout(Duration::from_secs(60), stack.supervise()).await.unwrap().unwrap();
        assert_eq!((restarted.kind, restarted.attempt), (kind, 1));
    }
    assert_eq!(remembered(&facts.postgres).await, 1);
    join(&facts.nats, &node()).await;
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "the process that other tests start and kill"]
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
        .args(["--exact", "supervisor_process", "--ignored", "--nocapture"])
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
async fn second_start_reports_the_lock_holder() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let error = Stack::start(&lab.paths, options()).await.unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, StackError::Lock(_)), "{message}");
    let process = format!("process {}", child.id());
    assert!(message.contains(&process) && message.contains("supervisor_process"), "{message}");
    assert_eq!(DataLock::holder(&lab.paths).unwrap().process.pid, child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(DataLock::holder(&lab.paths), None);
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn start_reclaims_services_of_a_killed_supervisor() {
    let lab = Lab::new();
    let (mut child, facts) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    // While suspended, the services cannot act on the parent-death signal, as on a machine that is too busy to run
    // them.
    for service in &services {
        let stopped = Command::new("kill").args(["-STOP", &service.pid.to_string()]).status().unwrap();
        assert!(stopped.success());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(services.iter().all(ProcessIdentity::is_alive), "the services outlive the supervisor");
    let stack = lab.start().await;
    assert!(!services.iter().any(ProcessIdentity::is_alive));
    assert_eq!(stack.facts(), &facts);
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn services_exit_after_their_supervisor_is_killed() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    child.kill().unwrap();
    child.wait().unwrap();
    for service in services {
        assert!(service.ended(Duration::from_secs(30)).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn services_without_pidfiles_are_found_and_stopped() {
    let lab = Lab::new();
    let (mut child, facts) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    for service in &services {
        assert!(Command::new("kill").args(["-STOP", &service.pid.to_string()]).status().unwrap().success());
    }
    for name in ["postgres", "nats"] {
        std::fs::remove_file(lab.paths.pidfile(name)).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(services.iter().all(ProcessIdentity::is_alive), "the services outlive the supervisor");
    let stack = lab.start().await;
    assert!(!services.iter().any(ProcessIdentity::is_alive));
    assert_eq!(remembered(&facts.postgres).await, 1);
    stack.stop().await.unwrap();
}

/// After a power failure and a reboot, the process id in Postgres's lock file may belong to another process.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_lock_file_of_another_process_is_removed() {
    let lab = Lab::new();
    lab.start().await.stop().await.unwrap();
    let other_process = std::process::id();
    let lock = format!("{other_process}\n{}\n1\n5432\n\n\n        1         1\n", lab.paths.postgres().display());
    std::fs::write(lab.paths.postgres().join("postmaster.pid"), lock).unwrap();
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn taken_stored_port_is_replaced_and_taken_fixed_port_is_refused() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let url = stack.facts().nats.url.clone();
    stack.stop().await.unwrap();
    let port: u16 = url.rsplit(':').next().unwrap().parse().unwrap();
    let taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let stack = lab.start().await;
    assert_ne!(stack.facts().nats.url, url);
    stack.stop().await.unwrap();
    let error = Stack::start(&lab.paths, StackOptions { nats_port: Some(port), ..options() }).await.unwrap_err();
    assert!(chain(&error).contains(&format!("port {port} on 127.0.0.1 is in use")), "{}", chain(&error));
    drop(taken);
    let fixed = Stack::start(&lab.paths, StackOptions { nats_port: Some(port), ..options() }).await.unwrap();
    assert_eq!(fixed.facts().nats.url, url);
    fixed.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fetched_services_run_in_a_deep_data_folder() {
    let lab = Lab::new();
    let data = lab.folder.path().join("deep, and with a \"name\"").join("x".repeat(100)).join("data");
    let paths = Paths { data, ..lab.paths.clone() };
    let services = ServiceOptions { source: ServiceSource::Fetched, ..ServiceOptions::default() };
    let stack = Stack::start(&paths, StackOptions { services, ..options() })
        .await
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let facts = stack.facts().clone();
    let fetched = facts.programs.iter().all(|program| program.origin == ServiceOrigin::Fetched);
    assert!(fetched, "{:?}", facts.programs);
    assert!(facts.postgres.host.as_os_str().len() < 100);
    remember(&facts.postgres).await;
    stack.stop().await.unwrap();
    std::fs::remove_dir_all(&facts.postgres.host).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_running_services_and_weakened_settings() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let find = |checks: &[doctor::Check], name: &str| checks.iter().find(|check| check.name == name).unwrap().clone();
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
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
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
    let weakened = find(&checks, "postgres synchronous_commit");
    assert_eq!(weakened.status, doctor::Status::Fail);
    assert!(weakened.next_step.is_some());
    stack.stop().await.unwrap();
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
    assert_eq!(find(&checks, "running").what, "cfq is not running on this data folder");
    serde_json::to_string(&checks).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_postgres_major_is_refused_with_next_steps() {
    let lab = Lab::new();
    std::fs::create_dir_all(lab.paths.postgres()).unwrap();
    std::fs::write(lab.paths.postgres().join("PG_VERSION"), "12\n").unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    for part in ["made by Postgres 12", "--postgres-bin DIR", "CFQ_DATA=DIR"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(std::fs::read_dir(lab.paths.postgres()).unwrap().count(), 1, "nothing was changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn file_in_place_of_the_data_folder_is_reported() {
    let lab = Lab::new();
    std::fs::write(&lab.paths.data, "").unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(message.contains("a file exists where a folder is needed") && message.contains("/data"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_parent_folder_is_reported_under_root() {
    if !rustix::process::geteuid().is_root() {
        let reason = "only root runs Postgres and NATS as another user";
        return cfq_test_skip::skip("closed_parent_folder_is_reported_under_root", reason);
    }
    let lab = Lab::new();
    let closed = lab.folder.path().canonicalize().unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(message.contains(&format!("chmod o+x {}", closed.display())), "{message}");
}
