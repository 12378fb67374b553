//! Starts the program, stops it if it exceeds a limit or its caller asks for it, and waits for its end.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, wait};

use super::Connection;
use super::disk_usage::{DiskUsage, free_bytes};
use super::measure::Scope;
use crate::protocol::LaunchReply;
use crate::{CommandEnd, CommandLimits, CommandUsage, ExceededLimit, Mount, MountChanges, SandboxedCommand};

/// Interval between two measurements of processes.
const PROCESS_INTERVAL: Duration = Duration::from_millis(20);
/// Interval between two measurements of disk space.
const DISK_INTERVAL: Duration = Duration::from_millis(250);
/// A program is stopped if less disk space than this is left, unless there was little before.
const MIN_FREE_BYTES: u64 = 1 << 30;
/// A measurement is repeated after this many times its own duration at the earliest, so that it costs few percent of a
/// processor.
const INTERVAL_PER_COST: u32 = 20;

/// What the supervising threads tell each other.
#[derive(Debug, Default)]
struct WatchState {
    /// Why the program was killed.
    killed: Option<CommandEnd>,
    peak_memory_bytes: u64,
    /// True when the program has ended, after which nothing is killed.
    is_ended: bool,
}

/// Runs the program of `command`, which `program` starts. The caller's process must have one thread.
pub(super) fn supervise(
    mut program: Command,
    command: &SandboxedCommand,
    scope: Scope,
    connection: &Connection,
) -> LaunchReply {
    let state = Arc::new(Mutex::new(WatchState::default()));
    // The scratch folder may be mounted a second time.
    let is_kept =
        |mount: &&Mount| mount.changes == MountChanges::Kept && !mount.source.starts_with(&command.scratch_dir);
    let mounts = command.mounts.iter().filter(is_kept).map(|mount| &mount.target);
    let folders: Vec<PathBuf> = command.writable.iter().chain([&command.scratch_dir]).chain(mounts).cloned().collect();
    let first = DiskUsage::of(&folders.iter().map(PathBuf::as_path).collect::<Vec<_>>(), u64::MAX);
    let watch = connection.stream.try_clone().map(|stream| Watch {
        limits: command.limits.clone(),
        folders,
        first,
        scope,
        stream,
        state: Arc::clone(&state),
        start: Instant::now(),
    });
    let watch = match watch {
        Ok(_) if connection.is_stopped => return ended(CommandEnd::Cancelled, CommandUsage::default()),
        Ok(watch) => watch,
        Err(error) => return not_started(&error),
    };
    let start = watch.start;
    let child = match program.spawn() {
        Ok(child) => child,
        Err(error) => return not_started(&error),
    };
    if let Err(error) = std::thread::Builder::new().spawn(move || watch.run()) {
        scope.kill_all();
        return not_started(&error);
    }
    let status = wait_for(child.id());
    let (killed, peak_memory_bytes) = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_ended = true;
        (state.killed, state.peak_memory_bytes)
    };
    let wall = start.elapsed();
    // Processes that the program left behind.
    scope.kill_all();
    let usage = CommandUsage { wall, cpu: cpu_of_children(), peak_memory_bytes };
    ended(killed.unwrap_or_else(|| status.map_or(CommandEnd::Signalled(Signal::KILL.as_raw()), end)), usage)
}

fn ended(end: CommandEnd, usage: CommandUsage) -> LaunchReply {
    LaunchReply::Ended { end, usage }
}

fn not_started(error: &io::Error) -> LaunchReply {
    LaunchReply::NotStarted { errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

/// Waits for the process `program`, and for others that became children of this process. `None` if its status is
/// unknown.
fn wait_for(program: u32) -> Option<WaitStatus> {
    let program = Pid::from_raw(program.cast_signed());
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((process, status))) if Some(process) == program => return Some(status),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

fn end(status: WaitStatus) -> CommandEnd {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => CommandEnd::Exited(code),
        (None, Some(signal)) if signal == Signal::XCPU.as_raw() => CommandEnd::LimitExceeded(ExceededLimit::Cpu),
        (None, Some(signal)) if signal == Signal::XFSZ.as_raw() => CommandEnd::LimitExceeded(ExceededLimit::FileSize),
        (None, Some(signal)) => CommandEnd::Signalled(signal),
        (None, None) => CommandEnd::Signalled(Signal::KILL.as_raw()),
    }
}

/// Processor time of the children that have been waited for, and of their children.
fn cpu_of_children() -> Duration {
    // SAFETY: the structure is valid if it is zero, and the kernel writes it.
    #[allow(unsafe_code)]
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let duration = |time: libc::timeval| {
        let (seconds, micros) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec));
        Duration::from_secs(seconds.unwrap_or_default()) + Duration::from_micros(micros.unwrap_or_default())
    };
    duration(usage.ru_utime) + duration(usage.ru_stime)
}

/// The thread that stops the program.
struct Watch {
    limits: CommandLimits,
    folders: Vec<PathBuf>,
    scope: Scope,
    stream: UnixStream,
    state: Arc<Mutex<WatchState>>,
    /// Disk usage before the start of the program.
    first: DiskUsage,
    start: Instant,
}

impl Watch {
    fn run(mut self) {
        let folders = std::mem::take(&mut self.folders);
        let folders: Vec<_> = folders.iter().map(PathBuf::as_path).collect();
        let max_files = self.first.files.saturating_add(self.limits.files);
        let max_bytes = self.first.bytes.saturating_add(self.limits.disk_bytes);
        let mut disk_interval = DISK_INTERVAL;
        let mut next_disk = Instant::now() + disk_interval;
        let min_free = |folder: &&Path| Some((folder.to_path_buf(), (free_bytes(folder)? / 2).min(MIN_FREE_BYTES)));
        let min_free: Vec<_> = folders.iter().filter_map(min_free).collect();
        loop {
            let (exceeded, interval) = timed(|| self.exceeded_by_processes(), PROCESS_INTERVAL);
            if let Some(limit) = exceeded {
                return self.kill(CommandEnd::LimitExceeded(limit));
            }
            if min_free.iter().any(|(folder, least)| free_bytes(folder).is_some_and(|free| free < *least)) {
                return self.kill(CommandEnd::LimitExceeded(ExceededLimit::Disk));
            }
            if Instant::now() >= next_disk {
                let (usage, interval) = timed(
                    || {
                        DiskUsage { bytes: self.scope.unlinked_bytes(), ..DiskUsage::default() }
                            .with(&folders, max_files)
                    },
                    DISK_INTERVAL,
                );
                disk_interval = interval;
                next_disk = Instant::now() + disk_interval;
                let limit = match usage {
                    usage if usage.files > max_files || usage.is_too_deep => Some(ExceededLimit::Files),
                    usage if usage.bytes > max_bytes => Some(ExceededLimit::Disk),
                    _ => None,
                };
                if let Some(limit) = limit {
                    return self.kill(CommandEnd::LimitExceeded(limit));
                }
            }
            let left = self.limits.wall.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                return self.kill(CommandEnd::LimitExceeded(ExceededLimit::Wall));
            }
            if self.is_stopped_within(interval.min(left)) {
                return self.kill(CommandEnd::Cancelled);
            }
        }
    }

    fn exceeded_by_processes(&self) -> Option<ExceededLimit> {
        let measured = self.scope.measure();
        let mut memory_bytes = measured.memory_bytes;
        if memory_bytes > self.limits.memory_bytes {
            memory_bytes = self.scope.exact_memory_bytes();
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.peak_memory_bytes = state.peak_memory_bytes.max(memory_bytes);
        match measured.tasks {
            _ if memory_bytes > self.limits.memory_bytes => Some(ExceededLimit::Memory),
            tasks if tasks > self.limits.tasks => Some(ExceededLimit::Tasks),
            _ => None,
        }
    }

    /// Waits at most for `time`. True if the caller asks to stop, or has ended.
    fn is_stopped_within(&mut self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) };
        let fd = self.stream.as_fd();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        let is_ready = poll(&mut polled, Some(&timeout)).is_ok_and(|ready| ready > 0);
        // Every byte, and the end of the connection.
        is_ready && self.stream.read(&mut [0]).is_ok()
    }

    fn kill(&self, reason: CommandEnd) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_ended {
            return;
        }
        state.killed = Some(reason);
        drop(state);
        for signal in [Signal::STOP, Signal::KILL] {
            self.scope.signal_all(signal);
        }
    }
}

/// Runs `work`. Returns its result and the time until it should run again, at least `interval`.
fn timed<T>(work: impl FnOnce() -> T, interval: Duration) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, interval.max(start.elapsed() * INTERVAL_PER_COST))
}
