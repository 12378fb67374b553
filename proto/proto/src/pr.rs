//! Internal pull request: merges a task's branch into the main branch of the mirror, which is cfq's own copy of the
//! user's repository.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;

/// State of a pull request. The allowed transitions are in `cfq-scheduler-core`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PrState {
    /// Opened; waits for quality control, that is, for the result of the loop's review.
    PendingQc,
    /// Quality control passed.
    QcApproved,
    /// Quality control failed.
    QcRejected,
    /// Waits for approval by the coordinator, the runner that executes the hand-off.
    PendingCoordinator,
    /// The coordinator approved the pull request, which may now be merged.
    Approved,
    /// Merged into the main branch.
    Merged,
    /// Closed without a merge.
    Closed,
}

impl PrState {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::PendingQc,
        Self::QcApproved,
        Self::QcRejected,
        Self::PendingCoordinator,
        Self::Approved,
        Self::Merged,
        Self::Closed,
    ];

    /// Returns the state's name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PendingQc => "pending_qc",
            Self::QcApproved => "qc_approved",
            Self::QcRejected => "qc_rejected",
            Self::PendingCoordinator => "pending_coordinator",
            Self::Approved => "approved",
            Self::Merged => "merged",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for PrState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PrState {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|s| s.as_str() == text).ok_or(IdError {
            kind: "pull request state",
            text: text.to_owned(),
            expected: "pending_qc, qc_approved, qc_rejected, pending_coordinator, approved, merged or closed",
        })
    }
}
