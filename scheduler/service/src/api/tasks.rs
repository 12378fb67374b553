//! `/tasks`: listing, showing, cancelling and resolving tasks, and their artifacts.

use std::str::FromStr;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use cfq_proto::http::{
    ArtifactChain, CancelRequest, ListPosition, ResolveRequest, StateReply, TaskDetail, TaskList, TaskSort,
};
use cfq_proto::ids::{ArtifactId, IdError, TaskId, TaskKey, TaskNumber};
use cfq_proto::loop_step::{ActionKind, EscalationAction};
use cfq_proto::model::ModelId;
use cfq_proto::task::TaskState;
use schemars::JsonSchema;
use serde::Deserialize;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::servable;
use super::submit::read_body;
use super::validate::{check_label_count, parse_body};
use crate::store::{Cancelled, EndedQuestion, Resolution, Run, TaskFilter, TooLateReason};

/// Maximum size of the reason of a cancel or a pause, in bytes.
const MAX_REASON_BYTES: usize = 2_000;

/// Maximum number up to which the tasks after a page are counted.
const MAX_COUNTED_TASKS: i64 = 100;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// States, separated by commas.
    state: Option<String>,
    /// Priorities, separated by commas.
    priority: Option<String>,
    /// Labels that a task must have, separated by commas.
    label: Option<String>,
    /// Absolute path of a repository.
    repo: Option<String>,
    /// Time before which no listed task was submitted, in seconds since 1970.
    since: Option<String>,
    /// `newest` (default), `oldest`, or `priority`: the oldest of each priority first.
    sort: Option<String>,
    /// `next` of the page before.
    after: Option<String>,
    /// Number of tasks, at most 1000; 50 by default.
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<TaskList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::malformed(e.body_text()))?;
    let filter = TaskFilter {
        states: parse_list("state", query.state.as_deref())?,
        priorities: parse_list("priority", query.priority.as_deref())?,
        labels: parse_list("label", query.label.as_deref())?,
        repo: query.repo,
        since: query.since.as_deref().map(parse_time).transpose()?,
    };
    check_label_count(&filter.labels)?;
    let sort = parse_list::<TaskSort>("sort", query.sort.as_deref())?.first().copied().unwrap_or_default();
    let after = parse_list::<ListPosition>("after", query.after.as_deref())?.first().copied();
    let limit = query.limit.unwrap_or(50).clamp(1, 1000);
    let tasks = api.store.list_tasks(&filter, sort, after, i64::from(limit)).await?;
    let last = tasks.last().map(|last| ListPosition { priority: last.priority, number: last.number });
    let more = match last.filter(|_| tasks.len() == limit as usize) {
        Some(_) => api.store.find_tasks(&filter, sort, last, MAX_COUNTED_TASKS).await?.len(),
        None => 0,
    };
    let next = last.filter(|_| more > 0).map(|last| last.to_string());
    Ok(Json(TaskList { tasks, next, more: more as u32 }))
}

/// The time of the query parameter `since`, in seconds since 1970.
fn parse_time(text: &str) -> Result<i64, ApiError> {
    let invalid = |_| ApiError::invalid("since", format!("since: {text:?} is not a time in seconds since 1970"));
    text.parse().map_err(invalid)
}

/// The values of a query parameter, which are separated by commas.
fn parse_list<T: FromStr<Err = IdError>>(field: &'static str, text: Option<&str>) -> Result<Vec<T>, ApiError> {
    let values = text.into_iter().flat_map(|text| text.split(',')).map(str::parse::<T>);
    values.collect::<Result<_, _>>().map_err(|e| ApiError::invalid(field, format!("{field}: {e}")))
}

pub async fn show(State(api): State<Api>, Path(key): Path<String>) -> Result<Json<TaskDetail>, ApiError> {
    let task = find(&api, &key).await?;
    api.store.task_detail(task).await?.map(Json).ok_or_else(|| unknown(&key))
}

pub async fn cancel(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    let bytes = read_body(&api, bytes)?;
    let request =
        if bytes.is_empty() { CancelRequest { reason: String::new() } } else { parse_body::<CancelRequest>(&bytes)? };
    check_reason(&request.reason)?;
    match api.store.cancel(task, &access.author(&request.reason), Run::Commit).await? {
        Cancelled::Done { number, hints } => {
            api.link.send_hints(hints).await;
            Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled, note: String::new() }))
        }
        Cancelled::Already { number } => {
            Ok(Json(StateReply { id: task, number, state: TaskState::Cancelled, note: String::new() }))
        }
        Cancelled::TooLate { number, reason, .. } => Err(ApiError::conflict(too_late_to_cancel(number, &reason))),
        Cancelled::Unknown => Err(unknown(&key)),
    }
}

pub async fn resolve(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    let request: ResolveRequest = parse_body(&read_body(&api, bytes)?)?;
    match &request.action {
        EscalationAction::SwitchLlm { suggested_model: Some(model), .. } => {
            check_new_model(&api, task, &request, model).await?;
        }
        // It would only repeat the same calls. An answer that was recorded by an earlier version may be repeated.
        EscalationAction::SwitchLlm { suggested_model: None, .. } if !is_repeated(&api, task, &request).await? => {
            let message = "action.suggested_model: switch_llm needs another model; `GET /api/v1/nodes` lists them";
            return Err(ApiError::invalid("action.suggested_model", message));
        }
        EscalationAction::RetryWithConstraints { additional_constraints }
            if additional_constraints.iter().all(|text| text.trim().is_empty())
                && !is_repeated(&api, task, &request).await? =>
        {
            let message = "action.additional_constraints: needs at least one text that is not empty";
            return Err(ApiError::invalid("action.additional_constraints", message));
        }
        EscalationAction::SwitchLlm { .. }
        | EscalationAction::RetryWithConstraints { .. }
        | EscalationAction::AcceptBestEffort
        | EscalationAction::Abort
        | EscalationAction::Fail { .. } => {}
    }
    match api.store.resolve(task, request.question, &request.action, &access.actor()).await? {
        Resolution::Done { number, state, hints } => {
            api.link.send_hints(hints).await;
            let note = match state {
                TaskState::Paused => format!("as requested before the question; `cfq resume {number}` continues it"),
                _ => String::new(),
            };
            Ok(Json(StateReply { id: task, number, state, note }))
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
        Resolution::AlreadyDone { number, state } => {
            let note = "the question got this answer before".to_owned();
            Ok(Json(StateReply { id: task, number, state, note }))
        }
        Resolution::NotOpen { number, ended } => Err(ApiError::conflict(question_not_open(number, ended))),
        Resolution::NothingAcceptable { .. } => Err(ApiError::conflict("no result can be accepted")),
        Resolution::Refused { rejection, .. } => Err(ApiError::conflict(rejection.to_string())),
        Resolution::Unknown => Err(unknown(&key)),
    }
}

/// Whether the question that the request names has this answer already.
async fn is_repeated(api: &Api, task: TaskId, request: &ResolveRequest) -> Result<bool, ApiError> {
    match request.question {
        Some(question) => Ok(api.store.is_answered(task, question, &request.action).await?),
        None => Ok(false),
    }
}

/// Refuses a model that no node can serve. In a repeated request the answer is already recorded, whatever has happened
/// to the nodes since.
async fn check_new_model(api: &Api, task: TaskId, request: &ResolveRequest, model: &ModelId) -> Result<(), ApiError> {
    if is_repeated(api, task, request).await? {
        return Ok(());
    }
    if let Some(nodes) = servable::registered_nodes(&api.store).await? {
        servable::check_model("action.suggested_model", model, &nodes, &api.agents.current())?;
    }
    Ok(())
}

fn question_not_open(number: TaskNumber, ended: Option<EndedQuestion>) -> String {
    let state = match ended {
        None => return format!("question: {number} has no such question; `cfq show {number}` prints the open one"),
        Some(EndedQuestion { answer: Some(answer), by }) => {
            format!("was already answered with {} by {by}", answer.kind().as_str())
        }
        Some(EndedQuestion { answer: None, by }) => format!("is closed, because the task was cancelled by {by}"),
    };
    format!("this question of {number} {state}; `cfq show {number}` prints the state of the task")
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
            None => format!("{key} has no artifact: `cfq show {key}` shows its state"),
        })
    })
}

pub async fn artifact(State(api): State<Api>, Path(id): Path<String>) -> Result<Json<ArtifactChain>, ApiError> {
    let artifact: ArtifactId =
        id.parse().map_err(|e: IdError| ApiError::invalid("artifact", format!("artifact: {e}")))?;
    api.store.artifact_chain_of(artifact).await?.map(Json).ok_or_else(|| {
        ApiError::not_found(format!("there is no artifact {id}: `cfq show TASK` lists the iterations of a task"))
    })
}

/// The id of the task that `key` (a number or an id) names.
pub async fn find(api: &Api, key: &str) -> Result<TaskId, ApiError> {
    let parsed: TaskKey =
        key.parse().map_err(|e: cfq_proto::ids::IdError| ApiError::invalid("task", format!("task: {e}")))?;
    api.store.find_task(parsed).await?.ok_or_else(|| unknown(key))
}

/// The id of the task that `key` names, for a change. Refused if the token allows changes of its own tasks only, and the
/// task is not one of them.
pub async fn find_own(api: &Api, access: &Access, key: &str) -> Result<TaskId, ApiError> {
    let task = find(api, key).await?;
    match access.may_change(&api.store, task).await? {
        true => Ok(task),
        false => Err(ApiError::forbidden(access.not_own(key))),
    }
}

/// Refuses a reason that is too long: it becomes part of the task and of an event.
pub fn check_reason(reason: &str) -> Result<(), ApiError> {
    if reason.len() <= MAX_REASON_BYTES {
        return Ok(());
    }
    Err(ApiError::invalid("reason", format!("reason: at most {MAX_REASON_BYTES} bytes")))
}

/// Why a task cannot be cancelled any more.
pub fn too_late_to_cancel(number: TaskNumber, reason: &TooLateReason) -> String {
    match reason {
        TooLateReason::Ended(state) => format!("too late to cancel the task: {number} is already {state}"),
        TooLateReason::Rejected(rejection) => format!("too late to cancel {number}: {rejection}"),
    }
}

pub fn unknown(key: &str) -> ApiError {
    ApiError::not_found(unknown_message(key))
}

pub fn unknown_message(key: &str) -> String {
    match key.parse::<TaskNumber>() {
        Ok(TaskNumber(..0)) => format!(
            "there is no task {key}: calls of API clients exist only while their clients wait, and only `cfq jobs`, \
             `cfq explain` and `cfq cancel` apply to them"
        ),
        _ => format!("there is no task {key}: `cfq ls` lists all tasks"),
    }
}
