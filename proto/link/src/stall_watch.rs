//! Limits the wait for another process, by the progress that it makes in a folder. A download may take hours, so a limit
//! of its duration would end slow ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum time that one observation adds. A longer time since the last one means that this process was stopped, and
/// perhaps also the one that it waits for.
const MAX_ELAPSED: Duration = Duration::from_secs(2);

/// Observes the size of a folder while another process works in it. Nothing is read before the first observation.
#[derive(Debug)]
pub struct StallWatch {
    folder: PathBuf,
    limit: Duration,
    bytes: Option<u64>,
    /// Time for which the size has been observed not to change.
    unchanged: Duration,
    observed_at: Instant,
}

impl StallWatch {
    /// Creates a watch of `folder`: the process that works there is stalled once the folder's size has not changed for
    /// `limit`.
    pub fn new(folder: &Path, limit: Duration) -> Self {
        let folder = folder.to_owned();
        Self { folder, limit, bytes: None, unchanged: Duration::ZERO, observed_at: Instant::now() }
    }

    /// Observes the folder, and returns whether the process is stalled. To be called at least once per second.
    pub fn is_stalled(&mut self) -> bool {
        let now = Instant::now();
        let elapsed = now.duration_since(self.observed_at).min(MAX_ELAPSED);
        self.observed_at = now;
        let bytes = Some(size_below(&self.folder));
        self.unchanged = if self.bytes == bytes { self.unchanged + elapsed } else { Duration::ZERO };
        self.bytes = bytes;
        self.unchanged >= self.limit
    }

    /// Size of all files below the folder at the last observation, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.unwrap_or(0)
    }

    /// Time without a change after which the process is stalled.
    pub fn limit(&self) -> Duration {
        self.limit
    }
}

/// Total size of all files below `folder`, in bytes. Files appear and vanish during the walk; unreadable ones count as
/// zero.
fn size_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_below(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_without_a_change_counts() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = StallWatch::new(folder.path(), Duration::from_secs(3));
        let mut observe_after = |elapsed: u64| {
            watch.observed_at = Instant::now() - Duration::from_secs(elapsed);
            watch.is_stalled()
        };
        assert!(!observe_after(1) && !observe_after(1) && !observe_after(1));
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("file"), b"abc").unwrap();
        assert!(!observe_after(1), "the folder has changed");
        assert!(!observe_after(3600), "this process was stopped");
        assert!(observe_after(1));
        assert_eq!(watch.bytes(), 3);
    }
}
