//! The Postgres server that all tests of a run share, started at first use. Every cluster gets a separate database,
//! copied from a migrated template to which nothing connects. A test that injects faults into Postgres itself gets a
//! dedicated server, on a copy of a data folder with a migrated database; this folder is created once per run.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cfq_deploy::postgres::{Postgres, PostgresAddress};
use cfq_deploy::services::{Finder, ServiceKind, ServiceProgram};
use cfq_deploy::{Paths, ServiceOptions, StatusOutput, account};
use cfq_link::child::Process;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use tokio::sync::OnceCell;

/// Maximum number of connections to the server: enough for as many clusters at a time as a machine with many cores runs.
const MAX_CONNECTIONS: u32 = 2_000;
const TEMPLATE: &str = "cfq_template";
/// Maximum wait until a killed process has ended. The wait is short, except on a loaded machine.
const EXIT_LIMIT: Duration = Duration::from_secs(20);

struct Shared {
    address: PostgresAddress,
    // The kernel kills the process when the run ends (parent-death signal); the next run removes the folder.
    _process: Process,
}

/// The user's own cfq folders. Postgres, NATS and models are downloaded to the cache folder there, once per machine
/// instead of once per test run.
pub fn user_paths() -> Paths {
    Paths::from_environment().unwrap()
}

async fn shared() -> &'static Shared {
    static SHARED: OnceCell<Shared> = OnceCell::const_new();
    SHARED
        .get_or_init(|| async {
            let (postgres, process) = start(&scratch().join("shared")).await;
            let address = postgres.address();
            let mut admin = connect(&address, &address.database).await;
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {TEMPLATE}"))).execute(&mut admin).await.unwrap();
            cfq_scheduler::migrate(&config(&address, TEMPLATE)).await.unwrap();
            Shared { address, _process: process }
        })
        .await
}

/// The Postgres or NATS program that tests use: the one installed on the machine, else a downloaded one.
pub async fn find_service(kind: ServiceKind) -> ServiceProgram {
    let find = move || {
        let (paths, options) = (user_paths(), ServiceOptions::default());
        let account = account::for_services(None, StatusOutput::Silent).unwrap();
        Finder {
            paths: &paths,
            options: &options,
            account,
            pinned: None,
            may_fetch: true,
            status: StatusOutput::Stderr,
        }
        .find(kind)
        .unwrap()
    };
    tokio::task::spawn_blocking(find).await.unwrap()
}

/// Starts Postgres on this cfq data folder, which is created if it does not exist.
async fn start(data: &Path) -> (Postgres, Process) {
    let account = account::for_services(None, StatusOutput::Silent).unwrap();
    let paths = Paths { data: data.to_owned(), ..user_paths() };
    paths.prepare(account).unwrap();
    let program = find_service(ServiceKind::Postgres).await;
    let mut postgres = Postgres::prepare(&paths, &program, account).await.unwrap();
    postgres.set_max_connections(MAX_CONNECTIONS);
    let process = postgres.start().await.unwrap();
    (postgres, process)
}

/// Creates the temporary folder of this test run, and removes those of runs that have ended.
fn scratch() -> PathBuf {
    static SCRATCH: OnceLock<PathBuf> = OnceLock::new();
    SCRATCH.get_or_init(make_scratch).clone()
}

fn make_scratch() -> PathBuf {
    let root = std::env::temp_dir();
    for entry in std::fs::read_dir(&root).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix("cfq-test-pg-").and_then(|p| p.parse::<u32>().ok()) else { continue };
        if !PathBuf::from(format!("/proc/{pid}")).exists() {
            drop(std::fs::remove_dir_all(entry.path()));
        }
    }
    let dir = root.join(format!("cfq-test-pg-{}", std::process::id()));
    // An earlier process with the same process id may have left its folder behind.
    drop(std::fs::remove_dir_all(&dir));
    std::fs::create_dir_all(&dir).unwrap();
    crate::nats::make_traversable(&dir);
    dir
}

fn config(address: &PostgresAddress, database: &str) -> cfq_scheduler::DatabaseConfig {
    cfq_scheduler::DatabaseConfig {
        host: address.host.to_string_lossy().into_owned(),
        port: address.port,
        user: address.user.clone(),
        database: database.to_owned(),
        password_file: Some(address.password_file.clone()),
    }
}

async fn connect(address: &PostgresAddress, database: &str) -> PgConnection {
    try_connect(address, database).await.unwrap()
}

async fn try_connect(address: &PostgresAddress, database: &str) -> sqlx::Result<PgConnection> {
    let password = std::fs::read_to_string(&address.password_file).unwrap();
    PgConnectOptions::new_without_pgpass()
        .socket(&address.host)
        .port(address.port)
        .username(&address.user)
        .password(password.trim())
        .database(database)
        .connect()
        .await
}

/// Executes a statement in the database of the `cfq up` that runs on these folders.
pub async fn execute(paths: &Paths, statement: &'static str) {
    let account = account::existing(None).unwrap();
    let address = Postgres::address_of(paths, account);
    sqlx::raw_sql(statement).execute(&mut connect(&address, &address.database).await).await.unwrap();
}

/// All rows of all tables, as text, of the database of the `cfq up` that runs on these folders.
pub async fn dump(paths: &Paths) -> String {
    let account = account::existing(None).unwrap();
    let address = Postgres::address_of(paths, account);
    let mut connection = connect(&address, &address.database).await;
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables
         WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let mut text = String::new();
    for table in &tables {
        let query = format!("SELECT coalesce(string_agg(row::text, E'\\n'), '') FROM {table} AS row");
        let rows: String = sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut connection).await.unwrap();
        text.push_str(&format!("{table}\n{rows}\n"));
    }
    assert!(text.contains("tasks"), "{tables:?}");
    text
}

mod dedicated;

pub use dedicated::{DedicatedPostgres, copy_seed};

/// The database of one cluster.
pub struct Database {
    address: PostgresAddress,
    name: String,
    /// The Postgres server, if it is dedicated to this cluster.
    dedicated: Option<DedicatedPostgres>,
}

impl Database {
    /// Creates a database on the shared server, as a copy of the template.
    pub async fn fresh() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let shared = shared().await;
        let name = format!("t{}", NEXT.fetch_add(1, Ordering::SeqCst));
        let mut admin = connect(&shared.address, &shared.address.database).await;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")))
            .execute(&mut admin)
            .await
            .unwrap();
        Self { address: shared.address.clone(), name, dedicated: None }
    }

    /// Creates a database on a dedicated server, whose data folder is in `dir`.
    pub async fn on_dedicated_server(dir: &Path) -> Self {
        let dedicated = DedicatedPostgres::start(dir).await;
        let address = dedicated.address();
        Self { name: address.database.clone(), address, dedicated: Some(dedicated) }
    }

    /// The dedicated server. Panics unless the cluster was started with `dedicated_postgres`.
    pub fn server(&self) -> &DedicatedPostgres {
        self.dedicated.as_ref().expect("the cluster was started with `dedicated_postgres`")
    }

    /// Runs an SQL statement that damages cfq's data; the scheduler is not informed of it.
    pub async fn raw(&self, statement: &'static str) {
        let mut connection = connect(&self.address, &self.name).await;
        sqlx::raw_sql(statement).execute(&mut connection).await.unwrap();
    }

    /// Connection settings for the scheduler.
    pub fn config(&self) -> cfq_scheduler::DatabaseConfig {
        config(&self.address, &self.name)
    }

    /// Opens a connection to read what cfq wrote.
    pub async fn connect(&self) -> PgConnection {
        connect(&self.address, &self.name).await
    }

    /// Like [`Self::connect`], for a server that may be down.
    pub async fn try_connect(&self) -> sqlx::Result<PgConnection> {
        try_connect(&self.address, &self.name).await
    }
}
