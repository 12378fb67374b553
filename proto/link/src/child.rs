//! Child processes that do not outlive their supervisor. Each child is started with a parent-death signal, and recorded
//! in a pidfile so that the next start of the supervisor finds a child that survived.
//!
//! All children are spawned from one thread that never ends, because Linux sends the parent-death signal when the
//! spawning *thread* ends, not the process. Each child leads its own session, so Ctrl-C in the terminal reaches only
//! the supervisor, which then stops the children in order. A pidfile holds the process id and the start time, so that
//! another process with a reused id is never mistaken for the child. On systems without parent-death signals (macOS),
//! only the pidfiles are used.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use rustix::process::{Pid, Signal as Number, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use identity::ProcessIdentity;
pub use log::log_tail;
pub use pidfile::{Leftover, leftovers};
#[cfg(target_os = "linux")]
pub use privileges::limit_capabilities;
pub use privileges::{Account, Capabilities, Rights, with_account};
pub use spawn::{ProcessSpec, spawn};

mod identity;
mod log;
mod pidfile;
mod privileges;
mod spawn;

/// A failed operation on a child process.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program cannot be started.
    #[error("cannot start {name} ({program}){}", hint(source))]
    Spawn { name: String, program: PathBuf, source: io::Error },
    /// The log file of a child cannot be opened.
    #[error("cannot open {path}, the log of {name}")]
    Log { name: String, path: PathBuf, source: io::Error },
    /// The pidfile of a child cannot be written.
    #[error("cannot write {path}, the pidfile of {name}")]
    Pidfile { name: String, path: PathBuf, source: io::Error },
    /// The folder of pidfiles cannot be read.
    #[error("cannot read {path}, the folder of pidfiles")]
    Pidfiles { path: PathBuf, source: io::Error },
    /// The process cannot be signalled.
    #[error("cannot signal {name} (process {pid}); stop it by hand, for example with `kill {pid}`")]
    Signal { name: String, pid: u32, source: io::Error },
    /// A process of an earlier run survives SIGKILL.
    #[error("{name} (process {pid}) is left over from an earlier run and does not end after SIGKILL")]
    Unkillable { name: String, pid: u32 },
    /// A supervising thread cannot be started.
    #[error("cannot start a thread that supervises processes")]
    Thread(#[source] io::Error),
    /// The thread that spawns all children has ended.
    #[error("the thread that starts processes has ended")]
    ThreadGone,
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => ": no such file",
        io::ErrorKind::PermissionDenied => {
            ": the user it runs as may not execute it or may not enter a folder above it"
        }
        _ => "",
    }
}

/// A signal to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Signal {
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
    /// SIGHUP.
    Hangup,
    /// SIGKILL.
    Kill,
    /// SIGCONT.
    Continue,
}

impl Signal {
    fn number(self) -> Number {
        match self {
            Self::Terminate => Number::TERM,
            Self::Interrupt => Number::INT,
            Self::Hangup => Number::HUP,
            Self::Kill => Number::KILL,
            Self::Continue => Number::CONT,
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    /// The process was ended by this signal.
    Signalled(i32),
    /// The process ended, but its exit status could not be read.
    Unknown,
}

impl Exit {
    /// True for exit code 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signalled(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("unknown exit"),
        }
    }
}

/// A child process. Cheap to clone; dropping it does not stop the process.
#[derive(Debug, Clone)]
pub struct Process(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    identity: ProcessIdentity,
    pid: Pid,
    stop_signal: Signal,
    /// True once the process is reaped. The lock is held while reaping and while signalling, so that no signal reaches
    /// another process that reuses the id.
    reaped: Mutex<bool>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Process {
    /// Name of the process in logs and errors.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.0.identity.pid
    }

    /// Process id with the start time.
    pub fn identity(&self) -> &ProcessIdentity {
        &self.0.identity
    }

    /// How the process ended; `None` while it runs.
    pub fn exit(&self) -> Option<Exit> {
        *self.0.exit.borrow()
    }

    /// Waits until the process has ended and is reaped.
    pub async fn ended(&self) -> Exit {
        let mut exit = self.0.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            Err(_) => Exit::Unknown,
        }
    }

    /// Sends a signal; SIGKILL goes to the whole process group. Returns `false` if the process had already ended.
    ///
    /// # Errors
    /// [`ChildError::Signal`] if the signal cannot be sent.
    pub fn signal(&self, signal: Signal) -> Result<bool, ChildError> {
        let reaped = self.0.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        if *reaped {
            return Ok(false);
        }
        let sent = match signal {
            Signal::Kill => kill_process_group(self.0.pid, Number::KILL),
            Signal::Terminate | Signal::Interrupt | Signal::Hangup | Signal::Continue => {
                kill_process(self.0.pid, signal.number())
            }
        };
        sent.map(|()| true).map_err(|errno| ChildError::Signal {
            name: self.0.name.clone(),
            pid: self.pid(),
            source: errno.into(),
        })
    }

    /// Sends the stop signal, waits up to `grace`, and sends SIGKILL if the process has not ended by then. Returns how
    /// the process ended.
    ///
    /// # Errors
    /// [`ChildError::Signal`] if a signal cannot be sent.
    pub async fn stop(&self, grace: Duration) -> Result<Exit, ChildError> {
        self.signal(self.0.stop_signal)?;
        // A suspended process acts on the stop signal only after SIGCONT.
        self.signal(Signal::Continue)?;
        if let Ok(exit) = tokio::time::timeout(grace, self.ended()).await {
            return Ok(exit);
        }
        tracing::warn!(name = self.name(), pid = self.pid(), ?grace, "process does not stop, sending SIGKILL");
        self.signal(Signal::Kill)?;
        Ok(self.ended().await)
    }
}
