//! Changes a folder that contains an earlier checkout to another commit: only the files that differ are written. A
//! program that is not trusted may have run in the folder since. What it changed, added or removed is undone, so the
//! result is the same as that of a checkout into an empty folder.
//!
//! A file counts as unchanged if its inode, mode, size and times are those that it had when it was written. A program
//! can set the modification time of a file, but not its change time (`ctime`), which every write, `chmod` and rename
//! sets to the current time. On file systems where a write through a memory mapping may leave the change time as it is,
//! such as tmpfs, no file counts as unchanged. The sandbox forbids requests to the file system that exchange the
//! content of files without a change of their times. The times of folders are not restored.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use git2::build::CheckoutBuilder;
use git2::{ObjectType, Oid, Repository};
use rustix::fs::FsWord;

use super::error::{GitError, git_context, io_context, parse_oid};
use super::without_submodules::tree_without_submodules;

/// File systems on which a write through a memory mapping sets the change time: ext2 to ext4, XFS, btrfs.
const TRUSTED_FILE_SYSTEMS: [FsWord; 3] = [0xEF53, 0x5846_5342, 0x9123_683E];
/// Maximum number of waits for the next tick of the file system's clock, of [`TICK_WAIT`] each. A tick takes
/// at most 10 ms.
const MAX_TICK_WAITS: usize = 40;
const TICK_WAIT: Duration = Duration::from_millis(1);

/// The files and folders of a checkout, as they were when it was made. The default knows nothing.
#[derive(Debug, Default)]
pub struct CheckedOut {
    commit: CommitFiles,
    files: HashMap<PathBuf, Identity>,
    /// The folders, with the root as the empty path.
    folders: HashMap<PathBuf, Identity>,
}

/// A file or link in a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    oid: Oid,
    mode: i32,
}

/// What shows that a file was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// All files, links and folders of a commit. Empty trees are left out.
#[derive(Debug, Default)]
struct CommitFiles {
    entries: HashMap<PathBuf, Entry>,
    folders: BTreeSet<PathBuf>,
}

impl CheckedOut {
    /// Whether nothing is known, so that all files would be written again.
    pub fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// Removes everything from the checkout at `path` that is not as it was when it was made.
    ///
    /// # Errors
    /// The first error of the system.
    pub fn clean(&self, path: &Path) -> io::Result<()> {
        clean(path, Path::new(""), &self.commit, self, &mut HashMap::new())
    }

    /// The content of a folder without subfolders, as if it had been checked out.
    #[cfg(test)]
    pub(crate) fn of_folder(path: &Path) -> Self {
        let entry = Entry { oid: Oid::from_bytes(&[0; 20]).unwrap(), mode: 0o100_644 };
        let names = fs::read_dir(path).unwrap().map(|entry| PathBuf::from(entry.unwrap().file_name()));
        let entries = names.map(|name| (name, entry)).collect();
        record(path, CommitFiles { entries, folders: [PathBuf::new()].into() }, HashMap::new()).unwrap()
    }

    fn is_unchanged(&self, path: &Path, entry: Entry, identity: Identity) -> bool {
        self.commit.entries.get(path) == Some(&entry) && self.files.get(path) == Some(&identity)
    }
}

/// Makes the folder `path` a checkout of `commit`. `before` is what the folder contained after the last checkout into
/// it, if there was one. No program may run in the folder.
///
/// # Errors
/// A [`GitError`] if the folder cannot be written.
pub(super) fn restore(
    repository: &Repository,
    path: &Path,
    commit: &str,
    before: CheckedOut,
) -> Result<CheckedOut, GitError> {
    // The parent folder is on the same file system.
    let parent = path.parent().unwrap_or(path);
    let is_trusted = rustix::fs::statfs(parent).is_ok_and(|fs| TRUSTED_FILE_SYSTEMS.contains(&fs.f_type));
    let wanted = if is_trusted { files_of(repository, commit)? } else { None };
    let cannot_clean = || format!("restore the checkout {}", path.display());
    let mut kept = HashMap::new();
    match wanted.as_ref().filter(|_| is_unchanged_folder(path, Path::new(""), &before)) {
        Some(wanted) => io_context(cannot_clean(), clean(path, Path::new(""), wanted, &before, &mut kept))?,
        None => {
            io_context(cannot_clean(), cfq_sandbox::remove_folder(path))?;
            io_context(cannot_clean(), fs::create_dir_all(path))?;
        }
    }
    let missing = wanted.as_ref().map(|wanted| {
        wanted.entries.keys().filter(|file| !kept.contains_key(*file)).cloned().collect::<Vec<PathBuf>>()
    });
    // libgit2 reads a backslash in a path as an escape character, also where it should not.
    let is_ambiguous = |file: &PathBuf| file.as_os_str().as_bytes().contains(&b'\\');
    if missing.as_ref().is_some_and(|missing| !kept.is_empty() && missing.iter().any(is_ambiguous)) {
        return restore(repository, path, commit, CheckedOut::default());
    }
    let written = missing.as_ref().map_or(0, Vec::len);
    tracing::debug!(path = %path.display(), kept = kept.len(), written, "checkout changed to a commit");
    if missing.as_ref().is_none_or(|missing| !missing.is_empty()) {
        write(repository, path, commit, missing.filter(|_| !kept.is_empty()).as_deref())?;
    }
    let Some(wanted) = wanted else { return Ok(CheckedOut::default()) };
    io_context(format!("read {}", path.display()), record(path, wanted, kept))
}

/// Writes files of a commit, which do not exist in the folder; all of them if `files` is `None`.
fn write(repository: &Repository, path: &Path, commit: &str, files: Option<&[PathBuf]>) -> Result<(), GitError> {
    let tree = match files {
        // The list is only made for a commit without submodules.
        Some(_) => git_context(format!("find commit {commit}"), repository.find_object(parse_oid(commit)?, None))?,
        None => tree_without_submodules(repository, commit)?.into_object(),
    };
    let mut options = CheckoutBuilder::new();
    options.force().disable_filters(true).update_index(false).target_dir(path);
    if let Some(files) = files {
        options.disable_pathspec_match(true);
        for file in files {
            options.path(file.as_os_str().as_bytes());
        }
    }
    let written = repository.checkout_tree(&tree, Some(&mut options));
    git_context(format!("check out into {}", path.display()), written)
}

/// The files of a commit; `None` if it has submodules, which are not checked out.
fn files_of(repository: &Repository, commit: &str) -> Result<Option<CommitFiles>, GitError> {
    let commit = git_context(format!("find commit {commit}"), repository.find_commit(parse_oid(commit)?))?;
    let tree = git_context("read a tree", commit.tree())?;
    let mut files = CommitFiles::default();
    let mut open = vec![(PathBuf::new(), tree)];
    while let Some((folder, tree)) = open.pop() {
        for entry in &tree {
            let path = folder.join(OsStr::from_bytes(entry.name_bytes()));
            match entry.kind() {
                Some(ObjectType::Tree) => {
                    open.push((path, git_context("read a tree", repository.find_tree(entry.id()))?));
                }
                Some(ObjectType::Blob) => {
                    let folders = folder.ancestors().take_while(|above| !files.folders.contains(*above));
                    let folders: Vec<PathBuf> = folders.map(Path::to_owned).collect();
                    files.folders.extend(folders);
                    files.entries.insert(path, Entry { oid: entry.id(), mode: entry.filemode_raw() });
                }
                _ => return Ok(None),
            }
        }
    }
    files.folders.insert(PathBuf::new());
    Ok(Some(files))
}

/// Removes everything below the folder `root/folder` that is not a file of `wanted`, unchanged since `before`, or a
/// folder of such files. Adds the files that stay to `kept`.
fn clean(
    root: &Path,
    folder: &Path,
    wanted: &CommitFiles,
    before: &CheckedOut,
    kept: &mut HashMap<PathBuf, Identity>,
) -> io::Result<()> {
    let names: Vec<OsString> = fs::read_dir(root.join(folder))?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<io::Result<_>>()?;
    for name in names {
        let path = folder.join(name);
        let full = root.join(&path);
        let metadata = fs::symlink_metadata(&full)?;
        if metadata.is_dir() {
            match wanted.folders.contains(&path) && is_unchanged_folder(&full, &path, before) {
                true => clean(root, &path, wanted, before, kept)?,
                false => cfq_sandbox::remove_folder(&full)?,
            }
            continue;
        }
        let identity = Identity::of(&metadata);
        match wanted.entries.get(&path) {
            Some(entry) if before.is_unchanged(&path, *entry, identity) => drop(kept.insert(path, identity)),
            _ => fs::remove_file(&full)?,
        }
    }
    Ok(())
}

/// Whether nothing but the list of files of a folder may have changed.
fn is_unchanged_folder(full: &Path, path: &Path, before: &CheckedOut) -> bool {
    let Some(known) = before.folders.get(path) else { return false };
    let Ok(metadata) = fs::symlink_metadata(full) else { return false };
    let now = Identity::of(&metadata);
    let same_rights = metadata.is_dir() && (now.inode, now.mode, now.owner) == (known.inode, known.mode, known.owner);
    // A default access list would apply to the files that are written.
    let has_attributes = || !matches!(rustix::fs::llistxattr(full, &mut [0_u8; 0]), Ok(0));
    same_rights && (now == *known || !has_attributes())
}

/// What the folder contains now. Returns only when the clock of the file system is past everything in it, so that any
/// later change sets another change time. Returns that nothing is known if that takes too long, because the clock was
/// set back, or if a file is missing.
fn record(root: &Path, commit: CommitFiles, kept: HashMap<PathBuf, Identity>) -> io::Result<CheckedOut> {
    let identity = |path: &Path| match fs::symlink_metadata(root.join(path)) {
        Ok(metadata) => Ok(Some(Identity::of(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let mut checked_out = CheckedOut { files: kept, ..CheckedOut::default() };
    for path in commit.entries.keys() {
        if checked_out.files.contains_key(path) {
            continue;
        }
        let Some(identity) = identity(path)? else { return Ok(CheckedOut::default()) };
        checked_out.files.insert(path.clone(), identity);
    }
    for path in &commit.folders {
        let Some(identity) = identity(path)? else { return Ok(CheckedOut::default()) };
        checked_out.folders.insert(path.clone(), identity);
    }
    checked_out.commit = commit;
    let last = checked_out.files.values().chain(checked_out.folders.values()).map(|identity| identity.changed).max();
    for _ in 0..MAX_TICK_WAITS {
        if Some(file_system_time(root)?) > last {
            return Ok(checked_out);
        }
        std::thread::sleep(TICK_WAIT);
    }
    Ok(CheckedOut::default())
}

/// The change time of a file that is written now, beside the folder `root`.
fn file_system_time(root: &Path) -> io::Result<(i64, i64)> {
    let probe = root.with_extension("time");
    fs::write(&probe, "")?;
    let metadata = fs::symlink_metadata(&probe)?;
    fs::remove_file(&probe)?;
    Ok((metadata.ctime(), metadata.ctime_nsec()))
}

#[cfg(test)]
mod tests;
