//! Messages between the runner and a process that opens a repository, each one line of JSON.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::workstream::deliver::{DeliveredBranch, DeliveryRequest};
use crate::workstream::delivery_record::EarlierDelivery;
use crate::workstream::error::{FailureKind, GitError};
use crate::workstream::folder_files::{FolderFiles, FolderRequest};
use crate::workstream::map_of_commit::{RepoMapReply, RepoMapRequest};
use crate::workstream::review_range::{ReviewRange, ReviewRangeRequest};
use crate::workstream::start_point::{StartPoint, StartPointRequest};
use crate::workstream::uncommitted::UncommittedRequest;

/// Line with which the runner lets the process continue after [`Message::Record`] or [`Message::Locked`].
pub(super) const CONTINUE: &str = "continue\n";

/// First line that the process receives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Order {
    /// Time limit of the process; `None` if it has none.
    pub within_ms: Option<u64>,
    pub request: Request,
}

/// Task of the process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Request {
    /// Return the commit of HEAD.
    Head { repository: PathBuf },
    /// Copy a commit into the mirror, whose lock the runner holds.
    Copy { repository: PathBuf, data_dir: PathBuf, commit: String },
    /// Create a branch.
    Deliver { request: DeliveryRequest, is_recorded: bool, earlier: Option<EarlierDelivery> },
    /// Find the repository and the base commit of a new task.
    StartPoint(StartPointRequest),
    /// Find the commits to review.
    ReviewRange(ReviewRangeRequest),
    /// Make a map of a commit.
    RepoMap(RepoMapRequest),
    /// Read the files in a folder of a commit.
    Folder(FolderRequest),
    /// Count the changes that are not committed.
    Uncommitted(UncommittedRequest),
}

impl Request {
    /// The repository, or a folder in it.
    pub fn path(&self) -> &Path {
        match self {
            Self::Head { repository } | Self::Copy { repository, .. } => repository,
            Self::Deliver { request, .. } => &request.repository,
            Self::StartPoint(request) => &request.dir,
            Self::ReviewRange(request) => &request.start.dir,
            Self::RepoMap(request) => &request.start.dir,
            Self::Folder(request) => &request.start.dir,
            Self::Uncommitted(request) => &request.dir,
        }
    }

    /// The error of a process that was killed at its time limit; `None` for the error of the stop condition.
    pub fn time_limit(&self, seconds: u64) -> Option<GitError> {
        match self {
            Self::Head { .. } | Self::Copy { .. } => None,
            Self::Deliver { .. }
            | Self::StartPoint(_)
            | Self::ReviewRange(_)
            | Self::RepoMap(_)
            | Self::Folder(_)
            | Self::Uncommitted(_) => Some(GitError::AccessTimeLimit { path: self.path().to_owned(), seconds }),
        }
    }
}

/// Message of the process. [`Message::Record`] and [`Message::Locked`] ask the runner to act and to let the process
/// continue; those after them are replies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Message {
    /// The process has set its limits; the runner does not reply.
    Started {
        has_landlock: bool,
        has_seccomp: bool,
    },
    /// A delivery to record, see [`crate::workstream::delivery_record`].
    Record {
        git_dir: String,
        branch: String,
        commit: String,
        created: bool,
    },
    /// The branch to create is locked.
    Locked,
    Done {
        commit: String,
    },
    Delivered {
        branch: String,
        commit: String,
    },
    StartPoint(StartPoint),
    ReviewRange(ReviewRange),
    RepoMap(RepoMapReply),
    Folder(FolderFiles),
    Uncommitted {
        files: u64,
    },
    Failed {
        reason: String,
        kind: FailureKind,
        is_invalid_request: bool,
        is_transient: bool,
    },
}

impl Message {
    /// True if the process waits for the runner.
    pub fn is_step(&self) -> bool {
        matches!(self, Self::Record { .. } | Self::Locked)
    }

    /// The error for a message that does not belong to the request.
    pub fn unexpected(&self, path: &Path) -> GitError {
        GitError::AccessEnded { path: path.to_owned(), ended: format!("the unexpected reply {self:?}") }
    }
}

impl From<DeliveredBranch> for Message {
    fn from(DeliveredBranch { branch, commit }: DeliveredBranch) -> Self {
        Self::Delivered { branch, commit }
    }
}

impl From<GitError> for Message {
    fn from(error: GitError) -> Self {
        Self::Failed {
            reason: error.with_causes(),
            kind: FailureKind::of(&error),
            is_invalid_request: error.is_invalid_request(),
            is_transient: error.is_transient(),
        }
    }
}
