//! Iterations of the loop: each artifact with its checks, its review and the decision about it.

use cfq_proto::loop_step::{Artifact, Decided};
use cfq_proto::review::{CheckRun, Finding, Quarantine, ReviewFeedback};

/// One artifact with its checks, its review and the decision about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Iteration {
    /// The creator's result, or the change under review.
    pub artifact: Artifact,
    /// True once cfq's own checks of the artifact have run.
    pub checked: bool,
    /// Findings of the checks.
    pub findings: Vec<Finding>,
    /// Checks of the project that ran to their end.
    pub ran: Vec<CheckRun>,
    /// Reason why the artifact is quarantined, that is, excluded from review and from merging without a human; `None` if
    /// it is not.
    pub quarantine: Option<Quarantine>,
    /// The critic's review; `None` until it is recorded.
    pub review: Option<ReviewFeedback>,
    /// Number of recorded review passes; `review` merges them.
    pub review_passes: u32,
    /// Decision about this iteration; `None` until it is recorded.
    pub decided: Option<Decided>,
}

impl Iteration {
    /// Names of the tests of the project that fail and failed before the change too, so that they are no findings.
    pub fn known_failures(&self) -> Vec<String> {
        self.ran.iter().flat_map(|run| run.known_failures.entries()).collect()
    }

    /// Whether a human may accept the artifact: it has a commit, is checked, and is not quarantined, or only because
    /// checks of the project fail.
    pub fn is_deliverable(&self) -> bool {
        self.checked && self.quarantine.is_none_or(Quarantine::permits_acceptance) && self.artifact.commit.is_some()
    }

    /// The critic's score, clamped to 0..=100. NaN counts as 0. `None` without a review.
    pub fn score(&self) -> Option<f64> {
        self.review.as_ref().map(score_of)
    }
}

/// The score of a review, clamped to 0..=100. NaN counts as 0.
pub(crate) fn score_of(review: &ReviewFeedback) -> f64 {
    if review.quality_score.is_nan() { 0.0 } else { review.quality_score.clamp(0.0, 100.0) }
}

/// Best iteration of a task. Its artifact is kept and can be pulled, however the task ends (L6).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BestIteration {
    /// Number of the iteration, from 1.
    pub iteration: u32,
    /// Score out of 100. `None` if no deliverable artifact was reviewed.
    pub score: Option<f64>,
}
