//! Folders that preparations have created, one for each content of their lock files. Several tasks use one at once.
//!
//! A folder is complete if it has its final name. Whoever creates or removes one holds an exclusive lock on the file beside
//! it, and whoever uses one a shared lock, so that it also works between processes.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use cfq_sandbox::remove_folder;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::check_run_error::CheckRunError;

/// Number of folders that are kept. The one that was not used for the longest time is removed first.
const MAX_FOLDERS: usize = 10;
/// Interval at which a lock is tried again.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);
/// Extensions of a lock file and of a folder that is not complete.
const LOCK: &str = "lock";
const INCOMPLETE: &str = "incomplete";

/// The folders, below one folder.
#[derive(Debug, Clone)]
pub(super) struct PreparedStore {
    root: PathBuf,
    /// Whether another account has to enter the folders.
    is_shared: bool,
}

/// A folder that a preparation has created. It is not removed while this value exists.
#[derive(Debug)]
pub(super) struct PreparedFolder {
    pub path: PathBuf,
    _lock: File,
}

impl PreparedStore {
    pub fn new(root: PathBuf, is_shared: bool) -> Self {
        Self { root, is_shared }
    }

    /// Whether the folder of `key` exists.
    pub fn contains(&self, key: &str) -> bool {
        self.root.join(key).is_dir()
    }

    /// Returns the folder of `key`. If there is none, `create` fills an empty folder. Waits while another task creates the
    /// same folder.
    pub fn get_or_create(
        &self,
        key: &str,
        cancelled: &AtomicBool,
        create: impl FnOnce(&Path) -> Result<(), CheckRunError>,
    ) -> Result<PreparedFolder, CheckRunError> {
        let folder_error = |path: &Path, source| CheckRunError::Folder { path: path.to_owned(), source };
        self.create_folder(&self.root).map_err(|source| folder_error(&self.root, source))?;
        let (path, lock_path) = (self.root.join(key), self.root.join(key).with_extension(LOCK));
        let io_error = |source| folder_error(&path, source);
        let lock = wait_for_lock(&lock_path, cancelled, FlockOperation::NonBlockingLockShared, io_error)?;
        if path.is_dir() {
            return self.used(path, lock);
        }
        // A lock is not upgraded atomically, so another process may create the folder meanwhile.
        drop(lock);
        let lock = wait_for_lock(&lock_path, cancelled, FlockOperation::NonBlockingLockExclusive, io_error)?;
        if !path.is_dir() {
            let incomplete = path.with_extension(INCOMPLETE);
            remove_folder(&incomplete).map_err(io_error)?;
            self.create_folder(&incomplete).map_err(io_error)?;
            if let Err(error) = create(&incomplete) {
                // Nothing is left that the lock protects. Who waits for it finds another file, and tries again.
                if let Err(error) = remove_folder(&incomplete).and_then(|()| fs::remove_file(&lock_path)) {
                    tracing::warn!(%error, "cannot remove an incomplete preparation");
                }
                return Err(error);
            }
            fs::rename(&incomplete, &path).map_err(io_error)?;
        }
        // This keeps the lock, unlike unlocking first.
        flock(&lock, FlockOperation::LockShared).map_err(|error| io_error(error.into()))?;
        let folder = self.used(path, lock);
        self.remove_unused();
        folder
    }

    /// Records that a folder is used now.
    fn used(&self, path: PathBuf, lock: File) -> Result<PreparedFolder, CheckRunError> {
        let recorded = lock.set_modified(SystemTime::now());
        recorded.map_err(|source| CheckRunError::Folder { path: path.clone(), source })?;
        Ok(PreparedFolder { path, _lock: lock })
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mode = if self.is_shared { 0o711 } else { 0o700 };
        fs::DirBuilder::new().recursive(true).mode(mode).create(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    }

    /// Removes the folders that were not used for the longest time, except those in use.
    fn remove_unused(&self) {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.path());
        let locks = entries.filter(|path| path.extension().is_some_and(|extension| extension == LOCK));
        let mut locks: Vec<_> = locks
            .filter(|lock| lock.with_extension("").is_dir())
            .filter_map(|lock| Some((lock.metadata().ok()?.modified().ok()?, lock)))
            .collect();
        locks.sort();
        let extra = locks.len().saturating_sub(MAX_FOLDERS);
        for (_, lock) in locks.into_iter().take(extra) {
            let folder = lock.with_extension("");
            let removed = match open_and_lock(&lock, FlockOperation::NonBlockingLockExclusive) {
                // It is in use.
                Ok(None) => continue,
                Ok(Some(_locked)) => remove_folder(&folder).and_then(|()| fs::remove_file(&lock)),
                Err(error) => Err(error),
            };
            match removed {
                Ok(()) => tracing::info!(folder = %folder.display(), "removed an unused preparation"),
                Err(error) => tracing::warn!(%error, folder = %folder.display(), "cannot remove an unused preparation"),
            }
        }
    }
}

/// Opens and locks a file. `None` if another process holds a lock, or has removed the file meanwhile.
fn open_and_lock(path: &Path, operation: FlockOperation) -> io::Result<Option<File>> {
    let file = File::options().create(true).append(true).open(path)?;
    match flock(&file, operation) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let is_current = match path.metadata() {
        Ok(metadata) => inode(metadata) == inode(file.metadata()?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    Ok(is_current.then_some(file))
}

fn wait_for_lock(
    path: &Path,
    cancelled: &AtomicBool,
    operation: FlockOperation,
    io_error: impl Fn(io::Error) -> CheckRunError,
) -> Result<File, CheckRunError> {
    loop {
        if cancelled.load(Ordering::Relaxed) {
            return Err(CheckRunError::Cancelled);
        }
        if let Some(file) = open_and_lock(path, operation).map_err(&io_error)? {
            return Ok(file);
        }
        std::thread::sleep(LOCK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn store() -> (tempfile::TempDir, PreparedStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = PreparedStore::new(folder.path().join("prepared"), false);
        (folder, store)
    }

    fn fill(folder: &Path) -> Result<(), CheckRunError> {
        fs::write(folder.join("package"), "1").unwrap();
        Ok(())
    }

    #[test]
    fn folder_is_created_once_by_many_threads() {
        let (_folder, store) = store();
        let created = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (store, created) = (store.clone(), created.clone());
                std::thread::spawn(move || {
                    let create = |folder: &Path| {
                        created.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(200));
                        fill(folder)
                    };
                    let prepared = store.get_or_create("key", &AtomicBool::new(false), create).unwrap();
                    fs::read_to_string(prepared.path.join("package")).unwrap()
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), "1"));
        assert_eq!(created.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn failed_creation_leaves_nothing_and_is_repeated() {
        let (_folder, store) = store();
        let cancelled = AtomicBool::new(false);
        let failed = store.get_or_create("key", &cancelled, |folder| {
            fill(folder)?;
            Err(CheckRunError::Root)
        });
        assert!(matches!(failed, Err(CheckRunError::Root)));
        assert_eq!(fs::read_dir(&store.root).unwrap().count(), 0);
        assert!(!store.contains("key"));
        let prepared = store.get_or_create("key", &cancelled, |folder| {
            assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
            fill(folder)
        });
        let held = prepared.unwrap();
        // A creation that waits for a user of the folder can be cancelled.
        fs::remove_dir_all(&held.path).unwrap();
        cancelled.store(true, Ordering::Relaxed);
        assert!(matches!(store.get_or_create("key", &cancelled, fill), Err(CheckRunError::Cancelled)));
    }

    #[test]
    fn folders_in_use_and_recent_ones_are_kept() {
        let (_folder, store) = store();
        let cancelled = AtomicBool::new(false);
        let create = |key: &str| store.get_or_create(key, &cancelled, fill).unwrap();
        let held = create("held");
        for number in 0..MAX_FOLDERS + 2 {
            drop(create(&format!("k{number}")));
            std::thread::sleep(Duration::from_millis(10));
        }
        let exists = |key: &str| store.root.join(key).is_dir();
        assert!(held.path.is_dir(), "in use");
        assert!(!exists("k0") && !exists("k1") && exists(&format!("k{}", MAX_FOLDERS + 1)));
        let folders = fs::read_dir(&store.root).unwrap().flatten().filter(|entry| entry.path().is_dir()).count();
        assert!((MAX_FOLDERS..=MAX_FOLDERS + 1).contains(&folders), "{folders}");
    }
}
