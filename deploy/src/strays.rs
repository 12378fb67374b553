//! Engine processes that no pidfile names, found by their command line, which every user may read. It takes a kill in
//! the few microseconds between a start and its pidfile, or backends that outlive a killed postmaster for a moment;
//! but two servers on one folder would destroy it, so every start looks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::child::{ProcessIdentity, Signal};

/// How long they may take to end by themselves before they are killed.
const GRACE: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
#[error("process {pid} works on {folder} and does not end; stop it by hand, for example with `kill -9 {pid}`")]
pub struct StrayError {
    pub pid: u32,
    pub folder: PathBuf,
}

/// Ends every process whose arguments `matches` says belong to `folder`. The first signal is `ask`.
pub async fn end(folder: &Path, ask: Signal, matches: impl Fn(&[&[u8]]) -> bool) -> Result<(), StrayError> {
    let strays = find(&matches);
    for stray in &strays {
        tracing::warn!(pid = stray.pid, folder = %folder.display(), "ending a process an earlier run left");
        signal(stray, ask);
        // One that was suspended would only act on it after that.
        signal(stray, Signal::Continue);
    }
    let deadline = tokio::time::Instant::now() + GRACE;
    for stray in &strays {
        if !stray.ended(deadline.saturating_duration_since(tokio::time::Instant::now())).await {
            signal(stray, Signal::Kill);
        }
    }
    for stray in &strays {
        if !stray.ended(GRACE).await {
            return Err(StrayError { pid: stray.pid, folder: folder.to_owned() });
        }
    }
    Ok(())
}

fn signal(stray: &ProcessIdentity, signal: Signal) {
    if let Err(error) = stray.signal(signal) {
        tracing::warn!(pid = stray.pid, %error, "cannot signal");
    }
}

/// Empty where there is no /proc.
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
