//! Limits on the repositories that cfq copies and checks out. They are far above real repositories; without them, a few
//! small git objects could describe a checkout that fills the disk, or folders nested so deeply that a recursive walk
//! overflows the stack.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::error::GitError;

/// Limits of one repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeLimits {
    /// Maximum number of files and folders in a commit. The largest public repositories have less than a million.
    pub entries: u64,
    /// Maximum total size of the files in a commit, in bytes.
    pub bytes: u64,
    /// Maximum nesting of folders in any commit of the history.
    pub depth: usize,
    /// Maximum number of objects in the history. The largest public repositories have about 25 million.
    pub objects: usize,
    /// Maximum size of one file in any commit of the history, in bytes. A file is read into memory as a whole.
    pub file_bytes: u64,
    /// Maximum size of the list of one folder's files, in bytes: that of a folder with about a million files.
    pub tree_bytes: u64,
    /// Maximum size of one commit, without its files, in bytes.
    pub commit_bytes: u64,
    /// Maximum number of files in the git folder. `git gc` keeps it below 10,000 in ordinary repositories.
    pub git_files: u64,
}

impl Default for SizeLimits {
    fn default() -> Self {
        Self {
            entries: 2_000_000,
            bytes: 32 << 30,
            depth: 256,
            objects: 50_000_000,
            file_bytes: 512 << 20,
            tree_bytes: 64 << 20,
            commit_bytes: 16 << 20,
            git_files: 2_000_000,
        }
    }
}

/// Condition under which a long operation on a repository stops: its time is over, or it is cancelled. The default
/// never stops.
#[derive(Debug, Clone, Default)]
pub struct StopCondition {
    limit: Duration,
    deadline: Option<Instant>,
    cancelled: Arc<AtomicBool>,
}

/// Cancels an operation when it is dropped.
#[derive(Debug)]
pub struct CancelGuard(Arc<AtomicBool>);

impl CancelGuard {
    /// A guard, and the flag that it sets.
    pub fn new() -> (Self, Arc<AtomicBool>) {
        let cancelled = Arc::new(AtomicBool::new(false));
        (Self(cancelled.clone()), cancelled)
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl StopCondition {
    /// Stops after `limit`, or when the returned guard is dropped.
    pub fn after(limit: Duration) -> (Self, CancelGuard) {
        let (guard, cancelled) = CancelGuard::new();
        (Self { limit, deadline: Instant::now().checked_add(limit), cancelled }, guard)
    }

    /// Time after which it stops, counted from its creation; `None` for a condition that never stops.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.deadline.map(|_| self.limit)
    }

    /// Checks whether `operation` may continue.
    ///
    /// # Errors
    /// [`GitError::TimeLimit`] or [`GitError::Cancelled`] if it must stop.
    pub(super) fn check(&self, operation: &str) -> Result<(), GitError> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(GitError::Cancelled { operation: operation.to_owned() });
        }
        match self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            true => Err(GitError::TimeLimit { operation: operation.to_owned(), seconds: self.limit.as_secs() }),
            false => Ok(()),
        }
    }
}
