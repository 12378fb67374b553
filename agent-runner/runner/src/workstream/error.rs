//! Errors of repository operations. Each message names the repository and the next step.

use std::io::ErrorKind;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Failure of a repository operation.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// The path does not exist.
    #[error("{path} does not exist, or the runner on this machine has no access to it")]
    PathNotFound { path: PathBuf },
    /// The process lacks read permission.
    #[error("{path} cannot be read by the runner: give its user read access to the folder and everything in .git")]
    Unreadable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The path is neither a working tree's top folder, nor a `.git` folder, nor a bare repository.
    #[error("{path} is not a git repository: run `git init` there and commit something first")]
    NotARepository { path: PathBuf },
    /// Git refuses repositories of other users (`safe.directory`).
    #[error(
        "{path} belongs to another user: run cfq as its owner, or `git config --global --add safe.directory {path}`"
    )]
    WrongOwner { path: PathBuf },
    /// The repository has no commit to start from.
    #[error("{path} has no commits yet: commit something first, for example `git commit --allow-empty -m start`")]
    NoCommits { path: PathBuf },
    /// The history is incomplete.
    #[error("{path} is a shallow clone with incomplete history: run `git fetch --unshallow` in it")]
    ShallowClone { path: PathBuf },
    /// The path contains a symbolic link or `..`. The scheduler knows a repository by its path, so it must have only one.
    #[error("{path} contains a symbolic link or `..`: submit the task with the path {target}")]
    PathIsALink { path: PathBuf, target: PathBuf },
    /// The repository does not contain the commit.
    #[error("{path} has no commit {commit}: submit again from a commit that exists there")]
    CommitNotFound { path: PathBuf, commit: String },
    /// The text is not a hexadecimal object id.
    #[error("{text:?} is not a commit id")]
    InvalidCommitId { text: String },
    /// A rebuilt commit has another id than the recorded one.
    #[error("the rebuilt commit has id {rebuilt}, but the recorded id is {recorded}")]
    NotReproduced { rebuilt: String, recorded: String },
    /// A file of an artifact has a character that its encoding lacks.
    #[error("{path} cannot be stored: its encoding has no character `{character}`")]
    NotEncodable { path: String, character: char },
    /// All names that were tried for the delivery branch are taken.
    #[error(
        "branch {branch} and its numbered variants already exist in {path} at other commits: delete or rename some"
    )]
    BranchNamesTaken { path: PathBuf, branch: String },
    /// A branch name is a path prefix of the new branch's name.
    #[error(
        "{path} has a branch {existing}, so git cannot create {branch}: rename it with `git branch -m {existing} NAME`"
    )]
    BranchConflict { path: PathBuf, branch: String, existing: String },
    /// The branch's lock file exists.
    #[error(
        "the branch {branch} is locked, because {lock} exists: if no git command is running in that repository, delete \
         this file"
    )]
    BranchLocked { lock: PathBuf, branch: String },
    /// Another task holds the lock of the mirror.
    #[error(
        "{lock} has been locked for more than {seconds} s: another task is copying the same repository; if this stays, \
         restart cfq"
    )]
    MirrorLocked { lock: PathBuf, seconds: u64 },
    /// The process that opens the repository reported this error.
    #[error("{reason}")]
    AccessFailed { reason: String, kind: FailureKind, is_invalid_request: bool, is_transient: bool },
    /// The process that opens the repository ended without a reply.
    #[error(
        "the process that opens {path} ended with {ended}: the repository needs too much memory or is damaged; check it \
         with `git fsck`"
    )]
    AccessEnded { path: PathBuf, ended: String },
    /// The process that opens the repository was stopped at its time limit.
    #[error(
        "the process that opens {path} was stopped after {seconds} s: check with `git fsck` that its files can be read, \
         and that no other program blocks them, then try again"
    )]
    AccessTimeLimit { path: PathBuf, seconds: u64 },
    /// A path in the `.git` folder could redirect a read or write to a place outside, or block its reader.
    #[error("{path} {reason}, so cfq does not use it: {}", .reason.next_step())]
    UnsafeGitPath { path: PathBuf, reason: UnsafeGitPathReason },
    /// A pointer leads to a git folder that does not name this working tree as its own.
    #[error(
        "{path} leads to {target}, which does not name this working tree and may be another repository: if it is the \
         right one, run `git worktree repair` there, or set its core.worktree to this working tree with `git config`"
    )]
    ForeignGitFolder { path: PathBuf, target: PathBuf },
    /// cfq runs as root, and a folder of the repository belongs to another user than the repository.
    #[error(
        "{path} belongs to the user with id {found}, but the repository to the user with id {expected}, so a cfq that \
         runs as root does not read it: give the folder to the repository's owner with `chown`, or run cfq as that user"
    )]
    ForeignOwner { path: PathBuf, found: u32, expected: u32 },
    /// The configuration names another folder as the working tree.
    #[error(
        "{config} sets core.worktree to {worktree}, so it is not clear which files belong to it: remove the setting, or \
         name the other folder with --repo"
    )]
    WorktreeElsewhere { config: PathBuf, worktree: PathBuf },
    /// The name of the base is not that of a commit.
    #[error(
        "{name:?} names no commit in {path}: {reason}; `git branch -a` and `git tag` list the names of branches and tags"
    )]
    BaseNotFound { name: String, path: PathBuf, reason: String },
    /// The base commit lacks a file that the task names.
    #[error(
        "the context file {file} is not in {path} at commit {commit}: name it relative to the repository's root, and \
         commit it first"
    )]
    ContextFileNotFound { file: String, path: PathBuf, commit: String },
    /// A pattern matches more files than a task may show.
    #[error("{pattern} means {files} context files, more than the maximum of {most}: name fewer files")]
    TooManyContextFiles { pattern: String, files: usize, most: usize },
    /// The commits that a user named cannot be reviewed.
    #[error("{range:?} in {path} cannot be reviewed: {reason}")]
    NotReviewable { range: String, path: PathBuf, reason: &'static str },
    /// The change to review is empty.
    #[error("there is no change from {base} to {head}: name two commits whose files differ")]
    NoChange { base: String, head: String },
    /// The change to review exceeds a limit.
    #[error("the change has {excess}: review a smaller range of commits")]
    ChangeTooLarge { excess: String },
    /// The repository exceeds a limit.
    #[error("{path} has {limit}, which cfq does not accept: submit a smaller repository")]
    TooLarge { path: PathBuf, limit: SizeLimit },
    /// The operation took too long.
    #[error("it takes more than {seconds} s to {operation}: submit a smaller repository, or one on a faster disk")]
    TimeLimit { operation: String, seconds: u64 },
    /// The task no longer needs the operation.
    #[error("cancelled: {operation}")]
    Cancelled { operation: String },
    /// libgit2 failed.
    #[error("cannot {operation}")]
    Git {
        operation: String,
        #[source]
        source: git2::Error,
    },
    /// A file operation failed.
    #[error("cannot {operation}")]
    Io {
        operation: String,
        #[source]
        source: std::io::Error,
    },
}

/// Reason why cfq does not use a path in a `.git` folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsafeGitPathReason {
    #[error("is a symbolic link")]
    SymbolicLink,
    #[error("is hard-linked to another file")]
    HardLink,
    #[error("is neither a file nor a folder")]
    SpecialFile,
    #[error("is larger than {} KiB", .0 >> 10)]
    LargeFile(u64),
    #[error("includes another file in a form that git does not write")]
    UnclearInclude,
    #[error("includes more than {0} files")]
    TooManyIncludes(usize),
    #[error("names more than {0} alternates")]
    TooManyAlternates(usize),
    #[error("names a path that is no folder `objects`, or that has a NUL or bytes that are not UTF-8")]
    InvalidAlternate,
}

impl UnsafeGitPathReason {
    /// What the user can do about it.
    fn next_step(&self) -> &'static str {
        match self {
            Self::SymbolicLink | Self::HardLink | Self::SpecialFile | Self::LargeFile(_) => {
                "replace it with a plain file or folder"
            }
            Self::UnclearInclude | Self::TooManyIncludes(_) => {
                "remove its includes, or add them again with `git config --add include.path PATH`"
            }
            Self::TooManyAlternates(_) | Self::InvalidAlternate => {
                "copy the shared objects with `git repack -a -d`, then remove the file"
            }
        }
    }
}

/// Limit that a repository exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SizeLimit {
    #[error("more than {0} files and folders")]
    Entries(u64),
    #[error("files of more than {} MiB in total", .0 >> 20)]
    Bytes(u64),
    #[error("folders nested more than {0} levels deep")]
    Depth(usize),
    #[error("more than {0} objects in its history")]
    Objects(usize),
    #[error("an object {0}")]
    Object(ObjectLimit),
    #[error("more than {0} files in its git folder, which `git gc` may reduce")]
    GitFiles(u64),
}

/// Object that is larger than the limit of its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("({kind} {id}) of more than {} MiB", .max_bytes >> 20)]
pub struct ObjectLimit {
    pub kind: git2::ObjectType,
    pub id: git2::Oid,
    pub max_bytes: u64,
}

/// Kind of an error that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    NotARepository,
    CommitNotFound,
    BranchLocked,
    #[default]
    Other,
}

impl FailureKind {
    pub(super) fn of(error: &GitError) -> Self {
        match error {
            GitError::NotARepository { .. } => Self::NotARepository,
            GitError::CommitNotFound { .. } | GitError::InvalidCommitId { .. } => Self::CommitNotFound,
            GitError::BranchLocked { .. } => Self::BranchLocked,
            GitError::AccessFailed { kind, .. } => *kind,
            _ => Self::Other,
        }
    }
}

impl GitError {
    /// True if the task itself is wrong (it names a path or a commit that does not exist), so that only a new submit
    /// can fix it.
    pub fn is_invalid_request(&self) -> bool {
        match self {
            Self::PathNotFound { .. }
            | Self::NotARepository { .. }
            | Self::PathIsALink { .. }
            | Self::CommitNotFound { .. }
            | Self::InvalidCommitId { .. }
            | Self::UnsafeGitPath { .. }
            | Self::ForeignGitFolder { .. }
            | Self::ForeignOwner { .. }
            | Self::NotReviewable { .. }
            | Self::NoChange { .. }
            | Self::ChangeTooLarge { .. }
            | Self::TooLarge { .. }
            | Self::TimeLimit { .. }
            | Self::AccessFailed { is_invalid_request: true, .. }
            | Self::WorktreeElsewhere { .. }
            | Self::BaseNotFound { .. }
            | Self::TooManyContextFiles { .. }
            | Self::ContextFileNotFound { .. } => true,
            Self::Unreadable { .. }
            | Self::WrongOwner { .. }
            | Self::NoCommits { .. }
            | Self::ShallowClone { .. }
            | Self::NotReproduced { .. }
            | Self::NotEncodable { .. }
            | Self::BranchNamesTaken { .. }
            | Self::BranchConflict { .. }
            | Self::BranchLocked { .. }
            | Self::MirrorLocked { .. }
            | Self::AccessFailed { is_invalid_request: false, .. }
            | Self::AccessEnded { .. }
            | Self::AccessTimeLimit { .. }
            | Self::Cancelled { .. }
            | Self::Git { .. }
            | Self::Io { .. } => false,
        }
    }

    /// True if the same call may succeed later without a change by the user (full disk, busy lock).
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Git { source, .. } => !os_error_kind(source).is_some_and(is_permission_error),
            Self::Io { source, .. } => !is_permission_error(source.kind()),
            Self::BranchLocked { .. } | Self::MirrorLocked { .. } | Self::AccessEnded { .. } => true,
            Self::AccessFailed { is_transient, .. } => *is_transient,
            Self::PathNotFound { .. }
            | Self::Unreadable { .. }
            | Self::NotARepository { .. }
            | Self::WrongOwner { .. }
            | Self::NoCommits { .. }
            | Self::ShallowClone { .. }
            | Self::PathIsALink { .. }
            | Self::CommitNotFound { .. }
            | Self::InvalidCommitId { .. }
            | Self::NotReproduced { .. }
            | Self::NotEncodable { .. }
            | Self::BranchNamesTaken { .. }
            | Self::BranchConflict { .. }
            | Self::UnsafeGitPath { .. }
            | Self::ForeignGitFolder { .. }
            | Self::ForeignOwner { .. }
            | Self::NotReviewable { .. }
            | Self::NoChange { .. }
            | Self::ChangeTooLarge { .. }
            | Self::TooLarge { .. }
            | Self::TimeLimit { .. }
            | Self::AccessTimeLimit { .. }
            | Self::WorktreeElsewhere { .. }
            | Self::BaseNotFound { .. }
            | Self::ContextFileNotFound { .. }
            | Self::TooManyContextFiles { .. }
            | Self::Cancelled { .. } => false,
        }
    }

    /// Returns the message followed by its causes, separated by colons. Recorded reasons use this form.
    pub fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}

/// True for a missing write permission, which a retry does not fix.
fn is_permission_error(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

/// Kind of the operating system's error that caused an error of libgit2; `None` for kinds other than those of
/// [`is_permission_error`]. libgit2 discards the error number and only appends the text of `strerror` to its message.
/// That text is in English, because this process sets no locale.
fn os_error_kind(error: &git2::Error) -> Option<ErrorKind> {
    if error.class() != git2::ErrorClass::Os {
        return None;
    }
    match error.message().rsplit_once(": ")?.1 {
        "Permission denied" => Some(ErrorKind::PermissionDenied),
        "Read-only file system" => Some(ErrorKind::ReadOnlyFilesystem),
        _ => None,
    }
}

/// Adds the name of the failed operation, as in "cannot {operation}", to an error of libgit2.
pub(crate) fn git_context<T>(operation: impl Into<String>, result: Result<T, git2::Error>) -> Result<T, GitError> {
    result.map_err(|source| GitError::Git { operation: operation.into(), source })
}

/// Adds the name of the failed operation, as in "cannot {operation}", to an I/O error.
pub(crate) fn io_context<T>(operation: impl Into<String>, result: std::io::Result<T>) -> Result<T, GitError> {
    result.map_err(|source| GitError::Io { operation: operation.into(), source })
}

/// Parses a hexadecimal object id.
pub(crate) fn parse_oid(text: &str) -> Result<git2::Oid, GitError> {
    git2::Oid::from_str(text).map_err(|_| GitError::InvalidCommitId { text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_is_transient_and_missing_permission_is_not() {
        let is_transient = |message: &str| {
            let source = git2::Error::new(git2::ErrorCode::GenericError, git2::ErrorClass::Os, message);
            GitError::Git { operation: "create the branch".into(), source }.is_transient()
        };
        assert!(is_transient("failed to write chunk: No space left on device"));
        assert!(!is_transient("failed to create locked file: Permission denied"));
        assert!(!is_transient("failed to make directory: Read-only file system"));
        let io = |kind: ErrorKind| GitError::Io { operation: "lock".into(), source: kind.into() }.is_transient();
        assert!(io(ErrorKind::StorageFull) && !io(ErrorKind::ReadOnlyFilesystem));
    }
}
