//! Locks on files in a mirror's folder. A wait for a lock has a time limit, and the error names the lock.

use std::fs::{File, TryLockError};
use std::time::Duration;

use super::error::GitError;
use super::mirror::{MAX_SHORT_WAIT, Mirror, lock_file};
use super::size_limits::StopCondition;

/// Lock under which one task at a time copies commits from the user's repository.
const FETCH_LOCK: &str = "cfq-fetch.lock";
/// Interval at which a lock is tried again.
const TRY_INTERVAL: Duration = Duration::from_millis(20);

impl Mirror {
    /// Waits for the lock under which `commit` is copied; `None` if the mirror has `commit` as a base, because it was
    /// copied before or while this call waited.
    ///
    /// # Errors
    /// [`GitError::MirrorLocked`] if `stop` ends the wait, [`GitError::Cancelled`], and other [`GitError`]s if the
    /// mirror cannot be read.
    pub fn lock_for_fetch(&self, commit: &str, stop: &StopCondition) -> Result<Option<File>, GitError> {
        if self.has_base(commit)? {
            return Ok(None);
        }
        let lock = self.lock_until(FETCH_LOCK, stop)?;
        Ok(Some(lock).filter(|_| !self.has_base(commit).unwrap_or(false)))
    }

    /// Waits for an exclusive file lock in the mirror's folder. Dropping the file releases the lock; the operating
    /// system releases it if the process dies.
    pub(crate) fn lock(&self, name: &str) -> Result<File, GitError> {
        let (stop, _guard) = StopCondition::after(MAX_SHORT_WAIT);
        self.lock_until(name, &stop)
    }

    fn lock_until(&self, name: &str, stop: &StopCondition) -> Result<File, GitError> {
        let path = self.path().join(name);
        let operation = || format!("lock {}", path.display());
        let file = lock_file(self.path(), name)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => return Err(GitError::Io { operation: operation(), source }),
            }
            stop.check(&operation()).map_err(|error| match error {
                GitError::TimeLimit { seconds, .. } => GitError::MirrorLocked { lock: path.clone(), seconds },
                other => other,
            })?;
            std::thread::sleep(TRY_INTERVAL);
        }
    }
}
