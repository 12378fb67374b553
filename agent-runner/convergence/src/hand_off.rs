//! Hand-off of a converged or accepted result: pull request, merge, delivery.

use cfq_proto::pr::PrState;

/// Recorded intent to move the mirror's main, written before it moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeIntent {
    /// Commit of main before the merge.
    pub old: String,
    /// Commit of main after the merge.
    pub new: String,
    /// Author and committer date of the merge commit, in seconds since 1970.
    pub commit_time: i64,
}

/// Progress of the hand-off, from converged to the end of the task.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HandOff {
    /// Head commit of the pull request when it was opened.
    pub pr_head: Option<String>,
    /// State of the pull request; `None` before it is opened.
    pub pr_state: Option<PrState>,
    /// Last recorded merge intent.
    pub merge_intent: Option<MergeIntent>,
    /// Commit of the mirror's main after the merge.
    pub merged: Option<String>,
    /// Reason why the pull request was closed unmerged.
    pub closed: Option<String>,
    /// Branch and commit in the user's repository.
    pub delivered: Option<(String, String)>,
    /// The hand-off has ended.
    pub done: bool,
}
