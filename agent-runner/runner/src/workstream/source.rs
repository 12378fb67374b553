//! Opens the user's repository, or reports why it cannot be used.

use std::path::Path;

use git2::{ErrorCode, Repository, RepositoryOpenFlags};

use super::durable::enable_fsync;
use super::error::{GitError, git_context};

/// Opens exactly `path` (a working tree's top folder, its `.git`, or a bare repository), not a repository in a
/// parent folder.
///
/// # Errors
/// A [`GitError`] for a path that does not exist or cannot be read, is not a repository, or belongs to another user.
pub fn open_source_repository(path: &Path) -> Result<Repository, GitError> {
    enable_fsync();
    let owned = || path.to_path_buf();
    match std::fs::metadata(path) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(GitError::PathNotFound { path: owned() });
        }
        Err(source) => return Err(GitError::Unreadable { path: owned(), source }),
    }
    // libgit2 reports "not found" also for a folder that it may not read.
    if let Err(source) = std::fs::read_dir(path) {
        return Err(GitError::Unreadable { path: owned(), source });
    }
    let no_ceiling: [&Path; 0] = [];
    match Repository::open_ext(path, RepositoryOpenFlags::NO_SEARCH, no_ceiling) {
        Ok(repository) => Ok(repository),
        Err(error) => Err(match error.code() {
            ErrorCode::NotFound => GitError::NotARepository { path: owned() },
            ErrorCode::Owner => GitError::WrongOwner { path: owned() },
            _ => GitError::Git { operation: format!("open {}", path.display()), source: error },
        }),
    }
}

/// Returns the commit id of HEAD, which may be a branch or detached.
///
/// # Errors
/// [`GitError::NoCommits`] if the repository has no commit, and the errors of [`open_source_repository`].
pub fn head_commit(path: &Path) -> Result<String, GitError> {
    let repository = open_source_repository(path)?;
    match repository.head() {
        Ok(head) => {
            let commit = git_context("find HEAD's commit", head.peel_to_commit())?;
            Ok(commit.id().to_string())
        }
        Err(error) => match error.code() {
            ErrorCode::UnbornBranch | ErrorCode::NotFound => Err(GitError::NoCommits { path: path.to_path_buf() }),
            _ => Err(GitError::Git { operation: format!("read HEAD of {}", path.display()), source: error }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn unusable_repositories_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(head_commit(&folder.path().join("none")), Err(GitError::PathNotFound { .. })));
        assert!(matches!(head_commit(folder.path()), Err(GitError::NotARepository { .. })));
        let empty = folder.path().join("empty");
        Repository::init(&empty).unwrap();
        let error = head_commit(&empty).unwrap_err();
        assert!(error.to_string().contains("no commits yet"), "{error}");
        // A plain folder inside a repository is not the repository.
        let inner = empty.join("inner");
        std::fs::create_dir(&inner).unwrap();
        assert!(matches!(head_commit(&inner), Err(GitError::NotARepository { .. })));
    }

    #[test]
    fn detached_head_and_bare_repository_are_accepted() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let commit = head_commit(&user.path()).unwrap();
        assert_eq!(commit, user.base);
        user.repo().set_head_detached(git2::Oid::from_str(&commit).unwrap()).unwrap();
        assert_eq!(head_commit(&user.path()).unwrap(), commit);
        let bare = user.folder.path().join("bare.git");
        git2::build::RepoBuilder::new().bare(true).clone(user.path().to_str().unwrap(), &bare).unwrap();
        assert_eq!(head_commit(&bare).unwrap(), commit);
    }
}
