//! Child processes that outlive nothing: each is started so that it stops with us, and written down so that the next
//! start finds it if it did not.
//!
//! All children are spawned from one thread that never ends, because Linux sends the parent-death signal when the
//! spawning *thread* ends, not the process. Each child leads its own session: a Ctrl-C in the terminal reaches the
//! supervisor alone, which then stops things in order. A pidfile holds the process id together with the start time, so
//! a reused id is never taken for our process. Without parent-death signals (macOS) the pidfiles alone do the work.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;
use std::{fmt, thread};

use rustix::process::{Pid, Signal as Number, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use identity::ProcessIdentity;
pub use log::log_tail;
use pidfile::Record;
pub use pidfile::{Leftover, leftovers};

mod identity;
mod log;
mod pidfile;

#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    #[error("cannot start {name} ({program}){}", hint(source))]
    Spawn { name: String, program: PathBuf, source: io::Error },
    #[error("cannot open {path}, the log of {name}")]
    Log { name: String, path: PathBuf, source: io::Error },
    #[error("cannot write {path}, where the process id of {name} is kept")]
    Pidfile { name: String, path: PathBuf, source: io::Error },
    #[error("cannot read the folder of process ids {path}")]
    Pidfiles { path: PathBuf, source: io::Error },
    #[error("cannot signal {name} (process {pid}); stop it by hand, for example with `kill {pid}`")]
    Signal { name: String, pid: u32, source: io::Error },
    #[error("{name} (process {pid}) is left from an earlier run and does not end, not even by SIGKILL")]
    Immortal { name: String, pid: u32 },
    #[error("a thread that looks after processes could not be started")]
    Thread(#[source] io::Error),
    #[error("the thread that starts processes is gone")]
    ThreadGone,
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => ": no such file",
        io::ErrorKind::PermissionDenied => ": it, or a folder above it, may not be executed by the user it runs as",
        _ => "",
    }
}

/// What can be sent to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Signal {
    Terminate,
    Interrupt,
    Hangup,
    Kill,
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

/// The user a child runs as; only root can choose another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

/// How to start one child.
#[derive(Debug, Clone)]
pub struct Spec {
    /// What logs and errors call it.
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Start with an empty environment; `env` is added after.
    pub clear_env: bool,
    pub env: Vec<(OsString, OsString)>,
    pub cwd: PathBuf,
    /// Its stdout and stderr, appended; moved aside when it grows too large.
    pub log: PathBuf,
    pub pidfile: PathBuf,
    pub run_as: Option<Account>,
    /// Asks it to end in good order; also sent when we die.
    pub stop_signal: Signal,
}

impl Spec {
    /// The environment is kept, the folder is `/`, and SIGTERM stops it.
    pub fn new(name: &str, program: &Path, log: &Path, pidfile: &Path) -> Self {
        Self {
            name: name.to_owned(),
            program: program.to_owned(),
            args: Vec::new(),
            clear_env: false,
            env: Vec::new(),
            cwd: PathBuf::from("/"),
            log: log.to_owned(),
            pidfile: pidfile.to_owned(),
            run_as: None,
            stop_signal: Signal::Terminate,
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signalled(i32),
    /// It ended, but how is not known.
    Unknown,
}

impl Exit {
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

/// A running child. Cheap to clone; dropping it stops nothing.
#[derive(Debug, Clone)]
pub struct Process(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    identity: ProcessIdentity,
    pid: Pid,
    stop_signal: Signal,
    /// Held while reaping and while signalling, so that no signal goes to a reused id. True once reaped.
    reaped: Mutex<bool>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Process {
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn pid(&self) -> u32 {
        self.0.identity.pid
    }

    pub fn identity(&self) -> &ProcessIdentity {
        &self.0.identity
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.0.exit.borrow()
    }

    /// Completes when the process has ended and is reaped.
    pub async fn ended(&self) -> Exit {
        let mut exit = self.0.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            Err(_) => Exit::Unknown,
        }
    }

    /// `false` if it had already ended. SIGKILL goes to its whole process group.
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

    /// Asks it to end, and ends it if it has not after `grace`.
    pub async fn stop(&self, grace: Duration) -> Result<Exit, ChildError> {
        self.signal(self.0.stop_signal)?;
        // One that was suspended would only act on it after that.
        self.signal(Signal::Continue)?;
        if let Ok(exit) = tokio::time::timeout(grace, self.ended()).await {
            return Ok(exit);
        }
        tracing::warn!(name = self.name(), pid = self.pid(), ?grace, "does not stop, killing it");
        self.signal(Signal::Kill)?;
        Ok(self.ended().await)
    }
}

type Request = (Spec, mpsc::SyncSender<Result<Process, ChildError>>);

/// Starts a child from the thread kept for that.
pub fn spawn(spec: Spec) -> Result<Process, ChildError> {
    static SPAWNER: Mutex<Option<mpsc::SyncSender<Request>>> = Mutex::new(None);
    let (answer, answered) = mpsc::sync_channel(1);
    {
        let mut spawner = SPAWNER.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match spawner.as_ref() {
            Some(sender) => sender,
            None => {
                let (sender, requests) = mpsc::sync_channel::<Request>(1);
                let serve = move || {
                    for (spec, answer) in requests {
                        if answer.send(start(spec)).is_err() {
                            tracing::debug!("nobody waits for the process just started");
                        }
                    }
                };
                thread::Builder::new().name("spawner".into()).spawn(serve).map_err(ChildError::Thread)?;
                spawner.insert(sender)
            }
        };
        sender.send((spec, answer)).map_err(|_| ChildError::ThreadGone)?;
    }
    answered.recv().map_err(|_| ChildError::ThreadGone)?
}

fn start(spec: Spec) -> Result<Process, ChildError> {
    let Spec { name, program, args, clear_env, env, cwd, log, pidfile, run_as, stop_signal } = spec;
    let log_failed = |source| ChildError::Log { name: name.clone(), path: log.clone(), source };
    let out = log::open(&log).map_err(log_failed)?;
    let err = out.try_clone().map_err(log_failed)?;
    let mut command = Command::new(&program);
    command.args(args).current_dir(cwd).stdin(Stdio::null()).stdout(out).stderr(err);
    if clear_env {
        command.env_clear();
    }
    command.envs(env);
    if let Some(account) = run_as {
        command.uid(account.uid).gid(account.gid);
    }
    #[cfg(target_os = "linux")]
    let parent = rustix::process::getpid();
    let prepare = move || {
        rustix::process::setsid()?;
        #[cfg(target_os = "linux")]
        {
            // After the change of user, which the standard library does first and which clears this.
            rustix::process::set_parent_process_death_signal(Some(stop_signal.number()))?;
            // The parent may have died before the line above.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(())
    };
    // SAFETY: `prepare` runs between fork and exec, where only async-signal-safe calls are sound; it makes three plain
    // system calls, allocates nothing and takes no lock.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(prepare);
    }
    let spawn_failed = |source| ChildError::Spawn { name: name.clone(), program: program.clone(), source };
    let bounded = log::bound(&log).map_err(ChildError::Thread)?;
    let mut child = command.spawn().map_err(spawn_failed)?;
    let pid = child.id();
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let (Some(raw), Some(identity)) = (raw, ProcessIdentity::of_child(pid)) else {
        child.kill().and_then(|()| child.wait()).map_err(spawn_failed)?;
        return Err(spawn_failed(io::Error::other("its start time cannot be read; is /proc mounted?")));
    };
    let record = Record { name: name.clone(), identity: identity.clone(), stop_signal };
    if let Err(source) = pidfile::write(&pidfile, &record) {
        // A process nobody could find again must not run.
        if let Err(error) = child.kill().and_then(|()| child.wait()) {
            tracing::error!(%pid, %error, "cannot end a process that could not be written down");
        }
        return Err(ChildError::Pidfile { name, path: pidfile, source });
    }
    let (sender, exit) = watch::channel(None);
    let process = Process(Arc::new(Inner { name, identity, pid: raw, stop_signal, reaped: Mutex::new(false), exit }));
    let watched = process.clone();
    thread::Builder::new()
        .name(format!("wait-{pid}"))
        .spawn(move || {
            let exit = reap(&watched.0, child);
            pidfile::remove(&pidfile, &watched.0.identity);
            drop(bounded);
            sender.send_replace(Some(exit));
        })
        .map_err(ChildError::Thread)?;
    Ok(process)
}

/// Waits without reaping, then reaps under the lock that [`Process::signal`] takes.
fn reap(inner: &Inner, mut child: Child) -> Exit {
    let how = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(inner.pid), how) {}
    let mut reaped = inner.reaped.lock().unwrap_or_else(PoisonError::into_inner);
    let status = child.wait();
    *reaped = true;
    match status {
        Ok(status) => status.code().map(Exit::Code).or(status.signal().map(Exit::Signalled)).unwrap_or(Exit::Unknown),
        Err(_) => Exit::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_millis(10);

    fn shell(folder: &Path, script: &str) -> Spec {
        let mut spec = Spec::new("sh", Path::new("/bin/sh"), &folder.join("sh.log"), &folder.join("sh.pid"));
        spec.args = vec!["-c".into(), script.into()];
        spec
    }

    async fn said(log: &Path, word: &str) {
        let wait = async {
            while !log_tail(log, 4096).contains(word) {
                tokio::time::sleep(POLL).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap();
    }

    #[tokio::test]
    async fn the_end_is_told_and_the_pidfile_removed() {
        let folder = tempfile::tempdir().unwrap();
        let process = spawn(shell(folder.path(), "read line; exit 7")).unwrap();
        assert_eq!(process.ended().await, Exit::Code(7), "stdin is empty, so the read ends at once");
        assert!(!folder.path().join("sh.pid").exists());
        assert!(!process.signal(Signal::Terminate).unwrap());
    }

    #[tokio::test]
    async fn a_child_that_will_not_stop_is_killed_with_its_group() {
        let folder = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; sleep 300 & echo child $!; echo ready; while :; do sleep 1; done";
        let process = spawn(shell(folder.path(), script)).unwrap();
        let log = folder.path().join("sh.log");
        said(&log, "ready").await;
        let grandchild: u32 =
            log_tail(&log, 4096).lines().find_map(|l| l.strip_prefix("child ")).unwrap().parse().unwrap();
        let grandchild = ProcessIdentity::of(grandchild).unwrap();
        assert_eq!(process.stop(Duration::from_millis(100)).await.unwrap(), Exit::Signalled(9));
        assert!(grandchild.ended(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn it_leads_its_own_session() {
        let folder = tempfile::tempdir().unwrap();
        let process = spawn(shell(folder.path(), "cut -d' ' -f6 /proc/$$/stat; exec sleep 300")).unwrap();
        said(&folder.path().join("sh.log"), &process.pid().to_string()).await;
        process.stop(Duration::from_secs(5)).await.unwrap();
    }

    #[test]
    fn a_missing_program_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = shell(folder.path(), "");
        spec.program = "/nowhere/cfq".into();
        let error = spawn(spec).unwrap_err().to_string();
        assert!(error.contains("/nowhere/cfq") && error.contains("no such file"), "{error}");
    }
}
