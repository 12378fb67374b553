//! One Postgres for a test run, started at first use; a database for every cluster, copied from a migrated template that
//! nobody connects to.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use cfq_deploy::engines::{EngineOptions, Finder, Kind};
use cfq_deploy::postgres::{Postgres, PostgresFacts};
use cfq_deploy::{Paths, Talk, account};
use cfq_link::child::Process;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use tokio::sync::OnceCell;

const TEMPLATE: &str = "cfq_template";

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
            let account = account::for_engines().unwrap();
            let data = scratch();
            crate::nats::open_to_all(&data);
            let paths = Paths { data: data.join("data"), ..engine_paths() };
            paths.prepare(account).unwrap();
            let for_finder = paths.clone();
            let engine = tokio::task::spawn_blocking(move || {
                let options = EngineOptions::default();
                let finder = Finder {
                    paths: &for_finder,
                    options: &options,
                    account,
                    pinned: None,
                    may_fetch: true,
                    talk: Talk::Stderr,
                };
                finder.find(Kind::Postgres).unwrap()
            })
            .await
            .unwrap();
            let postgres = Postgres::prepare(&paths, &engine, account).await.unwrap();
            let process = postgres.start().await.unwrap();
            let facts = postgres.facts();
            let mut admin = connect(&facts, &facts.database).await;
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {TEMPLATE}"))).execute(&mut admin).await.unwrap();
            cfq_scheduler::migrate(&config(&facts, TEMPLATE)).await.unwrap();
            Shared { facts, _process: process }
        })
        .await
}

/// A folder of this run; those of runs that are over are removed.
fn scratch() -> PathBuf {
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

pub struct Database {
    facts: PostgresFacts,
    name: String,
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
        Self { facts: shared.facts.clone(), name }
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
