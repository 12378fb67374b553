//! Identity of a process. Process ids are reused; the pair of id and start time is not.

use std::io;
use std::time::Duration;

use rustix::process::{Pid, kill_process};
use serde::{Deserialize, Serialize};

use super::Signal;

/// Interval at which a process is polled until it has ended; the process need not be a child of this one.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Unique identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: u32,
    /// Start time as an opaque text; on Linux the machine's boot id and the clock ticks from the boot to the start of
    /// the process.
    pub started: String,
}

impl ProcessIdentity {
    /// Returns the identity of the process with this id; `None` if there is no such process or it is a zombie.
    pub fn of(pid: u32) -> Option<Self> {
        stat(pid).filter(|stat| !stat.zombie).map(|stat| Self { pid, started: stat.started })
    }

    /// Returns the identity of a child that this process has not reaped yet, even if the child has already ended.
    pub(super) fn of_child(pid: u32) -> Option<Self> {
        stat(pid).map(|stat| Self { pid, started: stat.started })
    }

    /// Returns the real user id of the process; `None` if the process has ended.
    pub fn user(&self) -> Option<u32> {
        let user = real_user(self.pid)?;
        // The process id may have been reused before the user id was read.
        self.is_alive().then_some(user)
    }

    /// True while the process exists and is not a zombie.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// Waits until the identified process has ended; it need not be a child. Returns `false` if it still runs after
    /// `within`.
    pub async fn ended(&self, within: Duration) -> bool {
        let watch = async {
            while self.is_alive() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(within, watch).await.is_ok()
    }

    /// Sends a signal. Returns `false` if the process had already ended.
    ///
    /// # Errors
    /// The operating system's error if the signal cannot be sent.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(false) };
        if !self.is_alive() {
            return Ok(false);
        }
        match kill_process(pid, signal.number()) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

struct Stat {
    zombie: bool,
    started: String,
}

/// Reads state and start time (field 22) from `/proc/<pid>/stat`. The name in field 2 may contain spaces and
/// parentheses, so the other fields are counted from the end of the name.
#[cfg(target_os = "linux")]
fn stat(pid: u32) -> Option<Stat> {
    static BOOT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let zombie = matches!(fields.next()?, "Z" | "X" | "x");
    let ticks = fields.nth(18)?;
    let boot = BOOT.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    });
    Some(Stat { zombie, started: format!("{boot}/{ticks}") })
}

/// Reads the real user id, the first number of the line `Uid:`, from `/proc/<pid>/status`.
#[cfg(target_os = "linux")]
fn real_user(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn real_user(pid: u32) -> Option<u32> {
    let mut ps = std::process::Command::new("ps");
    let out = ps.args(["-o", "ruid=", "-p"]).arg(pid.to_string()).output().ok()?;
    String::from_utf8_lossy(&out.stdout).trim().parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn stat(pid: u32) -> Option<Stat> {
    let mut ps = std::process::Command::new("ps");
    let out = ps.args(["-o", "stat=,lstart=", "-p"]).arg(pid.to_string()).output().ok()?;
    let line = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    let (state, started) = line.split_once(char::is_whitespace)?;
    Some(Stat { zombie: state.starts_with('Z'), started: started.trim().to_owned() })
}
