//! Control of one task by a user: pause, resume, change of the priority.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use cfq_proto::http::{PauseRequest, StateReply, TaskPatch};
use cfq_proto::ids::TaskNumber;
use cfq_proto::task::TaskState;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::submit::read_body;
use super::tasks::{check_reason, find_own, unknown};
use super::validate::parse_body;
use crate::store::{PauseOutcome, PriorityOutcome, ResumeOutcome, Run};

/// Note of a reply about a task that is paused after the running step.
pub const AFTER_STEP: &str = "it will be paused after the running step";
/// Note of a reply about a task whose pause was withdrawn before it took effect.
pub const WITHDRAWN: &str = "it will not be paused";

/// Note of a reply about a task in this state for which a pause was requested before.
pub fn requested_already(state: TaskState) -> &'static str {
    if state == TaskState::Escalated { "it will be paused after the answer" } else { AFTER_STEP }
}

pub async fn pause(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    let bytes = read_body(&api, bytes)?;
    let request = if bytes.is_empty() { PauseRequest::default() } else { parse_body::<PauseRequest>(&bytes)? };
    check_reason(&request.reason)?;
    let reply = |number, state, note: &str| Ok(Json(StateReply { id: task, number, state, note: note.to_owned() }));
    match api.store.pause(task, &access.author(&request.reason), Run::Commit).await? {
        PauseOutcome::Done { number, hints } => {
            api.link.send_hints(hints).await;
            reply(number, TaskState::Paused, "")
        }
        PauseOutcome::AfterStep { number } => reply(number, TaskState::Running, AFTER_STEP),
        PauseOutcome::Already { number, state: TaskState::Paused } => reply(number, TaskState::Paused, ""),
        PauseOutcome::Already { number, state } => reply(number, state, requested_already(state)),
        PauseOutcome::Refused { number, state } => Err(ApiError::conflict(not_pausable(number, state))),
        PauseOutcome::Unknown => Err(unknown(&key)),
    }
}

pub async fn resume(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    match api.store.resume(task, &access.actor(), Run::Commit).await? {
        ResumeOutcome::Done { number, state, hints } => {
            api.link.send_hints(hints).await;
            Ok(Json(StateReply { id: task, number, state, note: String::new() }))
        }
        ResumeOutcome::Withdrawn { number, state } => {
            Ok(Json(StateReply { id: task, number, state, note: WITHDRAWN.to_owned() }))
        }
        ResumeOutcome::NotPaused { number, state } => {
            Err(ApiError::conflict(format!("{number} is {state}: only a paused task can be resumed")))
        }
        ResumeOutcome::Unknown => Err(unknown(&key)),
    }
}

pub async fn change(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<StateReply>, ApiError> {
    let task = find_own(&api, &access, &key).await?;
    let TaskPatch { priority } = parse_body(&read_body(&api, bytes)?)?;
    let reply = |number, state| Ok(Json(StateReply { id: task, number, state, note: String::new() }));
    match api.store.set_priority(task, priority, &access.actor(), Run::Commit).await? {
        PriorityOutcome::Done { number, state, hints, .. } => {
            api.link.send_hints(hints).await;
            reply(number, state)
        }
        PriorityOutcome::Already { number, state } => reply(number, state),
        PriorityOutcome::Ended { number, state } => Err(ApiError::conflict(ended(number, state))),
        PriorityOutcome::Unknown => Err(unknown(&key)),
    }
}

/// Why the priority of an ended task is not changed.
pub fn ended(number: TaskNumber, state: TaskState) -> String {
    format!("{number} is {state}: only a task that has not ended has a priority to change")
}

/// Why a task in this state cannot be paused, with the next step.
pub fn not_pausable(number: TaskNumber, state: TaskState) -> String {
    match state.is_terminal() {
        true => format!("too late to pause the task: {number} is already {state}"),
        false => format!(
            "{number} is {state}: it does nothing until it is answered with `cfq resolve {number}`, or ended with \
             `cfq cancel {number}`"
        ),
    }
}
