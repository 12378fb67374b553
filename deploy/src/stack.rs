//! Postgres and NATS of one data folder, started together, kept running, and stopped in order.
//!
//! The order of a start: folders, the lock, leftovers of an earlier run, engines, servers. The lock comes before the
//! leftovers, because only its holder may say that somebody else's processes are left over.

use std::path::PathBuf;
use std::time::Duration;

use cfq_link::child::{self, ChildError, Exit, Leftover, Process};
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::account::{self, AccountError};
use crate::engines::{Engine, EngineOptions, EnginesError, Finder, Kind};
use crate::lock::{DataLock, LockError};
use crate::nats::{Nats, NatsError, NatsFacts, NatsOptions};
use crate::paths::{Paths, PathsError};
use crate::postgres::{self, Postgres, PostgresError, PostgresFacts};
use crate::talk::Talk;

/// Services hand over their work when asked to stop; a leftover one may need that long.
const LEFTOVER_GRACE: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_LONGEST: Duration = Duration::from_secs(10);
/// An engine that ran this long and then died is restarted at once again.
const HEALTHY: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum StackError {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Engines(#[from] EnginesError),
    #[error("cannot stop what an earlier run left")]
    Leftovers(#[source] ChildError),
    #[error("the private Postgres does not start")]
    Postgres(#[source] PostgresError),
    #[error("the private NATS does not start")]
    Nats(#[source] NatsError),
    #[error("the private Postgres does not stop")]
    StopPostgres(#[source] PostgresError),
    #[error("the private NATS does not stop")]
    StopNats(#[source] NatsError),
    #[error("looking for the engines was interrupted")]
    Interrupted,
}

/// What the caller chooses.
#[derive(Debug, Clone)]
pub struct Options {
    pub engines: EngineOptions,
    /// Who may connect to NATS besides the scheduler.
    pub identities: Vec<Identity>,
    /// A fixed port for NATS, which must be free; else one is picked once and kept.
    pub nats_port: Option<u16>,
    /// The most NATS may keep on disk, in bytes.
    pub nats_store_bytes: u64,
    pub talk: Talk,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engines: EngineOptions::default(),
            identities: Vec::new(),
            nats_port: None,
            // Messages live a minute and are small; this is for when nobody takes them.
            nats_store_bytes: 1 << 30,
            talk: Talk::Silent,
        }
    }
}

/// What was started and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub postgres: PostgresFacts,
    pub nats: NatsFacts,
    pub engines: Vec<Engine>,
}

/// An engine that died and runs again.
#[derive(Debug)]
pub struct Restarted {
    pub kind: Kind,
    pub exit: Exit,
    /// 1 for the first try after the death.
    pub attempt: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("{kind} ended ({exit}) and could not be started again (try {attempt}); the next try is in {next:?}")]
pub struct RestartError {
    pub kind: Kind,
    pub exit: Exit,
    pub attempt: u32,
    pub next: Duration,
    #[source]
    pub source: StackError,
}

#[derive(Debug)]
struct Running {
    process: Process,
    since: Instant,
    /// Tries since it last ran well.
    attempt: u32,
}

impl Running {
    fn new(process: Process) -> Self {
        Self { process, since: Instant::now(), attempt: 0 }
    }

    /// Waits for its death and then for its turn to be started again.
    async fn due(&mut self) -> Exit {
        let exit = self.process.ended().await;
        if self.since.elapsed() > HEALTHY {
            self.attempt = 0;
        }
        sleep(self.backoff()).await;
        exit
    }

    fn backoff(&self) -> Duration {
        match self.attempt {
            0 => Duration::ZERO,
            n => BACKOFF_FIRST.saturating_mul(1 << (n - 1).min(10)).min(BACKOFF_LONGEST),
        }
    }
}

/// The running engines. Dropping it leaves them to the parent-death signal and the next start; call [`Stack::stop`].
#[derive(Debug)]
pub struct Stack {
    facts: Facts,
    run: PathBuf,
    postgres: Postgres,
    nats: Nats,
    postgres_running: Running,
    nats_running: Running,
    _lock: DataLock,
}

impl Stack {
    /// Ready to serve when it returns.
    pub async fn start(paths: &Paths, options: Options) -> Result<Self, StackError> {
        let account = account::for_engines()?;
        paths.prepare(account)?;
        let lock = DataLock::acquire(paths)?;
        reclaim(paths).await?;
        let (postgres_engine, nats_engine) = find(paths, &options).await?;
        let mut identities = vec![Identity::Scheduler];
        identities.extend(options.identities.into_iter().filter(|identity| *identity != Identity::Scheduler));
        let nats_options = NatsOptions { identities, port: options.nats_port, store_bytes: options.nats_store_bytes };
        let start_postgres = async {
            let postgres = Postgres::prepare(paths, &postgres_engine, account).await.map_err(StackError::Postgres)?;
            let process = postgres.start().await.map_err(StackError::Postgres)?;
            Ok::<_, StackError>((postgres, process))
        };
        let start_nats = async {
            let mut nats = Nats::prepare(paths, &nats_engine, account, nats_options).map_err(StackError::Nats)?;
            let process = nats.start().await.map_err(StackError::Nats)?;
            Ok::<_, StackError>((nats, process))
        };
        let (postgres, nats) = match tokio::join!(start_postgres, start_nats) {
            (Ok(postgres), Ok(nats)) => (postgres, nats),
            (Err(error), Ok((_, nats))) => {
                Nats::stop(&nats).await.map_err(StackError::StopNats)?;
                return Err(error);
            }
            (Ok((_, postgres)), Err(error)) => {
                Postgres::stop(&postgres).await.map_err(StackError::StopPostgres)?;
                return Err(error);
            }
            (Err(error), Err(_)) => return Err(error),
        };
        let ((postgres, postgres_process), (nats, nats_process)) = (postgres, nats);
        Ok(Self {
            facts: Facts {
                postgres: postgres.facts(),
                nats: nats.facts(),
                engines: vec![postgres_engine, nats_engine],
            },
            run: paths.run(),
            postgres,
            nats,
            postgres_running: Running::new(postgres_process),
            nats_running: Running::new(nats_process),
            _lock: lock,
        })
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Waits until an engine dies, and starts it again at the same place, waiting longer after each failure. Call it
    /// again after either answer. It may be dropped at any point.
    pub async fn tend(&mut self) -> Result<Restarted, RestartError> {
        let (kind, exit) = tokio::select! {
            exit = self.postgres_running.due() => (Kind::Postgres, exit),
            exit = self.nats_running.due() => (Kind::Nats, exit),
        };
        let running = match kind {
            Kind::Postgres => &mut self.postgres_running,
            Kind::Nats => &mut self.nats_running,
        };
        running.attempt += 1;
        let (attempt, next) = (running.attempt, running.backoff());
        let started = match kind {
            Kind::Postgres => self.postgres.start().await.map_err(StackError::Postgres),
            Kind::Nats => self.nats.restart().await.map_err(StackError::Nats),
        };
        match started {
            Ok(process) => {
                running.process = process;
                running.since = Instant::now();
                Ok(Restarted { kind, exit, attempt })
            }
            Err(source) => Err(RestartError { kind, exit, attempt, next, source }),
        }
    }

    /// NATS first, so that nobody is told anything that Postgres could no longer back; then Postgres in good order.
    pub async fn stop(self) -> Result<(), StackError> {
        let nats = Nats::stop(&self.nats_running.process).await.map_err(StackError::StopNats);
        let postgres = Postgres::stop(&self.postgres_running.process).await.map_err(StackError::StopPostgres);
        // A restart that was dropped half way may have started one that no field names.
        let left: Vec<Leftover> = child::leftovers(&self.run)
            .map_err(StackError::Leftovers)?
            .into_iter()
            .filter(|left| matches!(left.name.as_str(), "nats" | "postgres"))
            .collect();
        stop_all(left).await?;
        nats.and(postgres).map(drop)
    }
}

/// Finds both engines, fetching what is missing and may be fetched.
pub async fn find(paths: &Paths, options: &Options) -> Result<(Engine, Engine), StackError> {
    let account = account::for_engines()?;
    let pinned = postgres::pinned_major(paths).map_err(StackError::Postgres)?;
    let (paths, options) = (paths.clone(), options.clone());
    let find = move || -> Result<_, StackError> {
        let finder =
            Finder { paths: &paths, options: &options.engines, account, pinned, may_fetch: true, talk: options.talk };
        Ok((finder.find(Kind::Postgres)?, finder.find(Kind::Nats)?))
    };
    tokio::task::spawn_blocking(find).await.map_err(|_| StackError::Interrupted)?
}

/// Stops what an earlier run left: services first and together, then NATS, then Postgres.
async fn reclaim(paths: &Paths) -> Result<(), StackError> {
    let left = child::leftovers(&paths.run()).map_err(StackError::Leftovers)?;
    let (engines, services): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|left| matches!(left.name.as_str(), "nats" | "postgres" | "initdb"));
    let (nats, postgres): (Vec<_>, Vec<_>) = engines.into_iter().partition(|left| left.name == "nats");
    for group in [services, nats, postgres] {
        stop_all(group).await?;
    }
    Ok(())
}

async fn stop_all(left: Vec<Leftover>) -> Result<(), StackError> {
    let mut stops = tokio::task::JoinSet::new();
    for one in left {
        stops.spawn(async move { one.stop(LEFTOVER_GRACE).await });
    }
    for stopped in stops.join_all().await {
        stopped.map_err(StackError::Leftovers)?;
    }
    Ok(())
}
