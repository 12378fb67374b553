//! What can go wrong with a repository, in words that name it and the next step.

use std::io::ErrorKind;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum GitError {
    #[error("{path} does not exist, or this machine's runner cannot see it")]
    Missing { path: PathBuf },
    #[error("{path} cannot be read by the runner: give its user read access to the folder and everything in .git")]
    Unreadable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not a git repository: run `git init` there and commit something first")]
    NotARepository { path: PathBuf },
    #[error(
        "{path} belongs to another user: run cfq as its owner, or `git config --global --add safe.directory {path}`"
    )]
    Owner { path: PathBuf },
    #[error("{path} has no commits yet: commit something first, for example `git commit --allow-empty -m start`")]
    Empty { path: PathBuf },
    #[error("{path} is a shallow clone, its history is not all there: run `git fetch --unshallow` in it")]
    Shallow { path: PathBuf },
    #[error("{path} has no commit {commit}: submit again from a commit that is there")]
    NoCommit { path: PathBuf, commit: String },
    #[error("{text:?} is not a commit id")]
    BadId { text: String },
    #[error("a commit made again came out as {made}, the record says {recorded}")]
    NotReproduced { made: String, recorded: String },
    #[error("{branch} already exists in {path} with other content, as do its numbered variants: delete or rename some")]
    NamesTaken { path: PathBuf, branch: String },
    #[error(
        "{path} has a branch named {other}, so there can be no {branch}: `git branch -m {other} NAME` moves it away"
    )]
    InTheWay { path: PathBuf, branch: String, other: String },
    #[error("cannot {doing}")]
    Git {
        doing: String,
        #[source]
        source: git2::Error,
    },
    #[error("cannot {doing}")]
    Io {
        doing: String,
        #[source]
        source: std::io::Error,
    },
}

impl GitError {
    /// The task names what is not there: only another submit can mend it.
    pub fn is_in_the_request(&self) -> bool {
        match self {
            Self::Missing { .. } | Self::NotARepository { .. } | Self::NoCommit { .. } | Self::BadId { .. } => true,
            Self::Unreadable { .. }
            | Self::Owner { .. }
            | Self::Empty { .. }
            | Self::Shallow { .. }
            | Self::NotReproduced { .. }
            | Self::NamesTaken { .. }
            | Self::InTheWay { .. }
            | Self::Git { .. }
            | Self::Io { .. } => false,
        }
    }

    /// True where the same call may work later without anybody changing what was asked (a full disk, a busy lock).
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Git { source, .. } => !is_denied(source),
            Self::Io { source, .. } => {
                !matches!(source.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
            }
            Self::Missing { .. }
            | Self::Unreadable { .. }
            | Self::NotARepository { .. }
            | Self::Owner { .. }
            | Self::Empty { .. }
            | Self::Shallow { .. }
            | Self::NoCommit { .. }
            | Self::BadId { .. }
            | Self::NotReproduced { .. }
            | Self::NamesTaken { .. }
            | Self::InTheWay { .. } => false,
        }
    }

    /// The error with its causes, for a recorded reason.
    pub fn in_words(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}

/// What no waiting changes. libgit2 has no code for it, only the system's words.
fn is_denied(error: &git2::Error) -> bool {
    let words = error.message();
    error.class() == git2::ErrorClass::Os
        && (words.contains("Permission denied") || words.contains("Read-only file system"))
}

/// Names what was being done when git failed.
pub(crate) fn git<T>(doing: impl Into<String>, result: Result<T, git2::Error>) -> Result<T, GitError> {
    result.map_err(|source| GitError::Git { doing: doing.into(), source })
}

pub(crate) fn io<T>(doing: impl Into<String>, result: std::io::Result<T>) -> Result<T, GitError> {
    result.map_err(|source| GitError::Io { doing: doing.into(), source })
}

pub(crate) fn oid(text: &str) -> Result<git2::Oid, GitError> {
    git2::Oid::from_str(text).map_err(|_| GitError::BadId { text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_helps_a_full_disk_and_not_a_repository_that_may_not_be_written() {
        let passes = |words: &str| {
            let source = git2::Error::new(git2::ErrorCode::GenericError, git2::ErrorClass::Os, words);
            GitError::Git { doing: "make the branch".into(), source }.may_pass()
        };
        assert!(passes("failed to write chunk: No space left on device"));
        assert!(!passes("failed to create locked file: Permission denied"));
        assert!(!passes("failed to make directory: Read-only file system"));
        let io = |kind: ErrorKind| GitError::Io { doing: "lock".into(), source: kind.into() }.may_pass();
        assert!(io(ErrorKind::StorageFull) && !io(ErrorKind::ReadOnlyFilesystem));
    }
}
