//! Messages about the main branch of a repository, which the mirrors of all runners follow.

use serde::{Deserialize, Serialize};

use super::{RefusedReason, TaskFence, UnavailableReason};
use crate::blob::Payload;
use crate::loop_step::Artifact;

/// Request for the main branch of the repository that the task belongs to: the branch into which cfq merges results. All
/// mirrors of the repository follow it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MainGet {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Path of the repository, without symbolic links.
    pub repository: String,
    /// Base commit of the task.
    pub base: String,
    /// The recorded commit that the sender's mirror has as its main branch; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Reply to [`MainGet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MainReply {
    /// The main branch.
    Main {
        /// Its state.
        state: Payload<MainState>,
    },
    /// No merge into this repository's main branch is recorded.
    NoMerge,
    /// The runner's attempt is not the current one.
    Stale,
    /// The main branch can never be read.
    Refused {
        /// Why the main branch can never be read.
        reason: RefusedReason,
    },
    /// The main branch cannot be read now: the runner repeats the request.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}

/// State of a repository's main branch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MainState {
    /// Recorded commit of the branch.
    pub commit: String,
    /// Whether the branch contains the request's base, because a merged task had the same base.
    pub has_base: bool,
    /// Whether the commit in [`MainGet::after`] is a recorded commit of the branch, or absent.
    pub knows_after: bool,
    /// The first merges after that commit, or the first of all, oldest first. Empty if the commit is the branch's
    /// commit or is not known.
    pub merges: Vec<RecordedMerge>,
}

/// A merge of a task into a main branch, with everything needed to create its commits again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedMerge {
    /// Commit of the branch before the merge.
    pub old: String,
    /// Commit of the branch after the merge.
    pub new: String,
    /// Date of the merge commit, in seconds since 1970.
    pub commit_time: i64,
    /// Message of the merge commit.
    pub message: String,
    /// Base commit of the task.
    pub base: String,
    /// The artifacts whose commits were merged, oldest first, each the parent of the next; without diffs.
    pub artifacts: Vec<Artifact>,
}
