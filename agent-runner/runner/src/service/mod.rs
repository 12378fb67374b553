//! The runner as a process: says hello, keeps leases, takes tasks into its slots, drives them, hands them back when it
//! has to stop.

mod cluster;
mod follow;
mod slots;
mod work;

use std::fs::File;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use cfq_link::lease::{BeatExtras, LeaseKeeper};
use cfq_link::{LinkError, Session};
use cfq_proto::ids::BootId;
use cfq_proto::messages::{HelloReply, LeaseReply, LeaseRequest, RunnerCommand, RunnerHello};
use cfq_proto::subject::{self, Identity};
use cfq_transformer::Declaration;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant as Wake;

use crate::Config;
use crate::workstream::{GitError, Worktrees};
use slots::Slots;
use work::{Granted, Worker};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the data folder {path}")]
    DataDir {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("another runner works in {path}: stop it, or give this one its own data_dir")]
    DataDirTaken { path: PathBuf },
    #[error("cannot clear old worktrees")]
    Worktrees(#[source] GitError),
    #[error("the built-in loop is broken")]
    Declaration(#[from] cfq_transformer::DeclarationError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this runner: {reason}")]
    Refused { reason: String },
}

/// What all tasks of this process share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: Config,
    pub boot: BootId,
    pub session: Session,
    pub declaration: Declaration,
}

/// Runs until `shutdown`, then hands its tasks back and returns.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let _alone = claim(&config)?;
    let worktrees = Worktrees::new(&config.data_dir);
    worktrees.remove_all().map_err(Error::Worktrees)?;
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
    let beat = subject::runner(&config.runner, "beat");
    let keeper =
        LeaseKeeper::start(config.nats.clone(), identity, boot, beat, config.timing.clone(), BeatExtras::default)?;
    let mut hello_wanted = keeper.hello_wanted();
    let shared = Arc::new(Shared { config, boot, session, declaration });
    tokio::select! {
        greeted = hello(&shared) => greeted?,
        () = &mut shutdown => return Ok(()),
    }

    let mut slots = Slots::new(shared.config.concurrency.max(1));
    let mut workers: JoinSet<usize> = JoinSet::new();
    let mut asking: Option<Asking> = None;
    let mut next_ask = Wake::now();
    // A hint that came while a question was open: its answer may be older than the hint.
    let mut hinted = false;
    loop {
        if asking.is_none() && slots.has_room() && next_ask <= Wake::now() {
            asking = Some(ask(&shared));
            hinted = false;
        }
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            answered = settled(&mut asking) => {
                asking = None;
                match answered {
                    Some((asked_at, LeaseReply::Granted { lease, grant })) => {
                        let held = keeper.hold(lease, asked_at);
                        let (worker, slot) = slots.take(lease, |number| {
                            Worker::new(shared.clone(), Granted { lease: held, grant }, number)
                        });
                        workers.spawn(async move {
                            worker.run().await;
                            slot
                        });
                    }
                    Some((_, LeaseReply::None)) if hinted => next_ask = Wake::now(),
                    Some((_, LeaseReply::None)) | None => next_ask = Wake::now() + shared.config.timing.poll(),
                    Some((_, LeaseReply::Unavailable { reason })) => {
                        tracing::info!(reason, "no lease now");
                        next_ask = Wake::now() + shared.config.timing.poll();
                    }
                }
            }
            Some(ended) = workers.join_next() => {
                match ended {
                    Ok(slot) => slots.free(slot),
                    // Its lease went with it and ends by itself; which slot it was the table knows.
                    Err(error) => {
                        tracing::error!(%error, "a task's driver broke off");
                        slots.free_finished();
                    }
                }
                next_ask = Wake::now();
            }
            Some(command) = commands.next() => slots.command(command.body),
            Some(hint) = hints.next() => {
                if let Ok(RunnerCommand::WorkWaits) = hint.body {
                    hinted = true;
                    next_ask = Wake::now();
                }
            }
            changed = hello_wanted.changed() => {
                if changed.is_ok() {
                    tokio::select! {
                        greeted = hello(&shared) => greeted?,
                        () = &mut shutdown => break,
                    }
                    next_ask = Wake::now();
                }
            }
            () = tokio::time::sleep_until(next_ask), if asking.is_none() && slots.has_room() => {}
        }
    }

    tracing::info!(tasks = workers.len(), "handing tasks back");
    slots.drain();
    let handed_back = async { while workers.join_next().await.is_some() {} };
    if tokio::time::timeout(shared.config.timing.drain(), handed_back).await.is_err() {
        tracing::warn!("some tasks could not be handed back; their leases end by themselves");
    }
    keeper.stop();
    Ok(())
}

/// One runner per data folder: two would clear each other's worktrees.
fn claim(config: &Config) -> Result<File, Error> {
    let data_dir = |source| Error::DataDir { path: config.data_dir.clone(), source };
    std::fs::create_dir_all(&config.data_dir).map_err(data_dir)?;
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

async fn hello(shared: &Shared) -> Result<(), Error> {
    let subject = subject::runner(&shared.config.runner, "hello");
    let hello = RunnerHello {
        runner: shared.config.runner.clone(),
        boot: shared.boot,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    match shared.session.request_until_answered(&subject, &hello).await? {
        HelloReply::Welcome { .. } => {
            tracing::info!(runner = %shared.config.runner, boot = %shared.boot, "ready for tasks");
            Ok(())
        }
        HelloReply::Refused { reason } => Err(Error::Refused { reason }),
    }
}

type Asking = JoinHandle<Option<(Instant, LeaseReply)>>;

/// Asks once for a task, apart from the loop, so that a scheduler that is away does not delay commands.
fn ask(shared: &Arc<Shared>) -> Asking {
    let shared = shared.clone();
    tokio::spawn(async move {
        let asked_at = Instant::now();
        let subject = subject::runner(&shared.config.runner, "lease");
        match shared.session.request(&subject, &LeaseRequest { boot: shared.boot }).await {
            Ok(reply) => Some((asked_at, reply)),
            Err(error) => {
                tracing::debug!(%error, "no answer about a lease");
                None
            }
        }
    })
}

/// The answer to the question that is open; waits for ever where none is.
async fn settled(asking: &mut Option<Asking>) -> Option<(Instant, LeaseReply)> {
    match asking {
        Some(handle) => handle.await.unwrap_or(None),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_runner_per_data_folder() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            runner: "r1".parse().unwrap(),
            data_dir: folder.path().join("data"),
            concurrency: 2,
            nats: cfq_link::NatsConfig { url: "nats://127.0.0.1:1".into(), seed_file: None },
            timing: cfq_proto::timing::Timing::default(),
        };
        let first = claim(&config).unwrap();
        assert!(matches!(claim(&config), Err(Error::DataDirTaken { .. })));
        drop(first);
        claim(&config).unwrap();
    }
}
