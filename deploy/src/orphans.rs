//! Orphaned Postgres and NATS processes that no pidfile names, found by their command line, which every user may read.
//!
//! They are left by a kill in the few microseconds between a start and its pidfile, or are backends that outlive a
//! killed postmaster for a moment. Two servers on one folder would destroy it, so every start searches for them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::child::{ProcessIdentity, Signal};

/// Time to exit after the first signal, before SIGKILL.
const GRACE: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
#[error("process {pid} uses {folder} and does not exit; stop it by hand, for example with `kill -9 {pid}`")]
pub struct OrphanError {
    pub pid: u32,
    pub folder: PathBuf,
}

/// Terminates every process whose arguments satisfy `matches`; `folder` is the folder that these processes use and
/// appears only in messages. Sends `first_signal`, then SIGKILL after [`GRACE`].
pub async fn terminate(
    folder: &Path,
    first_signal: Signal,
    matches: impl Fn(&[&[u8]]) -> bool,
) -> Result<(), OrphanError> {
    let orphans = find(&matches);
    for orphan in &orphans {
        tracing::warn!(pid = orphan.pid, folder = %folder.display(), "terminating a process left by an earlier run");
        signal(orphan, first_signal);
        // A suspended process acts on a signal only after SIGCONT.
        signal(orphan, Signal::Continue);
    }
    let deadline = tokio::time::Instant::now() + GRACE;
    for orphan in &orphans {
        if !orphan.ended(deadline.saturating_duration_since(tokio::time::Instant::now())).await {
            signal(orphan, Signal::Kill);
        }
    }
    for orphan in &orphans {
        if !orphan.ended(GRACE).await {
            return Err(OrphanError { pid: orphan.pid, folder: folder.to_owned() });
        }
    }
    Ok(())
}

fn signal(orphan: &ProcessIdentity, signal: Signal) {
    if let Err(error) = orphan.signal(signal) {
        tracing::warn!(pid = orphan.pid, %error, "cannot signal");
    }
}

/// Processes whose arguments satisfy `matches`, without this one; empty on systems without /proc.
fn find(matches: &impl Fn(&[&[u8]]) -> bool) -> Vec<ProcessIdentity> {
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
        .collect()
}
