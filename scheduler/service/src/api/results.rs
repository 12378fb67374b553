//! `POST /tasks/{key}/acknowledge` and `POST /tasks/{key}/defects`: what users say about tasks that have ended.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, State};
use cfq_proto::http::{DefectReply, DefectReport, MAX_DEFECT_TEXT_BYTES, StateReply};
use cfq_proto::task::TaskState;

use super::Api;
use super::error::ApiError;
use super::submit::read_body;
use super::tasks::{find, unknown};
use super::validate::parse_body;
use crate::store::{Acknowledged, Reported};

pub async fn acknowledge(State(api): State<Api>, Path(key): Path<String>) -> Result<Json<StateReply>, ApiError> {
    let task = find(&api, &key).await?;
    match api.store.acknowledge(task).await? {
        Acknowledged::Done { number, is_new } => {
            let note = if is_new { "" } else { "its failure was acknowledged before" };
            Ok(Json(StateReply { id: task, number, state: TaskState::Failed, note: note.to_owned() }))
        }
        Acknowledged::Refused { number, state } => {
            Err(ApiError::conflict(format!("{number} is {state}: only the failure of a task can be acknowledged")))
        }
        Acknowledged::Unknown => Err(unknown(&key)),
    }
}

pub async fn report_defect(
    State(api): State<Api>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<DefectReply>, ApiError> {
    let task = find(&api, &key).await?;
    let report: DefectReport = parse_body(&read_body(&api, bytes)?)?;
    check(&report)?;
    match api.store.report_defect(task, &report).await? {
        Reported::Done { number, is_new, defects } => {
            Ok(Json(DefectReply { id: task, number, created: is_new, defects: u64::try_from(defects).unwrap_or(0) }))
        }
        Reported::Refused { number, state } => Err(ApiError::conflict(format!(
            "{number} is {state}: defects are reported of results that were handed off, of tasks that are merged or accepted"
        ))),
        Reported::TooMany { number } => {
            Err(ApiError::conflict(format!("{number} has as many reported defects as a task can have")))
        }
        Reported::Unknown => Err(unknown(&key)),
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
