//! The node's side of one child process.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cfq_engine::ModelFacts;

use super::messages::{self, LENGTH_BYTES, MAX_REPLY_BYTES, Order, Reply};
use super::{Sandbox, SandboxError};

/// Variable that a child keeps, because a program that was built for CUDA may need it to find the driver's libraries.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// Interval at which a wait for a child checks whether the caller still waits.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time after the limit of a prompt in which the child notices by itself that it has to stop.
const STOP_TIME: Duration = Duration::from_secs(2);
/// Time for which a cancelled prompt may continue: most end by then, and a new child would cost more.
const CANCEL_TIME: Duration = Duration::from_secs(1);
/// Wait for the exit status of a child that has closed its connection.
const EXIT_TIME: Duration = Duration::from_secs(1);

/// A running child. Dropping it kills it and waits until it has ended.
pub(super) struct Child {
    process: std::process::Child,
    stream: UnixStream,
    memory_bytes: u64,
}

/// How long a child's reply is awaited.
struct Wait<'a> {
    since: Instant,
    limit: Duration,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl Child {
    /// Starts a child and waits until it has read the file. The child is killed when the calling thread ends, since
    /// Linux sends the parent-death signal at the end of the thread that started the process.
    pub(super) fn start(sandbox: &Sandbox, path: &Path) -> Result<(Self, ModelFacts), SandboxError> {
        let limits = sandbox.limits;
        let mut child = Self::spawn(sandbox).map_err(|source| SandboxError::Start { path: path.to_owned(), source })?;
        // The child works in another folder.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let prompt_ms = u64::try_from(limits.prompt.as_millis()).unwrap_or(u64::MAX);
        let order = Order::Start { path, memory_bytes: limits.memory_bytes, prompt_ms };
        let wait = Wait { since: Instant::now(), limit: limits.start, is_cancelled: &|| false };
        match child.exchange(&order, &wait)? {
            Reply::Started { facts, protection } => {
                tracing::debug!(?facts, ?protection, "model file inspected");
                Ok((child, facts))
            }
            Reply::File { fault, detail } => Err(SandboxError::File { fault, detail }),
            Reply::Tokens(_) | Reply::Failed(_) => Err(unexpected()),
        }
    }

    fn spawn(sandbox: &Sandbox) -> io::Result<Self> {
        let (own, childs) = UnixStream::pair()?;
        let input: OwnedFd = childs.try_clone()?.into();
        let mut command = Command::new(&sandbox.program);
        command.args(&sandbox.args).env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::from(input)).stdout(Stdio::from(OwnedFd::from(childs))).stderr(Stdio::null());
        if let Some(path) = std::env::var_os(LIBRARY_PATH) {
            command.env(LIBRARY_PATH, path);
        }
        let process = command.spawn()?;
        Ok(Self { process, stream: own, memory_bytes: sandbox.limits.memory_bytes })
    }

    /// Sends a prompt and waits for its tokens or its failure, for `limit` at most.
    pub(super) fn prompt(
        &mut self,
        order: &Order,
        limit: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Reply, SandboxError> {
        let wait = Wait { since: Instant::now(), limit: limit + STOP_TIME, is_cancelled };
        match self.exchange(order, &wait)? {
            reply @ (Reply::Tokens(_) | Reply::Failed(_)) => Ok(reply),
            Reply::Started { .. } | Reply::File { .. } => Err(unexpected()),
        }
    }

    fn exchange(&mut self, order: &Order, wait: &Wait<'_>) -> Result<Reply, SandboxError> {
        let invalid = |error: io::Error| SandboxError::Reply { reason: error.to_string() };
        self.send(&messages::encode(order).map_err(invalid)?, wait)?;
        let mut length = [0; LENGTH_BYTES];
        self.receive(&mut length, wait)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_REPLY_BYTES {
            return Err(SandboxError::Reply { reason: format!("it has {length} bytes, more than {MAX_REPLY_BYTES}") });
        }
        let mut bytes = vec![0; length];
        self.receive(&mut bytes, wait)?;
        serde_json::from_slice(&bytes).map_err(|error| SandboxError::Reply { reason: error.to_string() })
    }

    fn send(&mut self, mut bytes: &[u8], wait: &Wait<'_>) -> Result<(), SandboxError> {
        while !bytes.is_empty() {
            let timeout = wait.next_timeout()?;
            let sent = self.stream.set_write_timeout(Some(timeout)).and_then(|()| self.stream.write(bytes));
            bytes = &bytes[self.transferred(sent)?..];
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8], wait: &Wait<'_>) -> Result<(), SandboxError> {
        let mut done = 0;
        while done < buffer.len() {
            let timeout = wait.next_timeout()?;
            let read = self.stream.set_read_timeout(Some(timeout));
            let read = read.and_then(|()| match self.stream.read(&mut buffer[done..])? {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                count => Ok(count),
            });
            done += self.transferred(read)?;
        }
        Ok(())
    }

    /// Number of bytes of one transfer; zero at a timeout.
    fn transferred(&mut self, result: io::Result<usize>) -> Result<usize, SandboxError> {
        match result {
            Ok(count) => Ok(count),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(0)
            }
            Err(_) => Err(SandboxError::Ended { exit: self.exit(), memory_bytes: self.memory_bytes }),
        }
    }

    /// How the child ended, after it has closed its connection.
    fn exit(&mut self) -> String {
        let started = Instant::now();
        while started.elapsed() < EXIT_TIME {
            match self.process.try_wait() {
                Ok(Some(status)) => return describe(status),
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return error.to_string(),
            }
        }
        "a closed connection".to_owned()
    }

    /// Process id.
    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Wait<'_> {
    /// Time until the next check of this wait.
    fn next_timeout(&self) -> Result<Duration, SandboxError> {
        let elapsed = self.since.elapsed();
        if elapsed > CANCEL_TIME && (self.is_cancelled)() {
            return Err(SandboxError::Cancelled);
        }
        match self.limit.saturating_sub(elapsed) {
            Duration::ZERO => Err(SandboxError::OutOfTime { limit: self.limit }),
            left => Ok(left.min(POLL_INTERVAL)),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        if let Err(error) = self.process.wait() {
            tracing::warn!(pid = self.process.id(), %error, "cannot wait for the end of a child process");
        }
    }
}

fn unexpected() -> SandboxError {
    SandboxError::Reply { reason: "it belongs to another message".to_owned() }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown exit status".to_owned(),
    }
}
