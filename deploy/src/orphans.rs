//! Orphaned Postgres and NATS processes that no pidfile names, found by their command line, which every user may read,
//! and by their user. A process of another user is never an orphan: any user can start a program with these arguments.
//!
//! An orphan remains if cfq is killed in the few microseconds between the start of a server and the write of its
//! pidfile, or if a Postgres backend outlives its killed postmaster for a moment. Two servers on one folder would
//! destroy the data in it, so every start searches for orphans.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::child::{Account, ProcessIdentity, Signal};

/// Maximum time that an orphan may take to exit after a signal. If it takes longer after the first signal, SIGKILL
/// follows; if it takes longer after SIGKILL, [`OrphanError`].
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Error: a process left by an earlier run does not exit, even after SIGKILL.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} uses {folder} and does not exit; stop it by hand, for example with `kill -9 {pid}`")]
pub struct OrphanError {
    pub pid: u32,
    pub folder: PathBuf,
}

/// Terminates every process that runs as one of `users` and whose arguments satisfy `matches`; `folder` is the folder
/// that these processes use and appears only in messages. Sends `first_signal`, then SIGKILL after [`EXIT_TIMEOUT`].
pub async fn terminate(
    folder: &Path,
    users: &[u32],
    first_signal: Signal,
    matches: impl Fn(&[&[u8]]) -> bool,
) -> Result<(), OrphanError> {
    let orphans = find(users, &matches);
    for orphan in &orphans {
        tracing::warn!(pid = orphan.pid, folder = %folder.display(), "terminating a process left by an earlier run");
        signal(orphan, first_signal);
        // A suspended process acts on a signal only after SIGCONT.
        signal(orphan, Signal::Continue);
    }
    let deadline = tokio::time::Instant::now() + EXIT_TIMEOUT;
    for orphan in &orphans {
        if !orphan.ended(deadline.saturating_duration_since(tokio::time::Instant::now())).await {
            signal(orphan, Signal::Kill);
        }
    }
    for orphan in &orphans {
        if !orphan.ended(EXIT_TIMEOUT).await {
            return Err(OrphanError { pid: orphan.pid, folder: folder.to_owned() });
        }
    }
    Ok(())
}

fn signal(orphan: &ProcessIdentity, signal: Signal) {
    if let Err(error) = orphan.signal(signal) {
        tracing::warn!(pid = orphan.pid, %error, "cannot send a signal to the process");
    }
}

/// User ids that a service's processes of this or an earlier run can have: that of this process, that of the service's
/// account, and the owner of the service's folder, which an earlier run with another account has set.
pub fn users(folder: &Path, account: Option<Account>) -> Vec<u32> {
    let owner = std::fs::metadata(folder).ok().map(|meta| meta.uid());
    let own = rustix::process::geteuid().as_raw();
    [Some(own), account.map(|account| account.uid), owner].into_iter().flatten().collect()
}

/// Processes of `users`, other than this one, whose arguments satisfy `matches`; empty on systems without /proc.
fn find(users: &[u32], matches: &impl Fn(&[&[u8]]) -> bool) -> Vec<ProcessIdentity> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != std::process::id())
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            matches(&args)
        })
        .filter_map(ProcessIdentity::of)
        .filter(|process| process.user().is_some_and(|user| users.contains(&user)))
        .collect()
}
