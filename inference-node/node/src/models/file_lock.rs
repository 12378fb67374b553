//! Locks on files of the model folder, shared between processes. They are the kernel's, so they end with their holder.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use super::{ModelError, file_error};

/// Attempts of [`FileLock::try_exclusive_briefly`] before the last. A check whether a lock is held takes microseconds:
/// a process that still holds it after so many attempts uses it.
const BRIEF_ATTEMPTS: u32 = 5;
/// Wait between these attempts.
const BRIEF_INTERVAL: Duration = Duration::from_millis(10);

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

    /// Takes the lock exclusively; `None` if another holder has it.
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

    /// As [`Self::try_exclusive`], but ignores holders that only check whether the lock is held, as `cfq models ls`
    /// does.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn try_exclusive_briefly(path: &Path) -> Result<Option<Self>, ModelError> {
        for _ in 0..BRIEF_ATTEMPTS {
            if let Some(lock) = Self::try_exclusive(path)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(BRIEF_INTERVAL);
        }
        Self::try_exclusive(path)
    }

    /// Takes the lock exclusively; waits for other holders.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn exclusive(path: &Path) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        file.lock().map_err(file_error("lock", path))?;
        Ok(Self { file })
    }

    /// Takes the lock shared; waits for an exclusive holder.
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
    /// Closing the file is not enough: a child between fork and exec has the same open file.
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
