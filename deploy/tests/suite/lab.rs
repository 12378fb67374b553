//! Test environment: a data folder of its own, connections to its servers, and its processes.

use std::os::unix::fs::PermissionsExt;

use async_nats::ConnectOptions;
use cfq_deploy::nats::NatsAddress;
use cfq_deploy::postgres::PostgresAddress;
use cfq_deploy::{Paths, Stack, StackOptions, StatusOutput};
use cfq_link::child::ProcessIdentity;
use cfq_proto::ids::NodeId;
use cfq_proto::subject::Identity;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

/// Test environment with its own data folder. The cache folder is the user's, so that the services are fetched only
/// once.
pub struct Lab {
    pub folder: tempfile::TempDir,
    pub paths: Paths,
}

impl Lab {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let cache = Paths::from_environment().unwrap().cache;
        let paths = Paths { data: folder.path().join("data"), cache, config: folder.path().join("config") };
        Self { folder, paths }
    }

    pub async fn start(&self) -> Stack {
        Stack::start(&self.paths, options()).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
    }
}

pub fn node() -> Identity {
    Identity::Node(NodeId::new("den").unwrap())
}

pub fn options() -> StackOptions {
    StackOptions { identities: vec![node()], status: StatusOutput::Stderr, ..StackOptions::default() }
}

/// Message of an error, followed by the messages of its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

pub async fn connect(address: &PostgresAddress) -> Result<PgConnection, sqlx::Error> {
    let password = std::fs::read_to_string(&address.password_file).unwrap();
    PgConnection::connect_with(&database(address).password(&password)).await
}

pub fn database(address: &PostgresAddress) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(&address.host)
        .port(address.port)
        .username(&address.user)
        .database(&address.database)
}

/// Connects to NATS with the key of `identity`.
pub async fn join(address: &NatsAddress, identity: &Identity) -> async_nats::Client {
    let seed = std::fs::read_to_string(address.seed_file(identity)).unwrap();
    ConnectOptions::with_nkey(seed)
        .custom_inbox_prefix(identity.inbox_prefix())
        .max_reconnects(1)
        .connect(&address.url)
        .await
        .unwrap()
}

/// Inserts one row that [`remembered`] counts.
pub async fn remember(address: &PostgresAddress) {
    let mut connection = connect(address).await.unwrap();
    sqlx::query("CREATE TABLE IF NOT EXISTS memory (n int)").execute(&mut connection).await.unwrap();
    sqlx::query("INSERT INTO memory VALUES (1)").execute(&mut connection).await.unwrap();
}

pub async fn remembered(address: &PostgresAddress) -> i64 {
    let mut connection = connect(address).await.unwrap();
    sqlx::query_scalar("SELECT count(*) FROM memory").fetch_one(&mut connection).await.unwrap()
}

/// Returns the process that the pidfile `name` refers to, which must be alive.
pub fn running(paths: &Paths, name: &str) -> ProcessIdentity {
    let text = std::fs::read_to_string(paths.pidfile(name)).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let identity = ProcessIdentity {
        pid: record["pid"].as_u64().unwrap().try_into().unwrap(),
        started: record["started"].as_str().unwrap().to_owned(),
    };
    assert!(identity.is_alive(), "{name}");
    identity
}
