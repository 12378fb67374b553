//! Folders that preparations have created, one for each content of their lock files. Several tasks use one at once.
//!
//! A folder is complete if it has its final name. A process holds an exclusive lock on the file beside it while it
//! creates or removes a folder, and a shared lock while it uses one (flock(2)).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cfq_link::clock::process_clock;
use cfq_sandbox::remove_folder;
use rustix::fs::{FlockOperation, Timespec, Timestamps, UTIME_NOW, flock, futimens, syncfs};
use rustix::io::Errno;

use super::check_run_error::CheckRunError;

/// Number of folders that are kept. The least recently used one is evicted first.
const MAX_FOLDERS: usize = 20;
/// Interval at which a lock is tried again.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);
/// Extensions of a lock file and of a folder that is not complete.
const LOCK: &str = "lock";
const INCOMPLETE: &str = "incomplete";

/// File of a folder with its id.
const ID: &str = "id";

/// The folders, below one folder. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct PreparedStore {
    root: PathBuf,
    /// Whether another account has to enter the folders.
    is_shared: bool,
    /// Names of the tasks of this process that wait for a lock.
    waiting: Arc<Mutex<BTreeSet<String>>>,
}

/// A folder that a preparation has created. It is not removed while this value exists.
#[derive(Debug)]
pub(super) struct PreparedFolder {
    pub path: PathBuf,
    /// Differs from those of all folders that were created before, also for the same key.
    pub id: String,
    _lock: File,
}

impl PreparedStore {
    pub fn new(root: PathBuf, is_shared: bool) -> Self {
        Self { root, is_shared, waiting: Arc::default() }
    }

    /// Whether the folder of `key` exists.
    pub fn contains(&self, key: &str) -> bool {
        self.root.join(key).is_dir()
    }

    /// Whether the task of this name waits for another one that creates the same folder.
    pub fn is_waiting(&self, name: &str) -> bool {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).contains(name)
    }

    /// Returns the folder of `key`. If there is none, `create` fills an empty folder. Waits while another task creates
    /// the same folder. `name` is the task's.
    pub fn get_or_create(
        &self,
        key: &str,
        name: &str,
        cancelled: &AtomicBool,
        create: impl FnOnce(&Path) -> Result<(), CheckRunError>,
    ) -> Result<PreparedFolder, CheckRunError> {
        let folder_error = |path: &Path, source| CheckRunError::Folder { path: path.to_owned(), source };
        self.create_folder(&self.root).map_err(|source| folder_error(&self.root, source))?;
        let (path, lock_path) = (self.root.join(key), self.root.join(key).with_extension(LOCK));
        let io_error = |source| folder_error(&path, source);
        let wait = |operation| self.wait_for_lock(&lock_path, name, cancelled, operation).map_err(io_error);
        let lock = wait(FlockOperation::NonBlockingLockShared)?.ok_or(CheckRunError::Cancelled)?;
        if path.is_dir() {
            return used(path.clone(), lock).map_err(io_error);
        }
        // A lock is not upgraded atomically, so another process may create the folder meanwhile.
        drop(lock);
        let lock = wait(FlockOperation::NonBlockingLockExclusive)?.ok_or(CheckRunError::Cancelled)?;
        if !path.is_dir() {
            let incomplete = path.with_extension(INCOMPLETE);
            remove_folder(&incomplete).and_then(|()| self.create_folder(&incomplete)).map_err(io_error)?;
            if let Err(error) = create(&incomplete) {
                // The lock protects no folder now. Waiting processes notice that its file was replaced, and retry.
                if let Err(error) = remove_folder(&incomplete).and_then(|()| fs::remove_file(&lock_path)) {
                    tracing::warn!(%error, "cannot remove an incomplete preparation");
                }
                return Err(error);
            }
            self.complete(&incomplete, &path).map_err(io_error)?;
        }
        // On local file systems, Linux keeps the lock meanwhile. Otherwise the folder may be gone, which is an error
        // below.
        flock(&lock, FlockOperation::LockShared).map_err(|error| io_error(error.into()))?;
        let folder = used(path.clone(), lock).map_err(io_error);
        self.evict();
        folder
    }

    /// Gives a folder its final name, when everything in it is on the disk.
    fn complete(&self, incomplete: &Path, path: &Path) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        fs::write(incomplete.join(ID), format!("{}-{number}", process_clock()))?;
        syncfs(File::open(incomplete)?)?;
        fs::rename(incomplete, path)?;
        File::open(&self.root)?.sync_all()
    }

    /// Creates a folder below the root, and those above it.
    pub fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mode = if self.is_shared { 0o711 } else { 0o700 };
        let mut missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.is_dir()).collect();
        missing.reverse();
        for folder in missing {
            match fs::create_dir(folder) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => created?,
            }
            // Independent of the umask.
            fs::set_permissions(folder, fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Removes the folders that were not used for the longest time, and those that were never completed, except those
    /// in use.
    fn evict(&self) {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.path());
        let locks = entries.filter(|path| path.extension().is_some_and(|extension| extension == LOCK));
        let (mut complete, mut removed): (Vec<_>, Vec<_>) = locks
            .filter_map(|lock| Some((lock.metadata().ok()?.modified().ok()?, lock)))
            .partition(|(_, lock)| lock.with_extension("").is_dir());
        complete.sort();
        let extra = complete.len().saturating_sub(MAX_FOLDERS);
        removed.extend(complete.into_iter().take(extra));
        for (_, lock) in removed {
            if let Err(error) = remove_unless_in_use(&lock) {
                tracing::warn!(%error, lock = %lock.display(), "cannot remove an unused preparation");
            }
        }
    }

    /// Opens a file and waits for a lock on it. `None` if `cancelled` becomes true.
    fn wait_for_lock(
        &self,
        path: &Path,
        name: &str,
        cancelled: &AtomicBool,
        operation: FlockOperation,
    ) -> io::Result<Option<File>> {
        let mut waiting = None;
        loop {
            if cancelled.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if let Some(file) = open_and_lock(path, operation)? {
                return Ok(Some(file));
            }
            waiting.get_or_insert_with(|| Waiting::new(self, name));
            std::thread::sleep(LOCK_INTERVAL);
        }
    }
}

/// Records that a task waits, until it is dropped.
struct Waiting<'a>(&'a PreparedStore, &'a str);

impl<'a> Waiting<'a> {
    fn new(store: &'a PreparedStore, name: &'a str) -> Self {
        tracing::info!(task = name, "waiting for another task that prepares the same");
        store.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Self(store, name)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(self.1);
    }
}

/// Records that a folder is used now.
fn used(path: PathBuf, lock: File) -> io::Result<PreparedFolder> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    futimens(&lock, &Timestamps { last_access: now, last_modification: now })?;
    let id = fs::read_to_string(path.join(ID))?;
    Ok(PreparedFolder { path, id, _lock: lock })
}

/// Removes the folder of a lock file and the file. A folder that is being removed is not complete.
fn remove_unless_in_use(lock: &Path) -> io::Result<()> {
    let Some(_locked) = open_and_lock(lock, FlockOperation::NonBlockingLockExclusive)? else { return Ok(()) };
    let (folder, incomplete) = (lock.with_extension(""), lock.with_extension(INCOMPLETE));
    remove_folder(&incomplete)?;
    if folder.is_dir() {
        fs::rename(&folder, &incomplete)?;
        remove_folder(&incomplete)?;
        tracing::info!(folder = %folder.display(), "removed an unused preparation");
    }
    fs::remove_file(lock)
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
                    let prepared = store.get_or_create("key", "t1", &AtomicBool::new(false), create).unwrap();
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
        let failed = store.get_or_create("key", "t1", &cancelled, |folder| {
            fill(folder)?;
            Err(CheckRunError::Root)
        });
        assert!(matches!(failed, Err(CheckRunError::Root)));
        assert_eq!(fs::read_dir(&store.root).unwrap().count(), 0);
        assert!(!store.contains("key"));
        let prepared = store.get_or_create("key", "t1", &cancelled, |folder| {
            assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
            fill(folder)
        });
        let held = prepared.unwrap();
        // A creation that waits for a user of the folder can be cancelled.
        fs::remove_dir_all(&held.path).unwrap();
        cancelled.store(true, Ordering::Relaxed);
        assert!(matches!(store.get_or_create("key", "t1", &cancelled, fill), Err(CheckRunError::Cancelled)));
    }

    #[test]
    fn task_that_waits_for_another_one_is_known() {
        let (_folder, store) = store();
        let cancelled = AtomicBool::new(false);
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let (end, ended) = std::sync::mpsc::sync_channel::<()>(1);
        std::thread::scope(|scope| {
            let (store, cancelled) = (&store, &cancelled);
            scope.spawn(move || {
                let create = |folder: &Path| {
                    started.send(()).unwrap();
                    ended.recv().unwrap();
                    fill(folder)
                };
                store.get_or_create("key", "first", cancelled, create).unwrap();
            });
            start.recv().unwrap();
            let second = scope.spawn(move || store.get_or_create("key", "second", cancelled, fill).unwrap());
            while !store.is_waiting("second") {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!store.is_waiting("first"));
            end.send(()).unwrap();
            second.join().unwrap();
            assert!(!store.is_waiting("second"));
        });
    }

    #[test]
    fn folder_that_was_created_again_has_another_id() {
        let (_folder, store) = store();
        let cancelled = AtomicBool::new(false);
        let first = store.get_or_create("key", "t1", &cancelled, fill).unwrap().id;
        assert_eq!(store.get_or_create("key", "t1", &cancelled, fill).unwrap().id, first);
        fs::remove_dir_all(store.root.join("key")).unwrap();
        assert_ne!(store.get_or_create("key", "t1", &cancelled, fill).unwrap().id, first);
    }

    #[test]
    fn folders_in_use_and_recent_ones_are_kept() {
        let (_folder, store) = store();
        let cancelled = AtomicBool::new(false);
        let create = |key: &str| store.get_or_create(key, "t1", &cancelled, fill).unwrap();
        let held = create("held");
        // Left behind by a process that was killed.
        fs::write(store.root.join("killed.lock"), "").unwrap();
        fs::create_dir(store.root.join("killed.incomplete")).unwrap();
        for number in 0..MAX_FOLDERS + 2 {
            drop(create(&format!("k{number}")));
            std::thread::sleep(Duration::from_millis(10));
        }
        let exists = |key: &str| store.root.join(key).is_dir();
        assert!(held.path.is_dir(), "in use");
        assert!(!exists("killed.incomplete") && !store.root.join("killed.lock").exists());
        assert!(!exists("k0") && !exists("k1") && exists(&format!("k{}", MAX_FOLDERS + 1)));
        let folders = fs::read_dir(&store.root).unwrap().flatten().filter(|entry| entry.path().is_dir()).count();
        assert!((MAX_FOLDERS..=MAX_FOLDERS + 1).contains(&folders), "{folders}");
    }
}
