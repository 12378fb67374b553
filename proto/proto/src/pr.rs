//! The internal pull request: a task's way from its branch to the mirror's main.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PrState {
    PendingQc,
    QcApproved,
    QcRejected,
    PendingCoordinator,
    Approved,
    Merged,
    Closed,
}

impl PrState {
    pub const ALL: [Self; 7] = [
        Self::PendingQc,
        Self::QcApproved,
        Self::QcRejected,
        Self::PendingCoordinator,
        Self::Approved,
        Self::Merged,
        Self::Closed,
    ];

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
