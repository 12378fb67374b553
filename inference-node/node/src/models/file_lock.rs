//! Locks on files of the model folder, shared between processes. They are kernel locks, so they are released when the
//! process that holds them ends.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use cfq_link::stall_watch::StallWatch;

use super::{ModelError, file_error};

/// Number of attempts of [`FileLock::try_exclusive_briefly`], not counting one last attempt that is not followed by a
/// wait. A process that only checks whether a lock is held holds it for microseconds, so a lock that is still held
/// after this many attempts is in use.
const BRIEF_LOCK_ATTEMPTS: u32 = 5;
/// Wait between two attempts of [`FileLock::try_exclusive_briefly`].
const BRIEF_LOCK_INTERVAL: Duration = Duration::from_millis(10);
/// Time for which [`FileLock::exclusive`] and [`FileLock::shared`] wait. The processes that hold these locks exclusively
/// read or write a record, or remove files. The lock itself is watched, which never changes: only the time counts.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Wait between two attempts to take a lock that another process holds.
const WAIT_INTERVAL: Duration = Duration::from_millis(50);

/// A held lock. Dropping it releases the lock.
#[derive(Debug)]
pub struct FileLock {
    file: File,
}

impl FileLock {
    fn open(path: &Path) -> Result<File, ModelError> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder).map_err(file_error("create", folder))?;
        let file = File::options().create(true).write(true).truncate(false).open(path);
        file.map_err(file_error("write", path))
    }

    /// Takes the lock exclusively; `None` if another process holds it.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn try_exclusive(path: &Path) -> Result<Option<Self>, ModelError> {
        let file = Self::open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { file })),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(file_error("lock", path)(error)),
        }
    }

    /// Same as [`Self::try_exclusive`], but retries briefly, so that it does not fail because of a process that only
    /// checks whether the lock is held, as `cfq models ls` does.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn try_exclusive_briefly(path: &Path) -> Result<Option<Self>, ModelError> {
        for _ in 0..BRIEF_LOCK_ATTEMPTS {
            if let Some(lock) = Self::try_exclusive(path)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(BRIEF_LOCK_INTERVAL);
        }
        Self::try_exclusive(path)
    }

    /// Takes the lock exclusively; waits for a process that holds it for moments.
    ///
    /// # Errors
    /// [`ModelError::Locked`] or [`ModelError::Io`].
    pub fn exclusive(path: &Path) -> Result<Self, ModelError> {
        Self::exclusive_within(path, StallWatch::new(path, MAX_WAIT))
    }

    /// Takes the lock exclusively; waits for a process that holds it until `holder` says that it is stalled.
    ///
    /// # Errors
    /// [`ModelError::Locked`] or [`ModelError::Io`].
    pub fn exclusive_within(path: &Path, holder: StallWatch) -> Result<Self, ModelError> {
        Self::wait(path, File::try_lock, holder)
    }

    /// Takes the lock shared; waits for a process that holds it exclusively for moments.
    ///
    /// # Errors
    /// [`ModelError::Locked`] or [`ModelError::Io`].
    pub fn shared(path: &Path) -> Result<Self, ModelError> {
        Self::wait(path, File::try_lock_shared, StallWatch::new(path, MAX_WAIT))
    }

    fn wait(
        path: &Path,
        try_lock: fn(&File) -> Result<(), fs::TryLockError>,
        mut holder: StallWatch,
    ) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        loop {
            match try_lock(&file) {
                Ok(()) => return Ok(Self { file }),
                Err(fs::TryLockError::Error(error)) => return Err(file_error("lock", path)(error)),
                Err(fs::TryLockError::WouldBlock) if holder.is_stalled() => {
                    return Err(ModelError::Locked { lock: path.to_owned(), limit: holder.limit() });
                }
                Err(fs::TryLockError::WouldBlock) => std::thread::sleep(WAIT_INTERVAL),
            }
        }
    }
}

impl Drop for FileLock {
    /// Unlocks explicitly. Closing the file is not enough: a child process between fork and exec still has the same
    /// file open, which would keep the lock.
    fn drop(&mut self) {
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "cannot unlock a model");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_locks_exclude_an_exclusive_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.lock");
        let (one, two) = (FileLock::shared(&path).unwrap(), FileLock::shared(&path).unwrap());
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        drop((one, two));
        assert!(FileLock::try_exclusive(&path).unwrap().is_some());
    }

    #[test]
    fn wait_for_a_lock_ends_once_its_holder_is_stalled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.lock");
        let held = FileLock::exclusive(&path).unwrap();
        let limit = Duration::from_millis(200);
        for try_lock in [File::try_lock, File::try_lock_shared] {
            let error = FileLock::wait(&path, try_lock, StallWatch::new(&path, limit)).unwrap_err();
            assert!(matches!(&error, ModelError::Locked { lock, .. } if *lock == path), "{error}");
        }
        drop(held);
        FileLock::shared(&path).unwrap();
    }

    #[test]
    fn lock_ends_with_its_holder_although_a_fork_has_the_file_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = FileLock::try_exclusive(&path).unwrap().unwrap();
        let inherited = first.file.try_clone().unwrap();
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        drop(first);
        assert!(FileLock::try_exclusive(&path).unwrap().is_some());
        drop(inherited);
    }
}
