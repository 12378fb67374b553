//! Checkouts of finished runs, which later runs on the same repository change to their commit instead of writing all
//! files again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::workstream::CheckedOut;

/// Maximum number of checkouts that are kept, of all repositories together. Above it, the one that was not used for the
/// longest time is removed.
const MAX_KEPT: usize = 4;

/// The kept checkouts of this process. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct KeptCheckouts {
    /// Folder of the kept checkouts.
    root: PathBuf,
    /// In the order of their last use.
    kept: Arc<Mutex<Vec<Kept>>>,
    next: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Kept {
    /// What it can be used for.
    key: String,
    path: PathBuf,
    content: CheckedOut,
}

impl KeptCheckouts {
    /// `root` must be on the file system of the folders that checkouts are moved to.
    pub fn new(root: PathBuf) -> Self {
        Self { root, kept: Arc::default(), next: Arc::default() }
    }

    /// Moves a kept checkout of this key to the path `to`, which does not exist, and returns its content. The parent
    /// of `to` is created. If none is kept, nothing is moved, and the content is the default.
    pub fn take(&self, key: &str, to: &Path) -> CheckedOut {
        let Some(kept) = self.find(key) else { return CheckedOut::default() };
        let parent = to.parent().unwrap_or(to);
        match fs::create_dir_all(parent).and_then(|()| fs::rename(&kept.path, to)) {
            Ok(()) => kept.content,
            Err(error) => {
                tracing::warn!(%error, path = %kept.path.display(), "cannot reuse the checkout of an earlier check");
                remove(&kept.path);
                CheckedOut::default()
            }
        }
    }

    /// Keeps the checkout at the path `from`, in which no program runs any more, without what it does not need.
    pub fn keep(&self, key: &str, from: &Path, content: CheckedOut) {
        if content.is_empty() {
            return;
        }
        let path = self.root.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let cleaned = content.clean(from).and_then(|()| fs::create_dir_all(&self.root));
        let moved = cleaned.and_then(|()| fs::rename(from, &path));
        if let Err(error) = moved {
            tracing::debug!(%error, path = %from.display(), "the checkout of a check is not kept");
            return;
        }
        let mut kept = self.lock();
        kept.push(Kept { key: key.to_owned(), path, content });
        let surplus = kept.len().saturating_sub(MAX_KEPT);
        let removed: Vec<Kept> = kept.drain(..surplus).collect();
        drop(kept);
        removed.iter().for_each(|kept| remove(&kept.path));
    }

    fn find(&self, key: &str) -> Option<Kept> {
        let mut kept = self.lock();
        let found = kept.iter().rposition(|kept| kept.key == key)?;
        Some(kept.remove(found))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        // Poisoning is ignored: the list is consistent after each step.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(path: &Path) {
    if let Err(error) = cfq_sandbox::remove_folder(path) {
        tracing::warn!(%error, path = %path.display(), "cannot remove the checkout of an earlier check");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkout_is_used_once_and_only_for_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let kept = KeptCheckouts::new(folder.path().join("kept"));
        let checkout = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join(name), "").unwrap();
            path
        };
        for name in ["one", "two"] {
            let path = checkout(name);
            kept.keep("r1", &path, CheckedOut::of_folder(&path));
        }
        let unknown = checkout("unknown");
        kept.keep("r1", &unknown, CheckedOut::default());
        assert!(unknown.exists(), "it would be written again");
        let to = folder.path().join("new/to");
        kept.take("r2", &to);
        assert!(!to.exists());
        for name in ["two", "one"] {
            kept.take("r1", &to);
            assert!(to.join(name).exists());
            fs::remove_dir_all(&to).unwrap();
        }
        kept.take("r1", &to);
        assert!(!to.exists());
        for n in 0..2 * MAX_KEPT {
            let path = checkout(&format!("c{n}"));
            kept.keep("r1", &path, CheckedOut::of_folder(&path));
        }
        assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), MAX_KEPT);
    }
}
