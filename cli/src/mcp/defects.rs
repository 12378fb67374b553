//! `report_defect`.

use cfq_proto::http::DefectReport;
use cfq_proto::ids::TaskId;
use cfq_proto::review::Severity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::access::Access;
use super::arguments::SessionId;
use super::error::ToolError;
use super::repeat::until_answered;

/// Arguments of `report_defect`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportDefect {
    /// Session id of the merged or accepted task.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// How severe the defect is.
    pub severity: Severity,
    /// What is wrong.
    pub description: String,
    /// Where it is, as path:line.
    #[serde(default)]
    pub location: Option<String>,
    /// How to fix it.
    #[serde(default)]
    pub suggested_fix: Option<String>,
}

/// Reply to `report_defect`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ReportDefectReply {
    /// Handle of the task.
    pub session_id: TaskId,
    /// Number of the task, for people, as in t42.
    pub task: String,
    /// False if the same defect was reported before.
    pub created: bool,
    /// Number of defects that were reported for the task.
    pub defects: u64,
    /// What to do next.
    pub next_step: String,
}

/// `report_defect`.
pub async fn report(access: &Access, arguments: ReportDefect) -> Result<ReportDefectReply, ToolError> {
    let ReportDefect { session_id, severity, description, location, suggested_fix } = arguments;
    let report = DefectReport { severity, location: location.unwrap_or_default(), description, suggested_fix };
    let client = access.client()?;
    let reply = until_answered(|| client.report_defect(session_id.0, &report)).await?;
    Ok(ReportDefectReply {
        session_id: reply.id,
        task: reply.number.to_string(),
        created: reply.created,
        defects: reply.defects,
        next_step:
            "the report is only recorded: to have the defect fixed, call execute_task_spec with the delivered branch \
                    as base"
                .to_owned(),
    })
}
