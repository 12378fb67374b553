//! Private folders of the runs of a program. Agents keep state by the path of their working folder, so the paths are used
//! again. Other users of the machine cannot write to a folder above them: agents also read settings from there.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

/// Name of the folder in which a program runs.
const WORKING: &str = "empty";
/// Name of the home folder of a program that has no other.
const HOME: &str = "home";
/// Name of the folder for temporary files of a program.
const TEMPORARY: &str = "tmp";

/// The folders of the runs of one program.
#[derive(Debug)]
pub(super) struct RunFolders {
    /// `None`: the folders are in the system's folder for temporary files.
    parent: Option<PathBuf>,
    used: Mutex<BTreeSet<u32>>,
}

impl RunFolders {
    /// Folders below `parent` for the command `name`. What a killed node left there is removed.
    pub(super) fn new(parent: Option<&Path>, name: &str) -> Arc<Self> {
        let parent = parent.map(|parent| parent.join(name));
        if let Some(folder) = &parent
            && let Err(error) = std::fs::remove_dir_all(folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, folder = %folder.display(), "files of earlier runs are not removed");
        }
        Arc::new(Self { parent, used: Mutex::default() })
    }

    fn used(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the folder of a run.
    pub(super) fn create(self: &Arc<Self>) -> io::Result<RunFolder> {
        let folder = match &self.parent {
            None => {
                let temporary = tempfile::Builder::new().prefix("cfq-command-").tempdir()?;
                RunFolder { path: temporary.path().to_owned(), slot: None, _temporary: Some(temporary) }
            }
            Some(parent) => {
                let index = {
                    let mut used = self.used();
                    let free = (0..).find(|index| !used.contains(index)).unwrap_or_default();
                    used.insert(free);
                    free
                };
                let path = parent.join(index.to_string());
                let folder = RunFolder { path, slot: Some((self.clone(), index)), _temporary: None };
                // A run that could not remove its folder may have left files.
                folder.remove();
                DirBuilder::new().recursive(true).mode(0o700).create(&folder.path)?;
                folder
            }
        };
        for name in [WORKING, HOME, TEMPORARY] {
            std::fs::create_dir(folder.path.join(name))?;
        }
        Ok(folder)
    }
}

/// The folder of one run. Dropping it removes it.
#[derive(Debug)]
pub(super) struct RunFolder {
    pub(super) path: PathBuf,
    /// The number among the program's folders; `None` for a folder with a name of its own.
    slot: Option<(Arc<RunFolders>, u32)>,
    _temporary: Option<TempDir>,
}

impl RunFolder {
    /// The empty folder in which the program runs.
    pub(super) fn working(&self) -> PathBuf {
        self.path.join(WORKING)
    }

    /// An empty home folder.
    pub(super) fn home(&self) -> PathBuf {
        self.path.join(HOME)
    }

    /// The folder for temporary files.
    pub(super) fn temporary(&self) -> PathBuf {
        self.path.join(TEMPORARY)
    }

    fn remove(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, folder = %self.path.display(), "the folder of a run is not removed");
        }
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if let Some((folders, index)) = &self.slot {
            self.remove();
            folders.used().remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_runs_have_folders_of_their_own_whose_paths_are_used_again() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(parent.path().join("llm/7/empty")).unwrap();
        let folders = RunFolders::new(Some(parent.path()), "llm");
        assert!(!parent.path().join("llm").exists(), "a killed node left it");
        let (first, second) = (folders.create().unwrap(), folders.create().unwrap());
        let path = first.working();
        assert_ne!(path, second.working());
        std::fs::write(path.join("left"), "x").unwrap();
        drop(first);
        assert!(!path.exists() && second.working().exists());
        let third = folders.create().unwrap();
        assert_eq!(third.working(), path);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    }
}
