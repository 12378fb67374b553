//! `POST /tasks/{key}/defects`: defects that users found in the results of tasks.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use cfq_proto::http::{DefectReply, DefectReport, MAX_DEFECT_TEXT_BYTES, MAX_REPORTED_DEFECTS};

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::submit::read_body;
use super::tasks::{find_own, unknown};
use super::validate::parse_body;
use crate::store::DefectOutcome;

pub async fn report(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<DefectReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    let report: DefectReport = parse_body(&read_body(&api, bytes)?)?;
    check(&report)?;
    match api.store.report_defect(task, &report).await? {
        DefectOutcome::Done { number, is_new, defects } => {
            Ok(Json(DefectReply { id: task, number, created: is_new, defects: u64::try_from(defects).unwrap_or(0) }))
        }
        DefectOutcome::Refused { number, state } => Err(ApiError::conflict(format!(
            "{number} is {state}: defects can be reported only for merged or accepted tasks"
        ))),
        DefectOutcome::TooMany { number } => Err(ApiError::conflict(format!(
            "{number} already has {MAX_REPORTED_DEFECTS} reported defects, the maximum"
        ))),
        DefectOutcome::Unknown => Err(unknown(&key)),
    }
}

fn check(report: &DefectReport) -> Result<(), ApiError> {
    if report.description.trim().is_empty() {
        return Err(ApiError::invalid("description", "description: is empty; say what is wrong"));
    }
    let fix = report.suggested_fix.as_deref().unwrap_or_default();
    for (field, text) in
        [("location", &*report.location), ("description", &*report.description), ("suggested_fix", fix)]
    {
        if text.len() > MAX_DEFECT_TEXT_BYTES {
            let message = format!("{field}: at most {MAX_DEFECT_TEXT_BYTES} bytes, not {}", text.len());
            return Err(ApiError::invalid(field, message));
        }
    }
    Ok(())
}
