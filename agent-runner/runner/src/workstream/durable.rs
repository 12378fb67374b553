//! Power loss: what a recorded step refers to is on disk before the step is recorded.
//!
//! libgit2 syncs a file before it renames the file to its final name, and the file's folder after it, so an object or
//! ref under its final name is always complete. It does not sync the entries of folders that it creates, nor an object
//! that already exists, although the process that wrote it may have been killed before the folder was synced. This
//! module syncs both.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;

use git2::{ObjectType, Oid, Repository, Tree};

use super::error::{GitError, git_context, io_context};

/// Makes libgit2 sync all files that it writes into a git folder. Must be called before a repository is opened.
pub(super) fn enable_fsync() {
    static ENABLED: Once = Once::new();
    ENABLED.call_once(|| {
        libgit2_sys::init();
        // SAFETY: this option takes one int and only sets a flag; a repository that another thread opens meanwhile sees
        // the old or the new value.
        #[allow(unsafe_code)]
        let code =
            unsafe { libgit2_sys::git_libgit2_opts(libgit2_sys::GIT_OPT_ENABLE_FSYNC_GITDIR as c_int, 1 as c_int) };
        if code < 0 {
            tracing::error!(code, "libgit2 cannot sync files, a power loss may lose commits");
        }
    });
}

/// Syncs `commit` and those of its trees and files that are not in the tree `known`.
pub(super) fn sync_commit(repository: &Repository, commit: Oid, known: &Tree<'_>) -> Result<(), GitError> {
    let found = git_context("read the new commit", repository.find_commit(commit))?;
    let tree = git_context("read the new commit's tree", found.tree())?;
    let mut ids = BTreeSet::from([commit]);
    collect_new(repository, &tree, Some(known), &mut ids)?;
    let objects = repository.commondir().join("objects");
    let mut folders = BTreeSet::new();
    for id in ids {
        let hex = id.to_string();
        let folder = objects.join(&hex[..2]);
        // An object that is not loose is in a pack, which its writer has synced.
        if sync(&folder.join(&hex[2..]))? {
            folders.insert(folder);
        }
    }
    folders.insert(objects);
    sync_all(folders)
}

/// Adds the ids of `tree` and of everything below it that is not at the same path in `known`.
fn collect_new(
    repository: &Repository,
    tree: &Tree<'_>,
    known: Option<&Tree<'_>>,
    ids: &mut BTreeSet<Oid>,
) -> Result<(), GitError> {
    if known.is_some_and(|known| known.id() == tree.id()) {
        return Ok(());
    }
    ids.insert(tree.id());
    for entry in tree {
        let before = known.and_then(|known| known.get_name_bytes(entry.name_bytes()));
        if before.as_ref().is_some_and(|before| before.id() == entry.id()) {
            continue;
        }
        match entry.kind() {
            Some(ObjectType::Tree) => {
                let below = git_context("read a new tree", repository.find_tree(entry.id()))?;
                let known_below = before.and_then(|before| repository.find_tree(before.id()).ok());
                collect_new(repository, &below, known_below.as_ref(), ids)?;
            }
            Some(ObjectType::Blob) => {
                ids.insert(entry.id());
            }
            // A submodule's commit is not in this repository.
            _ => {}
        }
    }
    Ok(())
}

/// Syncs a ref, its reflog and all folders above them.
pub(super) fn sync_ref(repository: &Repository, name: &str) -> Result<(), GitError> {
    let git_dir = repository.commondir();
    for file in [git_dir.join(name), git_dir.join("logs").join(name)] {
        sync(&file)?;
        sync_all(file.ancestors().skip(1).take_while(|folder| folder.starts_with(git_dir)).map(Path::to_owned))?;
    }
    Ok(())
}

/// Syncs files and folders, in this order.
pub(super) fn sync_all(paths: impl IntoIterator<Item = PathBuf>) -> Result<(), GitError> {
    paths.into_iter().try_for_each(|path| sync(&path).map(drop))
}

/// Syncs a file or folder; returns false if it does not exist.
fn sync(path: &Path) -> Result<bool, GitError> {
    let operation = || format!("sync {} to disk", path.display());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(GitError::Io { operation: operation(), source }),
    };
    match file.sync_all() {
        // Some file systems cannot sync folders.
        Err(error) if error.kind() == ErrorKind::InvalidInput && path.is_dir() => Ok(true),
        synced => io_context(operation(), synced).map(|()| true),
    }
}

/// Replaces a file as a whole. Its new content is on disk when this returns; after a power loss the file has its old or
/// its new content.
pub(super) fn write_file(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let is_new = !folder.exists();
    std::fs::create_dir_all(folder)?;
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()?;
    match folder.parent().filter(|_| is_new) {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}
