//! Postgres and NATS of one data folder, started together, restarted when they exit, and stopped in order.
//!
//! The order of a start: folders, the lock, leftover processes of an earlier run, programs, servers. The lock comes
//! before the leftovers, because only its holder may treat running processes as leftovers.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use cfq_link::child::{self, Account, ChildError, Exit, Leftover, Process};
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::account::{self, AccountError};
use crate::certificates::{self, CertificateError, CertificateFiles};
use crate::lock::{DataLock, LockError};
use crate::nats::{Nats, NatsAddress, NatsError, NatsLan, NatsOptions, RemoteNodes};
use crate::paths::{Paths, PathsError};
use crate::postgres::{self, DEFAULT_MAX_CONNECTIONS, Postgres, PostgresAddress, PostgresError};
use crate::services::{Finder, ServiceKind, ServiceOptions, ServiceProgram, ServicesError};
use crate::status_output::StatusOutput;

/// Maximum time that a leftover process may take to exit after a stop request; then it is killed. It is long because
/// cfq's own processes hand over their work before they exit.
const LEFTOVER_GRACE: Duration = Duration::from_secs(15);
/// Delay before the second restart attempt; it doubles with each further one, up to [`BACKOFF_CAP`].
const BACKOFF_BASE: Duration = Duration::from_millis(100);
const BACKOFF_CAP: Duration = Duration::from_secs(10);
/// Minimum running time of a healthy service: if a service runs longer before it exits, it is restarted without delay.
const MIN_HEALTHY_TIME: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum StackError {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Services(#[from] ServicesError),
    #[error("cannot prepare TLS")]
    Certificates(#[source] CertificateError),
    #[error("cannot stop the processes of an earlier run")]
    Leftovers(#[source] ChildError),
    #[error("the private Postgres does not start")]
    Postgres(#[source] PostgresError),
    #[error("the private NATS does not start")]
    Nats(#[source] NatsError),
    #[error("the private Postgres does not stop")]
    StopPostgres(#[source] PostgresError),
    #[error("the private NATS does not stop")]
    StopNats(#[source] NatsError),
    #[error("the search for the Postgres and NATS programs was interrupted")]
    Interrupted,
}

/// Options of [`Stack::start`].
#[derive(Debug, Clone)]
pub struct StackOptions {
    pub services: ServiceOptions,
    /// NATS clients besides the scheduler.
    pub identities: Vec<Identity>,
    /// A fixed port for NATS, which must be free; if absent, that of the last start, or a free one.
    pub nats_port: Option<u16>,
    /// How other machines reach the servers of this machine, if they may.
    pub lan: Option<LanOptions>,
    /// Disk limit of NATS, in bytes.
    pub nats_store_bytes: u64,
    /// Maximum number of connections to Postgres.
    pub postgres_connections: u32,
    pub status: StatusOutput,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self {
            services: ServiceOptions::default(),
            identities: Vec::new(),
            nats_port: None,
            lan: None,
            // Messages are small and expire after one minute; the limit matters only when no client consumes them.
            nats_store_bytes: 1 << 30,
            postgres_connections: DEFAULT_MAX_CONNECTIONS,
            status: StatusOutput::Silent,
        }
    }
}

/// How other machines reach the servers of this machine.
#[derive(Debug, Clone)]
pub struct LanOptions {
    /// Address that NATS listens on.
    pub listen: IpAddr,
    /// Names and IP addresses for which the servers' certificate is issued.
    pub hosts: Vec<String>,
}

/// Addresses and credentials of the started services, and the programs that they run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackAddresses {
    pub postgres: PostgresAddress,
    pub nats: NatsAddress,
    pub programs: Vec<ServiceProgram>,
    /// Certificates of this machine's servers, if other machines reach them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CertificateFiles>,
}

/// A service that exited and was restarted.
#[derive(Debug)]
pub struct Restarted {
    pub kind: ServiceKind,
    pub exit: Exit,
    /// Number of the restart attempt, counted from 1 after the service was last healthy.
    pub attempt: u32,
}

/// Failure of one restart attempt; the next call of [`Stack::supervise`] makes the next attempt.
#[derive(Debug, thiserror::Error)]
#[error("{kind} exited ({exit}) and could not be restarted (attempt {attempt}); the next attempt is in {next:?}")]
pub struct RestartError {
    pub kind: ServiceKind,
    pub exit: Exit,
    pub attempt: u32,
    pub next: Duration,
    #[source]
    pub source: StackError,
}

/// The process of one service, with its restart attempts.
#[derive(Debug)]
struct RunningService {
    process: Process,
    since: Instant,
    /// Number of restart attempts since the service was last healthy.
    attempt: u32,
}

impl RunningService {
    fn new(process: Process) -> Self {
        Self { process, since: Instant::now(), attempt: 0 }
    }

    /// Waits until the process exits, then for the backoff before its restart.
    async fn restart_due(&mut self) -> Exit {
        let exit = self.process.ended().await;
        if self.since.elapsed() > MIN_HEALTHY_TIME {
            self.attempt = 0;
        }
        sleep(self.backoff()).await;
        exit
    }

    fn backoff(&self) -> Duration {
        match self.attempt {
            0 => Duration::ZERO,
            n => BACKOFF_BASE.saturating_mul(1 << (n - 1).min(10)).min(BACKOFF_CAP),
        }
    }
}

/// The running services. Call [`Stack::stop`] to stop them: if the stack is only dropped, they keep running until the
/// parent-death signal or the next start terminates them.
#[derive(Debug)]
pub struct Stack {
    addresses: StackAddresses,
    account: Option<Account>,
    run: PathBuf,
    postgres: Postgres,
    nats: Nats,
    postgres_running: RunningService,
    nats_running: RunningService,
    _lock: DataLock,
}

impl Stack {
    /// Starts both services; they are ready when this returns.
    pub async fn start(paths: &Paths, options: StackOptions) -> Result<Self, StackError> {
        let account = account::for_services(options.services.account.as_deref(), options.status)?;
        paths.prepare(account)?;
        let lock = DataLock::acquire(paths)?;
        stop_leftovers(paths).await?;
        let (postgres_program, nats_program) = find_programs(paths, &options).await?;
        let mut identities = vec![Identity::Scheduler];
        identities.extend(options.identities.into_iter().filter(|identity| *identity != Identity::Scheduler));
        let lan = match options.lan {
            Some(LanOptions { listen, hosts }) => {
                let certificates = certificates::issue(paths, &hosts, account).map_err(StackError::Certificates)?;
                Some(NatsLan { listen, certificates })
            }
            None => None,
        };
        let certificates = lan.as_ref().map(|lan| lan.certificates.clone());
        let nats_options =
            NatsOptions { identities, port: options.nats_port, store_bytes: options.nats_store_bytes, lan };
        let start_postgres = async {
            let mut postgres =
                Postgres::prepare(paths, &postgres_program, account).await.map_err(StackError::Postgres)?;
            postgres.set_max_connections(options.postgres_connections);
            let process = postgres.start().await.map_err(StackError::Postgres)?;
            Ok::<_, StackError>((postgres, process))
        };
        let start_nats = async {
            let mut nats = Nats::prepare(paths, &nats_program, account, nats_options).map_err(StackError::Nats)?;
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
            addresses: StackAddresses {
                postgres: postgres.address(),
                nats: nats.address(),
                programs: vec![postgres_program, nats_program],
                certificates,
            },
            account,
            run: paths.run(),
            postgres,
            nats,
            postgres_running: RunningService::new(postgres_process),
            nats_running: RunningService::new(nats_process),
            _lock: lock,
        })
    }

    /// The account of the services; `None` if they run as the current user.
    pub fn account(&self) -> Option<Account> {
        self.account
    }

    /// The nodes on other machines.
    pub fn remote_nodes(&self) -> RemoteNodes {
        self.nats.remote_nodes()
    }

    pub fn addresses(&self) -> &StackAddresses {
        &self.addresses
    }

    /// Waits until a service exits and restarts it at the same address, with a backoff that grows with each failure.
    /// Call it again after success and after failure. Cancel safe.
    pub async fn supervise(&mut self) -> Result<Restarted, RestartError> {
        let (kind, exit) = tokio::select! {
            exit = self.postgres_running.restart_due() => (ServiceKind::Postgres, exit),
            exit = self.nats_running.restart_due() => (ServiceKind::Nats, exit),
        };
        let running = match kind {
            ServiceKind::Postgres => &mut self.postgres_running,
            ServiceKind::Nats => &mut self.nats_running,
        };
        running.attempt += 1;
        let (attempt, next) = (running.attempt, running.backoff());
        let restarted = match kind {
            ServiceKind::Postgres => self.postgres.start().await.map_err(StackError::Postgres),
            ServiceKind::Nats => self.nats.restart().await.map_err(StackError::Nats),
        };
        match restarted {
            Ok(process) => {
                running.process = process;
                running.since = Instant::now();
                Ok(Restarted { kind, exit, attempt })
            }
            Err(source) => Err(RestartError { kind, exit, attempt, next, source }),
        }
    }

    /// Stops NATS first, so that no client receives a reply whose data Postgres can no longer store; then Postgres,
    /// with a clean shutdown.
    pub async fn stop(self) -> Result<(), StackError> {
        let nats = Nats::stop(&self.nats_running.process).await.map_err(StackError::StopNats);
        let postgres = Postgres::stop(&self.postgres_running.process).await.map_err(StackError::StopPostgres);
        // A cancelled restart may have started a process that no field of `self` refers to.
        let leftovers: Vec<Leftover> = child::leftovers(&self.run)
            .map_err(StackError::Leftovers)?
            .into_iter()
            .filter(|process| matches!(process.name.as_str(), "nats" | "postgres"))
            .collect();
        stop_all(leftovers).await?;
        nats.and(postgres).map(drop)
    }
}

/// Finds the programs of Postgres and NATS, returned in this order; fetches missing ones if the options permit it.
pub async fn find_programs(
    paths: &Paths,
    options: &StackOptions,
) -> Result<(ServiceProgram, ServiceProgram), StackError> {
    let account = account::for_services(options.services.account.as_deref(), options.status)?;
    let pinned = postgres::pinned_major(paths).map_err(StackError::Postgres)?;
    let (paths, options) = (paths.clone(), options.clone());
    let find = move || -> Result<_, StackError> {
        let (options, status) = (&options.services, options.status);
        let finder = Finder { paths: &paths, options, account, pinned, may_fetch: true, status };
        Ok((finder.find(ServiceKind::Postgres)?, finder.find(ServiceKind::Nats)?))
    };
    tokio::task::spawn_blocking(find).await.map_err(|_| StackError::Interrupted)?
}

/// Stops leftover processes of an earlier run: first all of cfq's own processes at once, then NATS, then Postgres. Only the
/// holder of the data folder's lock may call this.
pub async fn stop_leftovers(paths: &Paths) -> Result<(), StackError> {
    let leftovers = child::leftovers(&paths.run()).map_err(StackError::Leftovers)?;
    let (services, own): (Vec<_>, Vec<_>) =
        leftovers.into_iter().partition(|process| matches!(process.name.as_str(), "nats" | "postgres" | "initdb"));
    let (nats, postgres): (Vec<_>, Vec<_>) = services.into_iter().partition(|process| process.name == "nats");
    for group in [own, nats, postgres] {
        stop_all(group).await?;
    }
    Ok(())
}

async fn stop_all(leftovers: Vec<Leftover>) -> Result<(), StackError> {
    let mut stops = tokio::task::JoinSet::new();
    for process in leftovers {
        stops.spawn(async move { process.stop(LEFTOVER_GRACE).await });
    }
    for stopped in stops.join_all().await {
        stopped.map_err(StackError::Leftovers)?;
    }
    Ok(())
}
