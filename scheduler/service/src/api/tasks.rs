//! Tasks as people see and steer them.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use cfq_proto::http::{ArtifactChain, CancelRequest, ResolveRequest, StateReply, TaskDetail, TaskList};
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::looping::{ActionKind, EscalationAction};
use cfq_proto::task::TaskState;
use serde::Deserialize;

use super::Api;
use super::error::ApiError;
use super::submit::read;
use super::validate::{body, servable};
use crate::store::{Cancelled, Resolution};

/// Who acts, in steps and questions. Tokens have no names yet.
const CLIENT: &str = "a client";

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<String>,
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<TaskList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::invalid("limit", e.body_text()))?;
    let state = query.state.as_deref().map(str::parse::<TaskState>).transpose();
    let state = state.map_err(|e| ApiError::invalid("state", e.to_string()))?;
    let limit = query.limit.unwrap_or(50).clamp(1, 1000);
    Ok(Json(TaskList { tasks: api.store.list_tasks(state, i64::from(limit)).await? }))
}

pub async fn show(State(api): State<Api>, Path(key): Path<String>) -> Result<Json<TaskDetail>, ApiError> {
    let task = find(&api, &key).await?;
    api.store.task_detail(task).await?.map(Json).ok_or_else(|| unknown(&key))
}

pub async fn cancel(
    State(api): State<Api>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find(&api, &key).await?;
    let bytes = read(bytes)?;
    let asked = if bytes.is_empty() { CancelRequest { reason: String::new() } } else { body::<CancelRequest>(&bytes)? };
    let by = if asked.reason.is_empty() { CLIENT.to_owned() } else { format!("{CLIENT}: {}", asked.reason) };
    match api.store.cancel(task, &by).await? {
        Cancelled::Done { number, hints } => {
            api.link.tell(hints).await;
            Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled }))
        }
        Cancelled::Already { number } => Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled })),
        Cancelled::TooLate { why, .. } => Err(ApiError::conflict(format!("it is too late to cancel: {why}"))),
        Cancelled::Unknown => Err(unknown(&key)),
    }
}

pub async fn resolve(
    State(api): State<Api>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find(&api, &key).await?;
    let asked: ResolveRequest = body(&read(bytes)?)?;
    if let EscalationAction::SwitchLlm { suggested_model: Some(model), .. } = &asked.action {
        servable("action.suggested_model", model)?;
    }
    match api.store.resolve(task, &asked.action, CLIENT).await? {
        Resolution::Done { number, state, hints } => {
            api.link.tell(hints).await;
            Ok(Json(StateReply { id: task, number, state }))
        }
        Resolution::NotWaiting { number, state } => Err(ApiError::conflict(format!(
            "{number} is {state}; only a task that is escalated or waits for a human has something to resolve"
        ))),
        Resolution::NotOffered { number, offered } => {
            let offered: Vec<&str> = offered.into_iter().map(ActionKind::as_str).collect();
            let message =
                format!("{} is not open to {number}; it offers: {}", asked.action.kind().as_str(), offered.join(", "));
            Err(ApiError::invalid("action", message))
        }
        Resolution::Refused { why, .. } => Err(ApiError::conflict(why)),
        Resolution::Unknown => Err(unknown(&key)),
    }
}

pub async fn artifacts(
    State(api): State<Api>,
    Path((key, which)): Path<(String, String)>,
) -> Result<Json<ArtifactChain>, ApiError> {
    let task = find(&api, &key).await?;
    let iteration = match which.as_str() {
        "best" => None,
        number => Some(number.parse::<u32>().map_err(|_| {
            ApiError::invalid("iteration", format!("{which:?} is neither the number of an iteration nor \"best\""))
        })?),
    };
    api.store.artifact_chain(task, iteration).await?.map(Json).ok_or_else(|| {
        ApiError::not_found(match iteration {
            Some(n) => format!("{key} has no iteration {n}"),
            None => format!("{key} has made nothing yet"),
        })
    })
}

pub async fn find(api: &Api, key: &str) -> Result<TaskId, ApiError> {
    let parsed: TaskKey = key.parse().map_err(|e: cfq_proto::ids::IdError| ApiError::invalid("task", e.to_string()))?;
    api.store.find_task(parsed).await?.ok_or_else(|| unknown(key))
}

fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!("there is no task {key}; cfq ls shows those that are"))
}
