//! Starting a child process.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use tokio::sync::watch;

use super::pidfile::{self, PidRecord};
#[cfg(target_os = "linux")]
use super::privileges;
use super::privileges::{Account, Rights};
use super::{ChildError, Exit, Inner, Process, ProcessIdentity, Signal, log};

/// Description of a child to start.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    /// Name of the process in logs and errors.
    pub name: String,
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
    /// True to start with an empty environment, to which `env` is added, instead of the supervisor's environment.
    pub clear_env: bool,
    /// Additional environment variables.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    pub cwd: PathBuf,
    /// File that stdout and stderr are appended to; rotated when it grows too large.
    pub log: PathBuf,
    /// Path of the pidfile.
    pub pidfile: PathBuf,
    /// Account to run as, if not the supervisor's own.
    pub run_as: Option<Account>,
    /// Rights of the child, if fewer than those of a process that its account starts. Linux only.
    pub rights: Option<Rights>,
    /// File that becomes the child's stdin, if not `/dev/null`.
    pub stdin: Option<Arc<OwnedFd>>,
    /// Signal for an orderly stop; also the parent-death signal.
    pub stop_signal: Signal,
}

impl ProcessSpec {
    /// Creates a description with the supervisor's environment, the working directory `/` and SIGTERM as stop signal.
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
            rights: None,
            stdin: None,
            stop_signal: Signal::Terminate,
        }
    }
}

/// Request to the spawning thread: a child to start, and the channel for the result.
type SpawnRequest = (ProcessSpec, mpsc::SyncSender<Result<Process, ChildError>>);

/// Starts a child process. The child is spawned on the spawning thread, which never ends.
///
/// # Errors
/// See [`ChildError`].
pub fn spawn(spec: ProcessSpec) -> Result<Process, ChildError> {
    static SPAWNER: Mutex<Option<mpsc::SyncSender<SpawnRequest>>> = Mutex::new(None);
    let (reply, result) = mpsc::sync_channel(1);
    {
        let mut spawner = SPAWNER.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match spawner.as_ref() {
            Some(sender) => sender,
            None => {
                let (sender, requests) = mpsc::sync_channel::<SpawnRequest>(1);
                let serve = move || {
                    for (spec, reply) in requests {
                        if reply.send(start(spec)).is_err() {
                            tracing::debug!("the caller that started a process is gone");
                        }
                    }
                };
                thread::Builder::new().name("spawner".into()).spawn(serve).map_err(ChildError::Thread)?;
                spawner.insert(sender)
            }
        };
        sender.send((spec, reply)).map_err(|_| ChildError::ThreadGone)?;
    }
    result.recv().map_err(|_| ChildError::ThreadGone)?
}

fn start(spec: ProcessSpec) -> Result<Process, ChildError> {
    let ProcessSpec { name, program, args, clear_env, env, cwd, log, pidfile, run_as, rights, stdin, stop_signal } =
        spec;
    let spawn_failed = |source| ChildError::Spawn { name: name.clone(), program: program.clone(), source };
    let stdin = match stdin {
        Some(stdin) => Stdio::from(stdin.try_clone().map_err(spawn_failed)?),
        None => Stdio::null(),
    };
    let log_failed = |source| ChildError::Log { name: name.clone(), path: log.clone(), source };
    let out = log::open(&log).map_err(log_failed)?;
    let err = out.try_clone().map_err(log_failed)?;
    let mut command = Command::new(&program);
    command.args(args).current_dir(cwd).stdin(stdin).stdout(out).stderr(err);
    if clear_env {
        command.env_clear();
    }
    command.envs(env);
    let rights = rights.filter(|_| cfg!(target_os = "linux"));
    if let (Some(account), None) = (run_as, &rights) {
        command.uid(account.uid).gid(account.gid);
    }
    #[cfg(target_os = "linux")]
    let parent = rustix::process::getpid();
    let prepare = move || {
        rustix::process::setsid()?;
        #[cfg(target_os = "linux")]
        {
            if let Some(rights) = &rights {
                privileges::apply(run_as, rights)?;
            }
            // The parent-death signal is set here, after the change of the user, which clears it.
            rustix::process::set_parent_process_death_signal(Some(stop_signal.number()))?;
            // The parent may have died before the call above; the parent-death signal would then never be sent.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(())
    };
    // SAFETY: `prepare` runs between fork and exec, where only async-signal-safe calls are sound; it makes only plain
    // system calls, allocates nothing and takes no lock.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(prepare);
    }
    let log_limit = log::limit_size(&log).map_err(ChildError::Thread)?;
    let mut child = command.spawn().map_err(spawn_failed)?;
    let pid = child.id();
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let (Some(raw), Some(identity)) = (raw, ProcessIdentity::of_child(pid)) else {
        child.kill().and_then(|()| child.wait()).map_err(spawn_failed)?;
        return Err(spawn_failed(io::Error::other("its start time cannot be read; is /proc mounted?")));
    };
    let user = run_as.map_or_else(|| rustix::process::getuid().as_raw(), |account| account.uid);
    let record =
        PidRecord { name: name.clone(), identity: identity.clone(), user: Some(user), stop_signal, folder: None };
    if let Err(source) = pidfile::write(&pidfile, &record) {
        // A process without a pidfile must not run, because the next start of the supervisor could not find it.
        if let Err(error) = child.kill().and_then(|()| child.wait()) {
            tracing::error!(%pid, %error, "cannot end a process whose pidfile could not be written");
        }
        return Err(ChildError::Pidfile { name, path: pidfile, source });
    }
    let (sender, exit) = watch::channel(None);
    let process = Process(Arc::new(Inner { name, identity, pid: raw, stop_signal, reaped: Mutex::new(false), exit }));
    let supervised = process.clone();
    thread::Builder::new()
        .name(format!("wait-{pid}"))
        .spawn(move || {
            let exit = reap(&supervised.0, child);
            pidfile::remove(&pidfile, &supervised.0.identity);
            drop(log_limit);
            sender.send_replace(Some(exit));
        })
        .map_err(ChildError::Thread)?;
    Ok(process)
}

/// Waits for the end of the child, but reaps it only under the lock that [`Process::signal`] also takes.
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
    use std::time::Duration;

    use super::super::log_tail;
    use super::*;

    const POLL_INTERVAL: Duration = Duration::from_millis(10);

    fn shell(folder: &Path, script: &str) -> ProcessSpec {
        let mut spec = ProcessSpec::new("sh", Path::new("/bin/sh"), &folder.join("sh.log"), &folder.join("sh.pid"));
        spec.args = vec!["-c".into(), script.into()];
        spec
    }

    async fn wait_for_log(log: &Path, word: &str) {
        let wait = async {
            while !log_tail(log, 4096).contains(word) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap();
    }

    #[tokio::test]
    async fn exit_is_reported_and_pidfile_removed() {
        let folder = tempfile::tempdir().unwrap();
        let process = spawn(shell(folder.path(), "read line; exit 7")).unwrap();
        assert_eq!(process.ended().await, Exit::Code(7), "stdin is empty, so the read ends at once");
        assert!(!folder.path().join("sh.pid").exists());
        assert!(!process.signal(Signal::Terminate).unwrap());
    }

    #[tokio::test]
    async fn child_that_ignores_the_stop_signal_is_killed_with_its_group() {
        let folder = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; sleep 300 & echo child $!; echo ready; while :; do sleep 1; done";
        let process = spawn(shell(folder.path(), script)).unwrap();
        let log = folder.path().join("sh.log");
        wait_for_log(&log, "ready").await;
        let grandchild: u32 =
            log_tail(&log, 4096).lines().find_map(|l| l.strip_prefix("child ")).unwrap().parse().unwrap();
        let grandchild = ProcessIdentity::of(grandchild).unwrap();
        assert_eq!(process.stop(Duration::from_millis(100)).await.unwrap(), Exit::Signalled(9));
        assert!(grandchild.ended(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn child_leads_its_own_session() {
        let folder = tempfile::tempdir().unwrap();
        let process = spawn(shell(folder.path(), "cut -d' ' -f6 /proc/$$/stat; exec sleep 300")).unwrap();
        wait_for_log(&folder.path().join("sh.log"), &process.pid().to_string()).await;
        process.stop(Duration::from_secs(5)).await.unwrap();
    }

    #[test]
    fn missing_program_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = shell(folder.path(), "");
        spec.program = "/nowhere/cfq".into();
        let error = spawn(spec).unwrap_err().to_string();
        assert!(error.contains("/nowhere/cfq") && error.contains("no such file"), "{error}");
    }
}
