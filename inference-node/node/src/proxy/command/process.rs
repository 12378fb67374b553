//! The process of one run: it is started with its own process group and gets the input. When it is dropped, its group gets
//! SIGTERM, and SIGKILL a second later.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdout, Command};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::folder::RunFolder;
use super::invocation::Invocation;

/// Size of one read of the standard output, in bytes.
const READ_BYTES: usize = 16 << 10;
/// Maximum kept end of the standard error, in bytes.
const MAX_ERROR_BYTES: usize = 16 << 10;
/// Maximum time in which a program ends after its reply or after it has closed its output.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of the checks whether the process has ended.
const END_INTERVAL: Duration = Duration::from_millis(20);
/// Time that a program has to store its state before it is killed: agents store renewed logins.
const TERMINATION_GRACE: Duration = Duration::from_secs(1);

/// A running program.
pub(super) struct Program {
    /// The process and the folder of the run; `None` once it has ended.
    running: Option<(Child, RunFolder)>,
    output: ChildStdout,
    /// Writes the input; ends early if the program does not read it.
    input: JoinHandle<()>,
    /// Reads the standard error; its result is the end of it.
    errors: JoinHandle<Vec<u8>>,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct End {
    /// `None` if it did not end after it had closed its output.
    pub(super) status: Option<ExitStatus>,
    /// The end of the standard error.
    pub(super) errors: String,
}

impl End {
    /// The last line of the standard error that is not empty.
    pub(super) fn last_error(&self) -> &str {
        self.errors.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default()
    }
}

impl Program {
    /// Starts the program and feeds it the input. Must be called within a tokio runtime.
    pub(super) fn start(invocation: Invocation) -> io::Result<Self> {
        let mut command = Command::new(&invocation.program);
        command
            .args(&invocation.args)
            .env_clear()
            .envs(invocation.environment)
            .current_dir(invocation.folder.working())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        #[cfg(target_os = "linux")]
        drop_capabilities_and_end_with_node(&mut command);
        let mut child = command.spawn()?;
        let (Some(mut stdin), Some(output), Some(mut stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("its standard input and output are not connected"));
        };
        let text = invocation.input;
        let input = tokio::spawn(async move {
            // A program may reply without reading everything.
            if let Err(error) = stdin.write_all(text.as_bytes()).await {
                tracing::debug!(%error, "a program does not read its input");
            }
        });
        let errors = tokio::spawn(async move {
            let (mut end, mut buffer) = (Vec::new(), vec![0; READ_BYTES]);
            while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
                end.extend_from_slice(&buffer[..read]);
                end.drain(..end.len().saturating_sub(MAX_ERROR_BYTES));
            }
            end
        });
        Ok(Self { running: Some((child, invocation.folder)), output, input, errors })
    }

    /// The next bytes of the standard output; `None` at its end.
    pub(super) async fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = vec![0; READ_BYTES];
        let read = self.output.read(&mut buffer).await?;
        buffer.truncate(read);
        Ok((read > 0).then_some(buffer))
    }

    /// Waits for the end of a program whose reply is complete, or that has closed its output. Ends what it left running.
    pub(super) async fn end(mut self) -> End {
        let group = self.group();
        let began = Instant::now();
        while group.is_some_and(|leader| !has_ended(leader)) && began.elapsed() < END_TIMEOUT {
            tokio::time::sleep(END_INTERVAL).await;
        }
        let mut status = None;
        if group.is_some_and(has_ended)
            && let Some((mut child, _folder)) = self.running.take()
        {
            // The leader is not reaped yet, so its number belongs to no other process.
            signal(group, Signal::KILL);
            status = child.wait().await.ok();
        }
        let errors = tokio::time::timeout(END_TIMEOUT, &mut self.errors).await.ok().and_then(Result::ok);
        End { status, errors: String::from_utf8_lossy(&errors.unwrap_or_default()).into_owned() }
    }

    fn group(&self) -> Option<Pid> {
        let (child, _) = self.running.as_ref()?;
        child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw)
    }
}

/// Whether the process has ended and waits to be reaped.
fn has_ended(process: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(process), options), Ok(None))
}

fn signal(group: Option<Pid>, signal: Signal) {
    if let Some(group) = group
        && let Err(error) = kill_process_group(group, signal)
    {
        tracing::debug!(%error, "the processes of a program have ended");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.input.abort();
        let group = self.group();
        let Some((mut child, folder)) = self.running.take() else { return };
        match Handle::try_current() {
            Ok(runtime) => {
                signal(group, Signal::TERM);
                // The process is reaped only after the last signal, so its number belongs to no other process before.
                runtime.spawn(async move {
                    let began = Instant::now();
                    while group.is_some_and(|leader| !has_ended(leader)) && began.elapsed() < TERMINATION_GRACE {
                        tokio::time::sleep(END_INTERVAL).await;
                    }
                    signal(group, Signal::KILL);
                    drop(child.wait().await);
                    drop(folder);
                });
            }
            Err(_) => signal(group, Signal::KILL),
        }
    }
}

/// Ends the program with the node, and gives it no capability: a node that root started may read all files.
#[cfg(target_os = "linux")]
fn drop_capabilities_and_end_with_node(command: &mut Command) {
    use cfq_link::child::{Capabilities, limit_capabilities};
    let parent = rustix::process::getpid();
    let prepare = move || {
        limit_capabilities(Capabilities::NONE, Capabilities::NONE)?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The node may have died before the call above; the signal would then never be sent.
        match rustix::process::getppid() == Some(parent) {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: `prepare` runs between fork and exec, where only async-signal-safe calls are sound; it makes only plain
    // system calls, allocates nothing and takes no lock.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(prepare);
    }
}
