//! Locks on files of the model folder, shared between processes. They are kernel locks, so they are released when the
//! process that holds them ends.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use super::{ModelError, file_error};

/// Number of attempts of [`FileLock::try_exclusive_briefly`], not counting one last attempt that is not followed by a
/// wait. A process that only checks whether a lock is held holds it for microseconds, so a lock that is still held
/// after this many attempts is in use.
const BRIEF_LOCK_ATTEMPTS: u32 = 5;
/// Wait between two attempts of [`FileLock::try_exclusive_briefly`].
const BRIEF_LOCK_INTERVAL: Duration = Duration::from_millis(10);

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

    /// Takes the lock exclusively; waits until no other process holds it.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn exclusive(path: &Path) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        file.lock().map_err(file_error("lock", path))?;
        Ok(Self { file })
    }

    /// Takes the lock shared; waits until no process holds it exclusively.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn shared(path: &Path) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        file.lock_shared().map_err(file_error("lock", path))?;
        Ok(Self { file })
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
