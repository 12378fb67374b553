//! Refuses a delivery that a link in the user's `.git` folder would redirect to a file outside: libgit2 follows links
//! when it writes. A repository that was unpacked from an archive may contain such links.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use git2::Repository;

use super::error::{GitError, UnsafeGitPathReason, io_context};

/// Checks all paths that creating `branch` reads or writes, except those of objects.
///
/// # Errors
/// [`GitError::UnsafeGitPath`] with the first path that is not what git writes there.
pub(super) fn check_branch_paths(repository: &Repository, branch: &str) -> Result<(), GitError> {
    let git_dir = repository.commondir();
    for path in ["packed-refs", "logs/HEAD"] {
        check(git_dir, path, Kind::Replaced)?;
    }
    // A ref is replaced as a whole, and a reflog is appended to.
    for (root, kind) in [("refs/heads", Kind::Replaced), ("logs/refs/heads", Kind::Appended)] {
        let path = format!("{root}/{branch}");
        for (end, _) in path.match_indices('/') {
            check(git_dir, &path[..end], Kind::Replaced)?;
        }
        check(git_dir, &path, kind)?;
    }
    Ok(())
}

/// Checks all folders in which loose objects are written.
///
/// # Errors
/// [`GitError::UnsafeGitPath`] with the first path that is a symbolic link.
pub(super) fn check_object_paths(repository: &Repository) -> Result<(), GitError> {
    let git_dir = repository.commondir();
    check(git_dir, "objects", Kind::Replaced)?;
    let operation = || format!("read {}", git_dir.join("objects").display());
    for entry in io_context(operation(), std::fs::read_dir(git_dir.join("objects")))? {
        let name = io_context(operation(), entry)?.file_name();
        check(git_dir, Path::new("objects").join(name), Kind::Replaced)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// A folder, or a file that is only read or replaced.
    Replaced,
    /// A file to which git appends.
    Appended,
}

fn check(git_dir: &Path, path: impl AsRef<Path>, kind: Kind) -> Result<(), GitError> {
    let path: PathBuf = git_dir.join(path);
    let metadata = match std::fs::symlink_metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
        Err(source) => return Err(GitError::Unreadable { path, source }),
    };
    let reason = if metadata.is_symlink() {
        UnsafeGitPathReason::SymbolicLink
    } else if !metadata.is_file() && !metadata.is_dir() {
        UnsafeGitPathReason::SpecialFile
    } else if kind == Kind::Appended && metadata.is_file() && metadata.nlink() > 1 {
        UnsafeGitPathReason::HardLink
    } else {
        return Ok(());
    };
    Err(GitError::UnsafeGitPath { path, reason })
}
