//! Hand-off of a converged or accepted result: pull request, merge, delivery.

use cfq_proto::pr::PrState;

/// Recorded intent to merge, written before the repository's main branch moves to the merge commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeIntent {
    /// Commit of the main branch before the merge.
    pub old: String,
    /// Commit of the main branch after the merge.
    pub new: String,
    /// Author and committer date of the merge commit, in seconds since 1970.
    pub commit_time: i64,
    /// Path of the repository whose main branch moves; empty in intents of older runners.
    pub repository: String,
}

/// Progress of the hand-off, which begins when the loop has converged and ends with the task.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HandOff {
    /// Head commit of the pull request when it was opened.
    pub pr_head: Option<String>,
    /// State of the pull request; `None` before it is opened.
    pub pr_state: Option<PrState>,
    /// Last recorded merge intent.
    pub merge_intent: Option<MergeIntent>,
    /// Commit of the mirror's main branch after the merge; `None` before it.
    pub merged: Option<String>,
    /// Reason why the pull request was closed without a merge; `None` unless it was closed in this way.
    pub closed: Option<String>,
    /// Branch and commit in the user's repository that hold the result; `None` before the delivery.
    pub delivered: Option<(String, String)>,
    /// True once the hand-off has ended.
    pub done: bool,
}
