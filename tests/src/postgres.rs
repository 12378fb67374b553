//! One Postgres for a test run, started at first use; a database for every cluster, copied from a migrated template that
//! nobody connects to. A test that hurts Postgres itself gets a server of its own, on a copy of a migrated data folder that
//! is made once a run.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cfq_deploy::engines::{Engine, EngineOptions, Finder, Kind};
use cfq_deploy::postgres::{Postgres, PostgresFacts};
use cfq_deploy::{Paths, Talk, account};
use cfq_link::child::Process;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use tokio::sync::OnceCell;

const TEMPLATE: &str = "cfq_template";
/// A killed process is gone at once; a loaded machine may take a while to notice.
const GONE: Duration = Duration::from_secs(20);

struct Shared {
    facts: PostgresFacts,
    // The process gets the parent-death signal when the run ends; the folder is removed by the next run.
    _process: Process,
}

/// Caches of the real set-up, so that engines are fetched once a machine.
pub fn engine_paths() -> Paths {
    Paths::from_environment().unwrap()
}

async fn shared() -> &'static Shared {
    static SHARED: OnceCell<Shared> = OnceCell::const_new();
    SHARED
        .get_or_init(|| async {
            let (postgres, process) = start(&scratch().join("shared")).await;
            let facts = postgres.facts();
            let mut admin = connect(&facts, &facts.database).await;
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {TEMPLATE}"))).execute(&mut admin).await.unwrap();
            cfq_scheduler::migrate(&config(&facts, TEMPLATE)).await.unwrap();
            Shared { facts, _process: process }
        })
        .await
}

/// The engine that tests use: the machine's own, else fetched once.
pub async fn found_engine(kind: Kind) -> Engine {
    let find = move || {
        let (paths, options) = (engine_paths(), EngineOptions::default());
        let account = account::for_engines().unwrap();
        Finder { paths: &paths, options: &options, account, pinned: None, may_fetch: true, talk: Talk::Stderr }
            .find(kind)
            .unwrap()
    };
    tokio::task::spawn_blocking(find).await.unwrap()
}

/// A Postgres on this data folder of cfq, which is made if it is not there.
async fn start(data: &Path) -> (Postgres, Process) {
    let account = account::for_engines().unwrap();
    let paths = Paths { data: data.to_owned(), ..engine_paths() };
    paths.prepare(account).unwrap();
    let engine = found_engine(Kind::Postgres).await;
    let postgres = Postgres::prepare(&paths, &engine, account).await.unwrap();
    let process = postgres.start().await.unwrap();
    (postgres, process)
}

/// A folder of this run; those of runs that are over are removed.
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
    // An earlier process had this id, and its folder was not removed.
    drop(std::fs::remove_dir_all(&dir));
    std::fs::create_dir_all(&dir).unwrap();
    crate::nats::open_to_all(&dir);
    dir
}

fn config(facts: &PostgresFacts, database: &str) -> cfq_scheduler::DatabaseConfig {
    cfq_scheduler::DatabaseConfig {
        host: facts.host.to_string_lossy().into_owned(),
        port: facts.port,
        user: facts.user.clone(),
        database: database.to_owned(),
        password_file: Some(facts.password_file.clone()),
    }
}

async fn connect(facts: &PostgresFacts, database: &str) -> PgConnection {
    let password = std::fs::read_to_string(&facts.password_file).unwrap();
    PgConnectOptions::new_without_pgpass()
        .socket(&facts.host)
        .port(facts.port)
        .username(&facts.user)
        .password(password.trim())
        .database(database)
        .connect()
        .await
        .unwrap()
}

mod own;

pub use own::{OwnPostgres, copy_seed};

pub struct Database {
    facts: PostgresFacts,
    name: String,
    /// The server, where it is this cluster's alone.
    own: Option<OwnPostgres>,
}

impl Database {
    pub async fn fresh() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let shared = shared().await;
        let name = format!("t{}", NEXT.fetch_add(1, Ordering::SeqCst));
        let mut admin = connect(&shared.facts, &shared.facts.database).await;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")))
            .execute(&mut admin)
            .await
            .unwrap();
        Self { facts: shared.facts.clone(), name, own: None }
    }

    /// In a server of its own, whose folder lies in `dir`.
    pub async fn with_a_server_of_its_own(dir: &Path) -> Self {
        let own = OwnPostgres::start(dir).await;
        let facts = own.facts();
        Self { name: facts.database.clone(), facts, own: Some(own) }
    }

    /// The server to hurt; only clusters that asked for one have it.
    pub fn server(&self) -> &OwnPostgres {
        self.own.as_ref().expect("the cluster was started with `own_postgres`")
    }

    /// Damages what cfq wrote, behind its back.
    pub async fn raw(&self, statement: &'static str) {
        let mut connection = connect(&self.facts, &self.name).await;
        sqlx::raw_sql(statement).execute(&mut connection).await.unwrap();
    }

    pub fn config(&self) -> cfq_scheduler::DatabaseConfig {
        config(&self.facts, &self.name)
    }

    /// For looking at what cfq wrote; nothing is changed through it.
    pub async fn connect(&self) -> PgConnection {
        connect(&self.facts, &self.name).await
    }
}
