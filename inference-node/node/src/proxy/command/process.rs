//! The process of one run: it is started with its own process group, gets the input, and is killed with its group when
//! it is dropped.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;

use super::invocation::Invocation;

/// Size of one read of the standard output, in bytes.
const READ_BYTES: usize = 16 << 10;
/// Maximum kept end of the standard error, in bytes.
const MAX_ERROR_BYTES: usize = 4 << 10;
/// Time in which a program ends after it has closed its output.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A running program.
pub(super) struct Program {
    /// `None` once it has ended.
    child: Option<Child>,
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
    /// The last line of the standard error that is not empty.
    pub(super) last_error: String,
}

impl Program {
    /// Starts the program and feeds it the input. Must be called within a tokio runtime.
    pub(super) fn start(invocation: &Invocation) -> io::Result<Self> {
        let mut command = Command::new(&invocation.program);
        command
            .args(&invocation.args)
            .env_clear()
            .envs(invocation.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(invocation.working_folder())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        #[cfg(target_os = "linux")]
        limit(&mut command);
        let mut child = command.spawn()?;
        let (Some(mut stdin), Some(output), Some(mut stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("its standard input and output are not connected"));
        };
        let text = invocation.input.clone();
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
        Ok(Self { child: Some(child), output, input, errors })
    }

    /// The next bytes of the standard output; `None` at its end.
    pub(super) async fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = vec![0; READ_BYTES];
        let read = self.output.read(&mut buffer).await?;
        buffer.truncate(read);
        Ok((read > 0).then_some(buffer))
    }

    /// Waits for the end of a program that has closed its output.
    pub(super) async fn end(mut self) -> End {
        let status = match &mut self.child {
            Some(child) => tokio::time::timeout(END_TIMEOUT, child.wait()).await.ok().and_then(Result::ok),
            None => None,
        };
        if status.is_some() {
            // The process id may be reused from here on.
            self.child = None;
        }
        let errors = tokio::time::timeout(END_TIMEOUT, &mut self.errors).await.ok().and_then(Result::ok);
        let errors = String::from_utf8_lossy(&errors.unwrap_or_default()).into_owned();
        let last_error = errors.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default().to_owned();
        End { status, last_error }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.input.abort();
        self.errors.abort();
        let id = self.child.as_ref().and_then(Child::id).and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(group) = id
            && let Err(error) = kill_process_group(group, Signal::KILL)
        {
            tracing::debug!(%error, "cannot end the processes of a program");
        }
    }
}

/// Ends the program with the node, and gives it no capability: a node that root started may read all files.
#[cfg(target_os = "linux")]
fn limit(command: &mut Command) {
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
