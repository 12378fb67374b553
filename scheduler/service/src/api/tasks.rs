//! `/tasks`: listing, showing, cancelling and resolving tasks, and their artifacts.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use cfq_proto::http::{ArtifactChain, CancelRequest, ResolveRequest, StateReply, TaskDetail, TaskList};
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::loop_step::{ActionKind, EscalationAction};
use cfq_proto::task::TaskState;
use serde::Deserialize;

use super::Api;
use super::error::ApiError;
use super::servable;
use super::submit::read_body;
use super::validate::{check_supported_model, parse_body};
use crate::store::{Cancelled, Resolution, TooLateReason};

/// Author that is recorded when an API request cancels a task or answers its question. Bearer tokens have no names yet,
/// so all clients share this author.
pub const API_ACTOR: &str = "a client";

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<String>,
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<TaskList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::invalid("limit", format!("limit: {}", e.body_text())))?;
    let state = query.state.as_deref().map(str::parse::<TaskState>).transpose();
    let state = state.map_err(|e| ApiError::invalid("state", format!("state: {e}")))?;
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
    let bytes = read_body(&api, bytes)?;
    let request =
        if bytes.is_empty() { CancelRequest { reason: String::new() } } else { parse_body::<CancelRequest>(&bytes)? };
    match api.store.cancel(task, &author(&request.reason)).await? {
        Cancelled::Done { number, hints } => {
            api.link.send_hints(hints).await;
            Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled, note: String::new() }))
        }
        Cancelled::Already { number } => {
            Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled, note: String::new() }))
        }
        Cancelled::TooLate { number, reason } => Err(ApiError::conflict(match reason {
            TooLateReason::Ended(state) => format!("too late to cancel the task: {number} is already {state}"),
            TooLateReason::Rejected(rejection) => format!("too late to cancel the task: {rejection}"),
        })),
        Cancelled::Unknown => Err(unknown(&key)),
    }
}

pub async fn resolve(
    State(api): State<Api>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find(&api, &key).await?;
    let request: ResolveRequest = parse_body(&read_body(&api, bytes)?)?;
    if let EscalationAction::SwitchLlm { suggested_model: Some(model), .. } = &request.action {
        check_supported_model("action.suggested_model", model)?;
        if let Some(nodes) = servable::registered_nodes(&api.store).await? {
            servable::check_model("action.suggested_model", model, &nodes, &api.defaults.agents)?;
        }
    }
    match api.store.resolve(task, &request.action, API_ACTOR).await? {
        Resolution::Done { number, state, hints } => {
            api.link.send_hints(hints).await;
            Ok(Json(StateReply { id: task, number, state, note: String::new() }))
        }
        Resolution::NotWaiting { number, state: TaskState::Paused } => {
            Err(ApiError::conflict(format!("{number} is paused: resume it with `cfq resume {number}` first")))
        }
        Resolution::NotWaiting { number, state } => Err(ApiError::conflict(format!(
            "{number} is {state}: only a task that is escalated or waits for a human can be resolved"
        ))),
        Resolution::NotOffered { number, offered } => {
            let offered: Vec<&str> = offered.into_iter().map(ActionKind::as_str).collect();
            let action = request.action.kind().as_str();
            let offered = offered.join(", ");
            let message = format!("action: {action} is not offered for {number}; choose one of: {offered}");
            Err(ApiError::invalid("action", message))
        }
        Resolution::NothingAcceptable { .. } => Err(ApiError::conflict("every result is quarantined")),
        Resolution::Refused { rejection, .. } => Err(ApiError::conflict(rejection.to_string())),
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
            ApiError::invalid("iteration", format!("iteration: {which:?} is neither an iteration number nor \"best\""))
        })?),
    };
    api.store.artifact_chain(task, iteration).await?.map(Json).ok_or_else(|| {
        ApiError::not_found(match iteration {
            Some(n) => format!("{key} has no iteration {n}: `cfq show {key}` lists its iterations"),
            None => format!("{key} has no artifacts yet: `cfq watch {key}` shows its progress"),
        })
    })
}

/// The id of the task that `key` (a number or an id) names.
pub async fn find(api: &Api, key: &str) -> Result<TaskId, ApiError> {
    let parsed: TaskKey =
        key.parse().map_err(|e: cfq_proto::ids::IdError| ApiError::invalid("task", format!("task: {e}")))?;
    api.store.find_task(parsed).await?.ok_or_else(|| unknown(key))
}

/// The author of a change, with the reason that the request gives; shown to users.
pub fn author(reason: &str) -> String {
    if reason.is_empty() { API_ACTOR.to_owned() } else { format!("{API_ACTOR}: {reason}") }
}

pub fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!("there is no task {key}: `cfq ls` lists all tasks"))
}
