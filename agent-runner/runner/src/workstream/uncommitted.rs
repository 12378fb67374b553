//! Counts the uncommitted changes of a working tree.

use std::path::PathBuf;

use git2::StatusOptions;
use serde::{Deserialize, Serialize};

use super::error::{GitError, git_context};
use super::source::find_source_repository;

/// Request for the number of uncommitted changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UncommittedRequest {
    /// A folder in the repository, canonical.
    pub dir: PathBuf,
}

impl UncommittedRequest {
    /// Number of files that differ from HEAD, or that git neither tracks nor ignores; an untracked folder counts once.
    ///
    /// # Errors
    /// [`GitError::NotARepository`], and [`GitError::Git`] if libgit2 fails.
    pub(super) fn count(&self) -> Result<u64, GitError> {
        let repository = find_source_repository(&self.dir)?;
        if repository.is_bare() {
            return Ok(0);
        }
        let mut options = StatusOptions::new();
        options.include_untracked(true).recurse_untracked_dirs(false).include_ignored(false).exclude_submodules(true);
        // The index is the user's, and not written.
        options.no_refresh(true).update_index(false);
        let statuses = git_context("compare the working tree with HEAD", repository.statuses(Some(&mut options)))?;
        Ok(statuses.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn changed_new_and_removed_files_are_counted() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "y = 1\n"), (".gitignore", "*.log\n")]);
        let count = || UncommittedRequest { dir: user.path().canonicalize().unwrap() }.count().unwrap();
        assert_eq!(count(), 0);
        std::fs::write(user.path().join("a.py"), "x = 2\n").unwrap();
        std::fs::remove_file(user.path().join("b.py")).unwrap();
        std::fs::write(user.path().join("new.py"), "").unwrap();
        std::fs::write(user.path().join("run.log"), "").unwrap();
        assert_eq!(count(), 3);
    }
}
