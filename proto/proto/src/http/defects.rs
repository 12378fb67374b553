//! Types for defects that users report of the results of tasks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{TaskId, TaskNumber};
use crate::review::Severity;

/// Maximum length of each text of a [`DefectReport`], in bytes.
pub const MAX_DEFECT_TEXT_BYTES: usize = 8 * 1024;
/// Maximum number of defects that can be reported for a task.
pub const MAX_REPORTED_DEFECTS: i64 = 200;

/// Body of `POST /tasks/{key}/defects`: a defect that was found in the result of a merged or accepted task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DefectReport {
    /// How severe it is.
    pub severity: Severity,
    /// Where it is, as `path:line`; empty if it is in no one place.
    #[serde(default)]
    pub location: String,
    /// What is wrong.
    pub description: String,
    /// How to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggested_fix: Option<String>,
}

/// A reported defect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReportedDefect {
    /// The defect.
    #[serde(flatten)]
    pub defect: DefectReport,
    /// Time of the report, in seconds since 1970.
    pub reported_at: f64,
}

/// Reply to `POST /tasks/{key}/defects`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DefectReply {
    /// Id of the task.
    #[serde(rename = "task", alias = "id")]
    pub id: TaskId,
    /// Number of the task.
    pub number: TaskNumber,
    /// False if the same defect was reported before.
    pub created: bool,
    /// Number of defects that were reported for the task.
    pub defects: u64,
}
