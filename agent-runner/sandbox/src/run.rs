//! The caller's side: starts a launcher, captures the output of the program, and reads the result.

use std::ffi::OsString;
use std::fs;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::protocol::{FailedStep, LISTENER, LaunchReply, LaunchRequest};
use crate::{
    CapturedOutput, CommandEnd, CommandOutcome, ExceededLimit, LaunchError, MachineFacts, MissingLevel, SandboxLevel,
    SandboxSupport, SandboxedCommand,
};

/// Interval at which a cancellation is noticed.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// Time after the limit of elapsed time, or after a request to stop, at which the launcher itself is killed. The
/// launcher enforces the limit; this is for one that hangs.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time for the rest of the output after the end of the launcher.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;
/// Maximum length of a reply, in bytes.
const MAX_REPLY_BYTES: usize = 64 << 10;

/// Starts launchers. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxLauncher {
    /// The program of the launcher, which calls [`serve`](crate::serve).
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The account that programs run as. Needed if the caller runs as root, because a program never does; then the
    /// account must own the writable folders. `None` for the caller's own account.
    pub account: Option<SandboxAccount>,
}

/// A user account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SandboxAccount {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl SandboxLauncher {
    /// The running program as launcher, with these arguments.
    pub fn of_this_program<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        // This path names the running program even after its file was replaced.
        let program = PathBuf::from("/proc/self/exe");
        Self { program, args: args.into_iter().map(Into::into).collect(), account: None }
    }

    /// Finds the strongest level that works on this machine, by setting it up. Blocks for some milliseconds.
    ///
    /// # Errors
    /// If the launcher itself does not work, or no temporary folder can be created.
    pub fn probe(&self) -> Result<SandboxSupport, LaunchError> {
        let scratch = ScratchDir::create(self.account)
            .map_err(|source| LaunchError::Folder { path: std::env::temp_dir(), source })?;
        let mut missing = Vec::new();
        for level in SandboxLevel::ALL {
            let command = SandboxedCommand {
                program: OsString::new(),
                args: Vec::new(),
                env: Vec::new(),
                work_dir: scratch.0.clone(),
                readable: Vec::new(),
                writable: Vec::new(),
                mounts: Vec::new(),
                scratch_dir: scratch.0.clone(),
                listener_port: None,
                limits: crate::CommandLimits::default(),
            };
            match self.launch(level, &command, true, &AtomicBool::new(false), &mut drop) {
                Ok(_) => return Ok(SandboxSupport { level: Some(level), missing }),
                Err(LaunchError::NoSandbox { level, step, reason }) => missing.push(MissingLevel {
                    level,
                    reason: format!("cannot {step}: {reason}"),
                    remedy: MachineFacts::read(&self.program).remedy(level),
                }),
                Err(other) => return Err(other),
            }
        }
        Ok(SandboxSupport { level: None, missing })
    }

    /// Runs a program in a sandbox and waits for its end. Blocks, at most a few seconds longer than the limit of
    /// elapsed time. If `cancelled` becomes true, the program is killed.
    ///
    /// # Errors
    /// [`LaunchError`], if the program was not started or its result is unknown. All its processes have ended then, except
    /// as the module documentation says.
    pub fn run(
        &self,
        level: SandboxLevel,
        command: &SandboxedCommand,
        cancelled: &AtomicBool,
    ) -> Result<CommandOutcome, LaunchError> {
        self.run_with_listener(level, command, cancelled, drop)
    }

    /// As [`SandboxLauncher::run`]. Before the program starts, `accept` gets the listening socket of the command's
    /// [`listener_port`](SandboxedCommand::listener_port). `accept` must not block. Nothing else outside of the sandbox
    /// can be reached from inside.
    ///
    /// # Errors
    /// As [`SandboxLauncher::run`].
    pub fn run_with_listener(
        &self,
        level: SandboxLevel,
        command: &SandboxedCommand,
        cancelled: &AtomicBool,
        mut accept: impl FnMut(TcpListener),
    ) -> Result<CommandOutcome, LaunchError> {
        let (reply, [stdout, stderr], has_ended) = self.launch(level, command, false, cancelled, &mut accept)?;
        let LaunchReply::Ended { end, usage } = reply else {
            return Err(LaunchError::NoResult { exit: "unexpected reply".to_owned() });
        };
        Ok(CommandOutcome { end, stdout, stderr, level, usage, has_ended })
    }

    fn launch(
        &self,
        level: SandboxLevel,
        command: &SandboxedCommand,
        probe: bool,
        cancelled: &AtomicBool,
        accept: &mut dyn FnMut(TcpListener),
    ) -> Result<(LaunchReply, [CapturedOutput; 2], bool), LaunchError> {
        if self.account.is_none() && rustix::process::geteuid().is_root() {
            return Err(LaunchError::Root);
        }
        let needs_namespaces = !command.mounts.is_empty() || command.listener_port.is_some();
        if needs_namespaces && level != SandboxLevel::Namespaces {
            return Err(LaunchError::NeedsNamespaces);
        }
        let mounts = command.mounts.iter().flat_map(|mount| [&mount.source, &mount.target]);
        let paths = command.readable.iter().chain(&command.writable).chain([&command.work_dir, &command.scratch_dir]);
        let paths = paths.chain(mounts);
        if let Some(path) = paths.into_iter().find(|path| !path.is_absolute()) {
            return Err(LaunchError::RelativePath { path: path.clone() });
        }
        if !cfg!(target_os = "linux") {
            let reason = format!("cfq has none for {}", std::env::consts::OS);
            return Err(LaunchError::NoSandbox { level, step: "start a sandbox".to_owned(), reason });
        }
        let mut running = Running::start(self, &LaunchRequest { level, command: command.clone(), probe })?;
        let waited = running.wait(command, cancelled, accept);
        let exit = running.end(!matches!(waited, Ok((_, None))));
        let (reply, exceeded) = waited?;
        // The process namespace has ended before its launcher closes the connection.
        let has_ended = !running.is_connected && level == SandboxLevel::Namespaces;
        let output = running.output.map(|stream| stream.captured);
        match reply {
            Some(LaunchReply::NoSandbox(FailedStep { step, error, .. })) => {
                Err(LaunchError::NoSandbox { level, step, reason: error })
            }
            Some(LaunchReply::NotStarted { errno }) => Err(LaunchError::Program {
                program: PathBuf::from(&command.program),
                source: io::Error::from_raw_os_error(errno),
            }),
            Some(LaunchReply::Ended { end: CommandEnd::Cancelled, usage }) => {
                let end = exceeded.map_or(CommandEnd::Cancelled, CommandEnd::LimitExceeded);
                Ok((LaunchReply::Ended { end, usage }, output, has_ended))
            }
            Some(reply) => Ok((reply, output, has_ended)),
            None => Err(LaunchError::NoResult { exit }),
        }
    }
}

/// A launcher that was started.
struct Running {
    child: Child,
    connection: UnixStream,
    /// Whether the launcher has not closed the connection yet.
    is_connected: bool,
    reply: Vec<u8>,
    output: [Stream; 2],
}

/// One of the program's output streams.
struct Stream {
    /// `None` after its end.
    pipe: Option<fs::File>,
    captured: CapturedOutput,
}

impl Running {
    fn start(launcher: &SandboxLauncher, request: &LaunchRequest) -> Result<Self, LaunchError> {
        let (mut connection, of_child) = UnixStream::pair().map_err(LaunchError::Connection)?;
        let mut program = Command::new(&launcher.program);
        // The launcher can be inspected by the user's other processes; it needs none of the caller's variables.
        program.args(&launcher.args).env_clear();
        program.stdin(OwnedFd::from(of_child)).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(SandboxAccount { uid, gid }) = launcher.account {
            program.uid(uid).gid(gid);
        }
        let child = program.spawn();
        let mut child = child.map_err(|source| LaunchError::Launcher { program: launcher.program.clone(), source })?;
        // This process must not keep the launcher's end of the connection open.
        drop(program);
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let output = pipes.map(|pipe| Stream { pipe: pipe.map(fs::File::from), captured: CapturedOutput::default() });
        let started = prepare(&mut connection, &output, request);
        let running = Self { child, connection, is_connected: true, reply: Vec::new(), output };
        match started {
            Ok(()) => Ok(running),
            Err(error) => {
                running.kill();
                Err(LaunchError::Connection(error))
            }
        }
    }

    /// Captures the output until the launcher has closed all connections. Returns the reply, and the limit that made
    /// this side stop the program.
    fn wait(
        &mut self,
        command: &SandboxedCommand,
        cancelled: &AtomicBool,
        accept: &mut dyn FnMut(TcpListener),
    ) -> Result<(Option<LaunchReply>, Option<ExceededLimit>), LaunchError> {
        let mut exceeded = None;
        let mut is_stopping = false;
        let mut deadline = Instant::now() + command.limits.wall + STOP_GRACE;
        let mut is_connected = true;
        while is_connected || self.output.iter().any(|stream| stream.pipe.is_some()) {
            let listener = self.read_ready(&mut is_connected, &command.limits.output_bytes);
            if let Some(listener) = listener.map_err(LaunchError::Connection)? {
                accept(listener);
            }
            if exceeded.is_none() && self.output.iter().any(|stream| stream.captured.truncated) {
                exceeded = Some(ExceededLimit::Output);
            }
            if !is_stopping && (exceeded.is_some() || cancelled.load(Ordering::Relaxed)) {
                is_stopping = true;
                // A launcher that has ended meanwhile does not read it.
                drop(self.connection.write(b"\n"));
                deadline = deadline.min(Instant::now() + STOP_GRACE);
            }
            if !is_connected {
                deadline = deadline.min(Instant::now() + OUTPUT_GRACE);
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        self.is_connected = is_connected;
        let reply = self.reply.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok());
        Ok((reply, exceeded))
    }

    /// Waits until a stream is ready, at most for [`CANCEL_INTERVAL`], and reads it. Returns the listening socket, if
    /// the launcher sent it.
    fn read_ready(&mut self, is_connected: &mut bool, output_bytes: &u64) -> io::Result<Option<TcpListener>> {
        let connection = is_connected.then(|| self.connection.as_fd());
        let pipes = self.output.iter().map(|stream| stream.pipe.as_ref().map(AsFd::as_fd));
        let sources: Vec<_> = [connection].into_iter().chain(pipes).collect();
        let mut polled: Vec<_> = sources.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(CANCEL_INTERVAL.subsec_nanos()) };
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut results = polled.iter().map(|fd| !fd.revents().is_empty());
        let ready: Vec<bool> = sources.iter().map(|fd| fd.is_some() && results.next() == Some(true)).collect();
        drop(polled);
        let mut buffer = vec![0; READ_BYTES];
        let mut listener = None;
        if ready[0] {
            let read = receive(&self.connection, &mut buffer, &mut listener)?;
            *is_connected = read != Some(0) && self.reply.len() <= MAX_REPLY_BYTES;
            let received = &buffer[..read.unwrap_or_default()];
            self.reply.extend(received.strip_prefix(&[LISTENER]).unwrap_or(received));
        }
        let mut room = self.output.iter().map(|stream| stream.captured.bytes.len() as u64).sum::<u64>();
        room = output_bytes.saturating_sub(room);
        for (stream, _) in self.output.iter_mut().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            let Some(pipe) = &mut stream.pipe else { continue };
            match read_some(pipe, &mut buffer)? {
                Some(0) => stream.pipe = None,
                Some(read) => {
                    let kept = read.min(usize::try_from(room).unwrap_or(usize::MAX));
                    room -= kept as u64;
                    stream.captured.bytes.extend(&buffer[..kept]);
                    stream.captured.truncated |= kept < read;
                }
                None => {}
            }
        }
        Ok(listener)
    }

    /// Waits for the end of the launcher and returns its exit status; kills it if it still runs.
    fn end(&mut self, is_stopped: bool) -> String {
        let start = Instant::now();
        let grace = if is_stopped { Duration::ZERO } else { OUTPUT_GRACE };
        while start.elapsed() < grace && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(self.child.kill());
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }

    fn kill(mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Makes the streams non-blocking and sends the request.
fn prepare(connection: &mut UnixStream, output: &[Stream], request: &LaunchRequest) -> io::Result<()> {
    for pipe in output.iter().filter_map(|stream| stream.pipe.as_ref()) {
        fcntl_setfl(pipe, fcntl_getfl(pipe)? | OFlags::NONBLOCK)?;
    }
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    connection.write_all(&line)?;
    connection.set_nonblocking(true)
}

/// As [`read_some`], with the descriptor of a socket that comes with the bytes.
fn receive(
    connection: &UnixStream,
    buffer: &mut [u8],
    listener: &mut Option<TcpListener>,
) -> io::Result<Option<usize>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(buffer)];
    match recvmsg(connection, &mut buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
        Ok(message) => {
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(sockets) = message {
                    *listener = sockets.map(TcpListener::from).next();
                }
            }
            Ok(Some(message.bytes))
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        // The launcher was killed while it had unread data.
        Err(Errno::CONNRESET) => Ok(Some(0)),
        Err(error) => Err(error.into()),
    }
}

/// Reads once. `None` if nothing is there yet, `Some(0)` at the end.
fn read_some(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match source.read(buffer) {
        Ok(read) => Ok(Some(read)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A temporary folder of a probe.
struct ScratchDir(PathBuf);

impl ScratchDir {
    fn create(account: Option<SandboxAccount>) -> io::Result<Self> {
        let name = format!("cfq-sandbox-probe-{}-{}", std::process::id(), unique());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path)?;
        let created = Self(path);
        if let Some(SandboxAccount { uid, gid }) = account {
            std::os::unix::fs::chown(&created.0, Some(uid), Some(gid))?;
        }
        Ok(created)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(Path::new(&self.0)));
    }
}

/// A number that this process has not used before.
fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
