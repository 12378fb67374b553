//! Owners of the folders that a repository consists of.
//!
//! A repository can refer to folders elsewhere: by links, alternates, and the pointers of linked worktrees. Root may
//! read all of them, the repository's owner may not. So a cfq that runs as root reads only folders of the user who owns
//! the repository; without root, the operating system decides.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::workstream::error::GitError;

/// Users whose folders may be part of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owners {
    Any,
    /// Only the owner of the repository's top folder.
    Only {
        uid: u32,
    },
}

impl Owners {
    /// Owners for the repository with this top folder, for the user that this process runs as.
    pub(super) fn of(top: &Metadata) -> Self {
        match rustix::process::geteuid().is_root() {
            true => Self::Only { uid: top.uid() },
            false => Self::Any,
        }
    }

    /// Checks the owner of a folder.
    ///
    /// # Errors
    /// [`GitError::ForeignOwner`], or [`GitError::Unreadable`] if it cannot be looked at.
    pub(super) fn check(&self, path: &Path) -> Result<(), GitError> {
        let found = std::fs::metadata(path);
        let found = found.map_err(|source| GitError::Unreadable { path: path.to_owned(), source })?;
        self.check_metadata(path, &found)
    }

    /// Like [`Self::check`], if the metadata is already known.
    pub(super) fn check_metadata(&self, path: &Path, found: &Metadata) -> Result<(), GitError> {
        match *self {
            Self::Only { uid } if found.uid() != uid => {
                Err(GitError::ForeignOwner { path: path.to_owned(), found: found.uid(), expected: uid })
            }
            Self::Only { .. } | Self::Any => Ok(()),
        }
    }
}
