//! Locks of refs that a killed process left behind. Git locks a ref with the file `<ref>.lock`, which no operating
//! system removes when its owner dies.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::delivery_record::EarlierDelivery;
use super::error::{GitError, io_context};

/// Prefix of cfq's own lock files in a mirror's folder. The operating system unlocks them when their owner dies.
const FILE_LOCK_PREFIX: &str = "cfq-";

/// Removes the lock of the recorded delivery's branch if the recorded process is dead and left it. Any other lock is
/// kept: another program may hold it.
pub(super) fn remove_own_lock(lock: &Path, earlier: &EarlierDelivery) -> Result<(), GitError> {
    let Ok(metadata) = std::fs::symlink_metadata(lock) else { return Ok(()) };
    if !left_lock(earlier, lock, &metadata) {
        return Ok(());
    }
    let pid = earlier.record.process.as_ref().map(|process| process.pid);
    tracing::warn!(lock = %lock.display(), pid, "removing the lock of a dead runner process");
    match std::fs::remove_file(lock) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(GitError::Io { operation: format!("remove {}", lock.display()), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// True if the recorded process is dead and left this lock: the lock was created after the record, and has a content
/// that the process may have written.
fn left_lock(earlier: &EarlierDelivery, lock: &Path, metadata: &Metadata) -> bool {
    let record = &earlier.record;
    let is_later = metadata.modified().is_ok_and(|modified| modified >= earlier.written_at);
    if !earlier.process_is_dead || !is_later || !metadata.is_file() {
        return false;
    }
    // The lock is empty until libgit2 writes the branch's new commit into it, in one write.
    std::fs::read_to_string(lock).is_ok_and(|content| content.is_empty() || content.trim_end() == record.commit)
}

/// Removes the ref locks in all mirrors below `data_dir`. Called when the runner starts: only this process uses the
/// mirrors, so every lock in them was left by a dead one.
///
/// # Errors
/// A [`GitError`] if a folder cannot be read or a lock cannot be removed.
pub fn remove_mirror_locks(data_dir: &Path) -> Result<(), GitError> {
    for mirror in entries(&data_dir.join("mirrors"))? {
        remove_locks(&mirror)?;
        let mut folders = vec![mirror.join("refs")];
        while let Some(folder) = folders.pop() {
            remove_locks(&folder)?;
            folders.extend(entries(&folder)?.into_iter().filter(|path| path.is_dir()));
        }
    }
    Ok(())
}

/// Removes git's locks directly in a folder.
fn remove_locks(folder: &Path) -> Result<(), GitError> {
    for path in entries(folder)? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".lock") && !name.starts_with(FILE_LOCK_PREFIX) && path.is_file() {
            tracing::info!(lock = %path.display(), "removing the lock of a dead runner process");
            io_context(format!("remove {}", path.display()), std::fs::remove_file(&path))?;
        }
    }
    Ok(())
}

/// Paths in a folder; none if it does not exist or is not a folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, GitError> {
    let operation = || format!("read {}", folder.display());
    match std::fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| io_context(operation(), entry).map(|entry| entry.path())).collect(),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(Vec::new()),
        Err(source) => Err(GitError::Io { operation: operation(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_locks_are_removed_but_not_the_locks_of_cfq() {
        let data = tempfile::tempdir().unwrap();
        let mirror = data.path().join("mirrors/m.git");
        std::fs::create_dir_all(mirror.join("refs/heads/worker-1")).unwrap();
        let git = ["refs/heads/main.lock", "refs/heads/worker-1/task-1.lock", "packed-refs.lock", "config.lock"];
        let kept = ["cfq-merge.lock", "refs/heads/main"];
        for name in git.iter().chain(&kept) {
            std::fs::write(mirror.join(name), "").unwrap();
        }
        remove_mirror_locks(data.path()).unwrap();
        assert!(git.iter().all(|name| !mirror.join(name).exists()));
        assert!(kept.iter().all(|name| mirror.join(name).exists()));
        remove_mirror_locks(&data.path().join("none")).unwrap();
    }
}
