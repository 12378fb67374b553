//! `POST /tasks`: accepted means committed.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use cfq_proto::blob::BlobHash;
use cfq_proto::http::{SubmitReply, SubmitRequest};
use cfq_proto::ids::TaskId;
use cfq_proto::task::TaskState;

use super::Api;
use super::error::ApiError;
use super::validate;
use crate::store::{Hint, NewTask, Submitted};

const KEY: &str = "Idempotency-Key";

pub async fn submit(
    State(api): State<Api>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<SubmitReply>), ApiError> {
    let key = idempotency_key(&headers)?;
    let asked: SubmitRequest = validate::body(&read(bytes)?)?;
    // Of what was asked, not of what the defaults make of it: those may change between two tries.
    let canonical = serde_json::to_vec(&asked).map_err(|e| ApiError::malformed(e.to_string()))?;
    let spec = validate::completed(asked, &api.defaults)?;
    let new = NewTask {
        id: TaskId::fresh(),
        title: validate::title(&spec.description),
        threshold: spec.threshold.unwrap_or(api.defaults.threshold),
        max_iterations: spec.max_iterations.unwrap_or(api.defaults.max_iterations),
        spec,
        key,
        body_hash: BlobHash::of(&canonical).to_string(),
    };
    match api.store.submit(&new).await? {
        Submitted::Created { id, number } => {
            let link = api.link.clone();
            // The hint is nobody's wait.
            tokio::spawn(async move { link.tell(vec![Hint::WorkWaits]).await });
            tracing::info!(task = %number, %id, "task accepted");
            Ok((StatusCode::CREATED, Json(SubmitReply { id, number, state: TaskState::Ready, created: true })))
        }
        Submitted::Existing { id, number, state } => {
            Ok((StatusCode::OK, Json(SubmitReply { id, number, state, created: false })))
        }
        Submitted::TooLate => Err(ApiError::invalid("deadline", "deadline: has passed already; name a later one")),
        Submitted::KeyReused { number } => Err(ApiError::key_reused(format!(
            "the idempotency key was used for {number}, with another task; use a new key for a new task"
        ))),
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(KEY) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=200).contains(&key.len()) => Ok(Some(key.to_owned())),
        _ => Err(ApiError::invalid(KEY, format!("{KEY}: must be 1 to 200 printable characters"))),
    }
}

/// A body, unless it is larger than the limit.
pub fn read(bytes: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    bytes.map_err(|rejection| {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            ApiError::too_large(
                "the request is larger than this cfq takes; large texts belong in files of the repository",
            )
        } else {
            ApiError::malformed("the request's body could not be read")
        }
    })
}
