//! Checks that the files which libgit2 opens in a git folder are regular files of a plausible size: opening a FIFO waits
//! for a writer for ever, and libgit2 reads most of these files into memory as a whole.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::owners::Owners;
use crate::workstream::error::{GitError, SizeLimit, UnsafeGitPathReason, io_context};
use crate::workstream::size_limits::{SizeLimits, StopCondition};

/// Maximum size of a file that contains a path or a ref, in bytes: several times the longest path of Linux.
const MAX_POINTER_BYTES: u64 = 16 << 10;
/// Maximum size of a configuration or list file in the git folder, in bytes.
const MAX_SETTINGS_BYTES: u64 = 16 << 20;
/// Maximum size of `packed-refs`, the index or a commit graph, in bytes: about 10 million entries.
const MAX_LIST_BYTES: u64 = 1 << 30;
/// Maximum wait for the holder of a lease on a file; the kernel ends a lease after 45 s.
const MAX_LEASE_WAIT: Duration = Duration::from_secs(60);
/// Pause between two attempts to open a file with a lease.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Number of files after which the walk checks whether it must stop.
const FILES_PER_CHECK: u64 = 1024;
/// Files of a git folder that libgit2 opens by name, with their maximum sizes in bytes. The delivery checks the logs.
const NAMED_FILES: [(&str, u64); 12] = [
    ("HEAD", MAX_POINTER_BYTES),
    ("commondir", MAX_POINTER_BYTES),
    ("gitdir", MAX_POINTER_BYTES),
    ("config", MAX_SETTINGS_BYTES),
    ("config.worktree", MAX_SETTINGS_BYTES),
    ("shallow", MAX_SETTINGS_BYTES),
    ("info/attributes", MAX_SETTINGS_BYTES),
    ("info/exclude", MAX_SETTINGS_BYTES),
    ("info/grafts", MAX_SETTINGS_BYTES),
    ("info/sparse-checkout", MAX_SETTINGS_BYTES),
    ("packed-refs", MAX_LIST_BYTES),
    ("index", MAX_LIST_BYTES),
];

/// Check of all files of a repository.
pub(super) struct FileCheck<'a> {
    pub(super) owners: &'a Owners,
    pub(super) limits: &'a SizeLimits,
    pub(super) stop: &'a StopCondition,
    /// Canonical folders in which a link to a file may end.
    pub(super) inside: Vec<PathBuf>,
    /// Number of files and folders seen so far.
    pub(super) seen: u64,
}

/// What is allowed at a path.
#[derive(Clone, Copy)]
struct Rules {
    /// Maximum size of a file, in bytes; `None` if it is not read as a whole.
    max_bytes: Option<u64>,
    /// True if a link may lead to any folder of an allowed owner, as alternates do.
    may_leave: bool,
    /// Levels of folders that libgit2 enters.
    depth: usize,
}

impl FileCheck<'_> {
    /// Checks the files in a git folder, except its objects and logs.
    ///
    /// # Errors
    /// [`GitError::UnsafeGitPath`] with the first file that is not a regular file, is too large, or is a link that
    /// leaves the repository; [`GitError::ForeignOwner`]; [`GitError::TooLarge`] and the errors of the stop condition.
    pub(super) fn check_git_folder(&mut self, git_dir: &Path) -> Result<(), GitError> {
        for (name, max_bytes) in NAMED_FILES {
            let rules = Rules { max_bytes: Some(max_bytes), may_leave: false, depth: 0 };
            self.check(git_dir.join(name), rules)?;
        }
        let rules = Rules { max_bytes: Some(MAX_POINTER_BYTES), may_leave: false, depth: usize::MAX };
        self.check(git_dir.join("refs"), rules)
    }

    /// Checks a file that a configuration includes; it may be in any folder of an allowed owner.
    ///
    /// # Errors
    /// As [`Self::check_git_folder`].
    pub(super) fn check_included(&mut self, path: &Path) -> Result<(), GitError> {
        if if_reachable(path, std::fs::metadata(path))?.is_some() {
            self.owners.check(path)?;
        }
        self.check(path.to_owned(), Rules { max_bytes: Some(MAX_SETTINGS_BYTES), may_leave: true, depth: 0 })
    }

    /// Checks the files in a folder of objects.
    ///
    /// # Errors
    /// As [`Self::check_git_folder`].
    pub(super) fn check_objects(&mut self, objects: &Path) -> Result<(), GitError> {
        self.owners.check(objects)?;
        // An object that cannot be compressed is a little larger than its content.
        let max_loose_bytes = self.limits.file_bytes.saturating_add(self.limits.file_bytes / 8);
        for name in self.names(objects)? {
            let is_loose = name.len() == 2 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit);
            let (max_bytes, depth) = match name.to_str() {
                // Packs are mapped into memory in parts.
                Some("pack") => (None, 1),
                Some("info") => (Some(MAX_LIST_BYTES), 2),
                _ if is_loose => (Some(max_loose_bytes), 1),
                _ => continue,
            };
            self.check(objects.join(name), Rules { max_bytes, may_leave: true, depth })?;
        }
        Ok(())
    }

    /// Checks a path and, if it is a folder, everything below it that libgit2 opens.
    fn check(&mut self, path: PathBuf, rules: Rules) -> Result<(), GitError> {
        let mut open = vec![(path, rules.depth)];
        while let Some((path, depth)) = open.pop() {
            if self.is_folder(&path, rules)? && depth > 0 {
                open.extend(self.names(&path)?.into_iter().map(|name| (path.join(name), depth - 1)));
            }
        }
        Ok(())
    }

    /// Checks one path, and returns whether it is a folder. A path that does not exist passes.
    fn is_folder(&mut self, path: &Path, rules: Rules) -> Result<bool, GitError> {
        self.seen += 1;
        if self.seen.is_multiple_of(FILES_PER_CHECK) {
            self.stop.check("list the files in the git folder")?;
        }
        let Some(mut metadata) = if_reachable(path, std::fs::symlink_metadata(path))? else { return Ok(false) };
        if metadata.is_symlink() {
            // A link to nothing is not opened.
            let Some(target) = if_reachable(path, path.canonicalize())? else { return Ok(false) };
            let Some(found) = if_reachable(path, std::fs::metadata(path))? else { return Ok(false) };
            let is_inside = self.inside.iter().any(|folder| target.starts_with(folder));
            if !rules.may_leave && (found.is_dir() || !is_inside) {
                return Err(unsafe_path(path, UnsafeGitPathReason::SymbolicLink));
            }
            self.owners.check_metadata(&target, &found)?;
            metadata = found;
        }
        if metadata.is_dir() {
            return self.owners.check_metadata(path, &metadata).map(|()| true);
        }
        check_file(path, &metadata, rules.max_bytes).map(|()| false)
    }

    /// Names in a folder; none if it may not be read, because then libgit2 cannot read it either.
    fn names(&mut self, folder: &Path) -> Result<Vec<OsString>, GitError> {
        let Some(entries) = if_reachable(folder, std::fs::read_dir(folder))? else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for entry in entries {
            names.push(io_context(format!("read {}", folder.display()), entry)?.file_name());
            if self.seen + names.len() as u64 > self.limits.git_files {
                let limit = SizeLimit::GitFiles(self.limits.git_files);
                return Err(GitError::TooLarge { path: folder.to_owned(), limit });
            }
        }
        Ok(names)
    }
}

pub(super) fn unsafe_path(path: &Path, reason: UnsafeGitPathReason) -> GitError {
    GitError::UnsafeGitPath { path: path.to_owned(), reason }
}

fn check_file(path: &Path, metadata: &Metadata, max_bytes: Option<u64>) -> Result<(), GitError> {
    if !metadata.is_file() {
        return Err(unsafe_path(path, UnsafeGitPathReason::SpecialFile));
    }
    match max_bytes {
        Some(max) if metadata.size() > max => Err(unsafe_path(path, UnsafeGitPathReason::LargeFile(max))),
        _ => Ok(()),
    }
}

/// Reads a file that contains a path; `None` if it does not exist. Does not wait for the writer of a FIFO.
///
/// # Errors
/// [`GitError::UnsafeGitPath`] if it is not a regular file or too large, [`GitError::Unreadable`].
pub(super) fn read_pointer(path: &Path) -> Result<Option<String>, GitError> {
    read_text(path, MAX_POINTER_BYTES)
}

/// Like [`read_pointer`], for the configuration and the list of alternates.
pub(super) fn read_settings(path: &Path) -> Result<Option<String>, GitError> {
    read_text(path, MAX_SETTINGS_BYTES)
}

fn read_text(path: &Path, max_bytes: u64) -> Result<Option<String>, GitError> {
    let Some(metadata) = if_reachable(path, std::fs::metadata(path))? else { return Ok(None) };
    check_file(path, &metadata, Some(max_bytes))?;
    let unreadable = |source| GitError::Unreadable { path: path.to_owned(), source };
    let file = open_without_fifo_wait(path).map_err(unreadable)?;
    // The file may have been replaced since.
    check_file(path, &file.metadata().map_err(unreadable)?, Some(max_bytes))?;
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Opens a file to read it. Waits while another process holds a lease on the file (as file servers do), but not for the
/// writer of a FIFO.
fn open_without_fifo_wait(path: &Path) -> std::io::Result<File> {
    let start = Instant::now();
    loop {
        match open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => return Ok(File::from(file)),
            Err(Errno::WOULDBLOCK) if start.elapsed() < MAX_LEASE_WAIT => std::thread::sleep(LEASE_CHECK_INTERVAL),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// `None` if a path does not exist or may not be looked at.
fn if_reachable<T>(path: &Path, found: std::io::Result<T>) -> Result<Option<T>, GitError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied => Ok(None),
            _ => Err(GitError::Unreadable { path: path.to_owned(), source: error }),
        },
    }
}
