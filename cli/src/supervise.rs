//! Supervision of the scheduler, node and runner processes: each is restarted when it exits, with exponential backoff,
//! and stopped on request. A restart is sufficient after a crash, because the processes keep no state in memory that
//! must not be lost.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::paths::closed_parent;
use cfq_deploy::{Paths, files};
use cfq_link::child::{self, ProcessSpec};
use cfq_link::stop::{Stop, Stopper};
use serde::Serialize;
use tokio::task::JoinHandle;

use crate::exit::Code;
use crate::rights::ProcessRights;

/// Delay before the first restart; it doubles with each further one, up to [`BACKOFF_CAP`].
const BACKOFF_BASE: Duration = Duration::from_millis(200);
const BACKOFF_CAP: Duration = Duration::from_secs(10);
/// Minimum running time of a healthy process: after a longer run, the backoff starts from [`BACKOFF_BASE`] again.
const MIN_HEALTHY_TIME: Duration = Duration::from_secs(30);

/// A supervised process.
pub struct SupervisedProcess {
    name: &'static str,
    stopper: Stopper,
    task: JoinHandle<()>,
    has_refused: Arc<AtomicBool>,
}

/// The running program. The path is valid for every account, and only in the process that is being started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How a process is started: with exactly this environment, and `CFQ_LOG`.
pub struct Start<'a> {
    pub paths: &'a Paths,
    /// Level of the log, if the environment does not set it.
    pub level: &'a str,
    /// Time for an orderly stop.
    pub grace: Duration,
    pub environment: Vec<(OsString, OsString)>,
    pub rights: ProcessRights,
    pub stdin: Option<OwnedFd>,
}

/// Writes the process's configuration, with mode 0600 because it contains the paths of secrets, and starts the process.
pub fn start<C: Serialize>(name: &'static str, config: &C, start: Start<'_>) -> anyhow::Result<SupervisedProcess> {
    let Start { paths, level, grace, environment, rights, stdin } = start;
    let path = paths.run().join(format!("{name}.toml"));
    let text = toml::to_string(config).with_context(|| format!("cannot write the configuration of the {name}"))?;
    match rights.account {
        // The account must not change what its process reads with more rights than its own.
        Some(account) => files::write_for_reader(&path, text.as_bytes(), account)?,
        None => files::write_private(&path, text.as_bytes(), None)?,
    }
    let mut program = std::env::current_exe().context("cannot determine the path of the cfq binary")?;
    if cfg!(target_os = "linux") && rights.account.is_some_and(|account| closed_parent(&program, account).is_some()) {
        program = PathBuf::from(THIS_PROGRAM);
    }
    let mut spec = ProcessSpec::new(name, &program, &paths.log(name), &paths.pidfile(name));
    spec.args = vec![OsString::from("serve"), OsString::from(name), path.into_os_string()];
    spec.run_as = rights.account;
    spec.rights = rights.rights;
    spec.stdin = stdin.map(Arc::new);
    spec.clear_env = true;
    spec.env = environment;
    if !spec.env.iter().any(|(variable, _)| variable == "CFQ_LOG") {
        spec.env.push(("CFQ_LOG".into(), level.into()));
    }
    let process = child::spawn(spec.clone())?;
    let (stopper, stop) = cfq_link::stop::channel();
    let has_refused = Arc::new(AtomicBool::new(false));
    let task = tokio::spawn(supervise(name, spec, process, stop, grace, has_refused.clone()));
    Ok(SupervisedProcess { name, stopper, task, has_refused })
}

impl SupervisedProcess {
    /// Whether the process has ended with the exit code of wrong usage: a restart does not help.
    pub fn has_refused(&self) -> bool {
        self.has_refused.load(Ordering::Relaxed)
    }

    /// Stops the process; returns when it has exited.
    pub async fn stop(self) {
        self.stopper.stop();
        if let Err(error) = self.task.await {
            tracing::error!(process = self.name, %error, "supervisor failed");
        }
    }
}

async fn supervise(
    name: &'static str,
    spec: ProcessSpec,
    first: child::Process,
    mut stop: Stop,
    grace: Duration,
    has_refused: Arc<AtomicBool>,
) {
    let mut process = first;
    let mut backoff = BACKOFF_BASE;
    loop {
        let started = Instant::now();
        tokio::select! {
            exit = process.ended() => {
                has_refused.fetch_or(exit == child::Exit::Code(Code::Usage as i32), Ordering::Relaxed);
                tracing::warn!(process = name, %exit, "process exited, restarting it");
            }
            () = stop.raised() => {
                if let Err(error) = process.stop(grace).await {
                    tracing::error!(process = name, %error, "cannot stop the process");
                }
                return;
            }
        }
        if started.elapsed() > MIN_HEALTHY_TIME {
            backoff = BACKOFF_BASE;
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stop.raised() => return,
            }
            backoff = (backoff * 2).min(BACKOFF_CAP);
            match child::spawn(spec.clone()) {
                Ok(restarted) => {
                    process = restarted;
                    break;
                }
                Err(error) => tracing::error!(process = name, %error, "cannot restart the process"),
            }
        }
    }
}
