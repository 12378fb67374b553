//! The runner process: registers with the scheduler, keeps leases, drives the leased tasks, one in each slot, and
//! releases the tasks on shutdown.

mod follow;
mod maintenance;
mod nats_port;
mod slots;
mod work;

use std::fs::{File, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use cfq_link::credentials_lock::{CredentialsLock, LeaseWait};
use cfq_link::lease::{HeartbeatExtras, LeaseKeeper};
use cfq_link::{LinkError, Session};
use cfq_proto::ids::{BootId, LeaseRequestId};
use cfq_proto::messages::{
    LeaseReply, LeaseRequest, RegisterReply, RunnerCommand, RunnerRegistration, UnavailableReason,
};
use cfq_proto::subject::{self, Identity};
use cfq_sandbox::SandboxLauncher;
use cfq_transformer::Declaration;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant as Wake;

use crate::Config;
use crate::checks::CheckRunner;
use crate::workstream::{DeliveryRecordFile, GitError, RepositoryAccess, Worktrees, remove_mirror_locks};
use maintenance::Maintenance;
use slots::TaskSlots;
use work::{GrantedTask, Worker};

/// Failure that ends the runner process.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the data folder {path}")]
    DataDir {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("another runner uses the data folder {path}: stop it, or set another data_dir")]
    DataDirTaken { path: PathBuf },
    #[error("cannot remove old worktrees")]
    Worktrees(#[source] GitError),
    #[error("cannot remove the locks of an earlier process in the mirrors")]
    MirrorLocks(#[source] GitError),
    #[error("the built-in loop declaration is invalid")]
    Declaration(#[from] cfq_transformer::DeclarationError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this runner: {reason}")]
    Refused { reason: String },
}

impl Error {
    /// Whether the runner's id or version is refused, or its credentials or data folder are in use: a restart does not
    /// help.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused { .. } | Self::DataDirTaken { .. } | Self::Link(LinkError::CredentialsTaken { .. }) => true,
            Self::DataDir { .. } | Self::Worktrees(_) | Self::MirrorLocks(_) | Self::Declaration(_) | Self::Link(_) => {
                false
            }
        }
    }
}

/// Process-wide state, shared by all tasks.
#[derive(Debug)]
pub(crate) struct RunnerContext {
    pub config: Config,
    pub boot: BootId,
    /// Held until the runner has stopped.
    pub credentials_lock: Option<CredentialsLock>,
    pub session: Session,
    pub declaration: Declaration,
    pub repositories: RepositoryAccess,
    pub checks: CheckRunner,
}

/// Runs the runner until `shutdown` resolves, then releases its tasks and returns. Users' repositories are opened through
/// `repositories`, and the checks of projects run through `launcher`.
///
/// # Errors
/// An [`Error`] if the data folder is unusable or in use, NATS cannot be used, or the scheduler refuses the runner.
pub async fn run(
    config: Config,
    repositories: RepositoryAccess,
    launcher: SandboxLauncher,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let credentials_lock = CredentialsLock::acquire(&config.nats)?;
    let _lock = lock_data_dir(&config)?;
    let worktrees = Worktrees::new(&config.data_dir);
    worktrees.remove_all().map_err(Error::Worktrees)?;
    remove_mirror_locks(&config.data_dir).map_err(Error::MirrorLocks)?;
    DeliveryRecordFile::remove_old(&config.data_dir);
    let checks = CheckRunner::new(launcher, config.checks.clone(), &config.data_dir).keeping_checkouts();
    if let Err(error) = checks.remove_checkouts() {
        tracing::warn!(error = error.with_causes(), "cannot remove the checkouts of earlier checks");
    }
    let declaration = cfq_transformer::dual_agent()?;
    let identity = Identity::Runner(config.runner.clone());
    let boot = BootId::fresh();
    let mut shutdown = pin!(shutdown);

    let session = tokio::select! {
        session = Session::connect(&config.nats, identity.clone(), &config.timing) => session?,
        () = &mut shutdown => return Ok(()),
    };
    let mut commands = session.subscribe::<RunnerCommand>(&subject::runner_command(&config.runner)).await?;
    let mut hints = session.subscribe::<RunnerCommand>(subject::HINT_RUNNERS).await?;
    let heartbeat_subject = subject::runner(&config.runner, "heartbeat");
    let keeper = LeaseKeeper::start(
        config.nats.clone(),
        identity,
        boot,
        heartbeat_subject,
        config.timing.clone(),
        HeartbeatExtras::default,
    )?;
    let mut registration_requests = keeper.registration_requests();
    let context =
        Arc::new(RunnerContext { config, boot, credentials_lock, session, declaration, repositories, checks });
    tokio::select! {
        registered = register(&context) => registered?,
        () = &mut shutdown => return Ok(()),
    }

    let _maintenance = Maintenance::start(context.config.data_dir.clone());
    let mut slots = TaskSlots::new(slot_count(&context.config));
    let mut workers: JoinSet<usize> = JoinSet::new();
    let mut lease_request: Option<LeaseRequestTask> = None;
    // Kept until a reply arrives: if the reply with a grant is lost, the next request gets the same grant.
    let mut request_id = LeaseRequestId::fresh();
    let mut next_request = Wake::now();
    // True if a hint that a task may be available arrived during a lease request. The reply to that request may be
    // older than the hint.
    let mut hinted = false;
    loop {
        if lease_request.is_none() && slots.has_free() && next_request <= Wake::now() {
            lease_request = Some(request_lease(&context, request_id));
            hinted = false;
        }
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            reply = lease_reply(&mut lease_request) => {
                lease_request = None;
                if reply.is_some() {
                    request_id = LeaseRequestId::fresh();
                }
                match reply {
                    Some((requested_at, LeaseReply::Granted { lease, grant })) => {
                        let held = keeper.hold(lease, requested_at);
                        let (worker, slot) = slots.occupy(lease, |slot| {
                            Worker::new(context.clone(), GrantedTask { lease: held, grant }, slot)
                        });
                        workers.spawn(async move {
                            worker.run().await;
                            slot
                        });
                    }
                    Some((_, LeaseReply::None)) if hinted => next_request = Wake::now(),
                    Some((_, LeaseReply::None)) | None => next_request = Wake::now() + context.config.timing.poll(),
                    Some((_, LeaseReply::Unavailable { reason })) => {
                        tracing::info!(%reason, "cannot lease a task now");
                        next_request = Wake::now() + context.config.timing.poll();
                    }
                }
            }
            Some(result) = workers.join_next() => {
                match result {
                    Ok(slot) => slots.free(slot),
                    // The driver's lease handle was dropped, so the lease expires. The slot is found by its closed
                    // channel.
                    Err(error) => {
                        tracing::error!(%error, "task driver panicked");
                        slots.free_finished();
                    }
                }
                next_request = Wake::now();
            }
            Some(command) = commands.next() => slots.on_command(command.body),
            Some(hint) = hints.next() => {
                if let Ok(RunnerCommand::TaskReady) = hint.body {
                    hinted = true;
                    next_request = Wake::now();
                }
            }
            changed = registration_requests.changed() => {
                if changed.is_ok() {
                    tokio::select! {
                        registered = register(&context) => registered?,
                        () = &mut shutdown => break,
                    }
                    next_request = Wake::now();
                }
            }
            () = tokio::time::sleep_until(next_request), if lease_request.is_none() && slots.has_free() => {}
        }
    }

    tracing::info!(tasks = workers.len(), "releasing tasks");
    slots.drain();
    let released = async { while workers.join_next().await.is_some() {} };
    if tokio::time::timeout(context.config.timing.drain_timeout(), released).await.is_err() {
        tracing::warn!("some tasks were not released in time, their leases will expire");
    }
    keeper.stop();
    Ok(())
}

fn slot_count(config: &Config) -> usize {
    config.concurrency.max(1)
}

/// Locks the data folder for this process: two runners in one folder would remove each other's worktrees.
fn lock_data_dir(config: &Config) -> Result<File, Error> {
    let data_dir = |source| Error::DataDir { path: config.data_dir.clone(), source };
    // The mirrors and worktrees are copies of the user's repositories, which other users may be unable to read.
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&config.data_dir).map_err(data_dir)?;
    std::fs::set_permissions(&config.data_dir, Permissions::from_mode(0o700)).map_err(data_dir)?;
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(config.data_dir.join("runner.lock"))
        .map_err(data_dir)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::DataDirTaken { path: config.data_dir.clone() }),
        Err(std::fs::TryLockError::Error(source)) => Err(data_dir(source)),
    }
}

/// Registers this process with the scheduler. Waits while the lease of another process with this runner's id may still
/// end.
async fn register(context: &RunnerContext) -> Result<(), Error> {
    let subject = subject::runner(&context.config.runner, "register");
    let registration = RunnerRegistration {
        runner: context.config.runner.clone(),
        boot: context.boot,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine_boot: cfq_link::clock::machine_boot(),
        credentials_lock: context.credentials_lock.as_ref().map(|lock| lock.id().to_owned()),
        slots: Some(u32::try_from(slot_count(&context.config)).unwrap_or(u32::MAX)),
    };
    let mut lease_wait = LeaseWait::default();
    loop {
        match context.session.request_until_answered(&subject, &registration).await? {
            RegisterReply::Registered { .. } => {
                tracing::info!(runner = %context.config.runner, boot = %context.boot, "runner registered, ready for tasks");
                return Ok(());
            }
            RegisterReply::Refused { reason, retry_ms: Some(lease_ms) } => {
                if !lease_wait.wait(lease_ms, &reason, &context.config.timing).await {
                    return Err(Error::Refused { reason });
                }
            }
            RegisterReply::Refused { reason, retry_ms: None } => return Err(Error::Refused { reason }),
        }
    }
}

/// A lease request in progress. Its result is the time at which it was sent and the reply; `None` if there was no
/// reply.
type LeaseRequestTask = JoinHandle<Option<(Instant, LeaseReply)>>;

/// Number of times that a lease request without a reply is sent, at intervals of a quarter of the lease TTL. The lease of
/// a grant whose reply was lost is still valid when the request is repeated.
const LEASE_REQUEST_TRIES: u32 = 3;

/// Requests a lease, in a separate Tokio task, so that an unavailable scheduler does not delay commands.
fn request_lease(context: &Arc<RunnerContext>, id: LeaseRequestId) -> LeaseRequestTask {
    let context = context.clone();
    tokio::spawn(async move {
        let subject = subject::runner(&context.config.runner, "lease");
        let body = LeaseRequest { boot: context.boot, request: Some(id) };
        for _ in 0..LEASE_REQUEST_TRIES {
            let requested_at = Instant::now();
            let timeout = context.config.timing.lease_ttl() / 4;
            match context.session.request_within(&subject, &body, timeout).await {
                Ok(reply) => return Some((requested_at, reply)),
                // A repeat would get the same reply, so the next request has another id.
                Err(error @ LinkError::Message { .. }) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    tracing::error!(%error, cause, "cannot read the reply to a lease request; update this runner");
                    let reason = UnavailableReason::Other(error.to_string());
                    return Some((requested_at, LeaseReply::Unavailable { reason }));
                }
                Err(LinkError::NoReply { .. }) if requested_at.elapsed() >= timeout => {
                    tracing::debug!("no reply to the lease request yet, repeating it");
                }
                Err(error) => {
                    tracing::debug!(%error, "lease request failed");
                    return None;
                }
            }
        }
        None
    })
}

/// Waits for the reply to the lease request in progress; never returns if there is none.
async fn lease_reply(request: &mut Option<LeaseRequestTask>) -> Option<(Instant, LeaseReply)> {
    match request {
        Some(handle) => handle.await.unwrap_or(None),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_folder_is_locked_by_one_runner() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            runner: "r1".parse().unwrap(),
            data_dir: folder.path().join("data"),
            concurrency: 2,
            nats: cfq_link::NatsConfig { url: "nats://127.0.0.1:1".into(), ca_file: None, seed_file: None },
            timing: cfq_proto::timing::Timing::default(),
            server_policies_folder: None,
            checks: crate::checks::ProjectChecksConfig::default(),
        };
        let first = lock_data_dir(&config).unwrap();
        assert!(matches!(lock_data_dir(&config), Err(Error::DataDirTaken { .. })));
        drop(first);
        lock_data_dir(&config).unwrap();
    }
}
