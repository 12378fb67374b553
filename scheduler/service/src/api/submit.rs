//! `POST /tasks`: a task is accepted once it is committed.

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

const IDEMPOTENCY_KEY: &str = "Idempotency-Key";

pub async fn submit(
    State(api): State<Api>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<SubmitReply>), ApiError> {
    let key = idempotency_key(&headers)?;
    let request: SubmitRequest = validate::parse_body(&read_body(bytes)?)?;
    // The request is hashed before the defaults are filled in, because the defaults may change between two tries.
    let canonical = serde_json::to_vec(&request).map_err(|e| ApiError::malformed(e.to_string()))?;
    let spec = validate::with_defaults(request, &api.defaults)?;
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
            // The reply does not wait until the hint is sent.
            tokio::spawn(async move { link.send_hints(vec![Hint::TaskReady]).await });
            tracing::info!(task = %number, %id, "task accepted");
            Ok((StatusCode::CREATED, Json(SubmitReply { id, number, state: TaskState::Ready, created: true })))
        }
        Submitted::Existing { id, number, state } => {
            Ok((StatusCode::OK, Json(SubmitReply { id, number, state, created: false })))
        }
        Submitted::TooLate => Err(ApiError::invalid("deadline", "deadline: is in the past; set a later one")),
        Submitted::KeyReused { number } => Err(ApiError::key_reused(format!(
            "the idempotency key was already used for {number} with another request: use a new key for a new task"
        ))),
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=200).contains(&key.len()) => Ok(Some(key.to_owned())),
        _ => {
            let message = format!("{IDEMPOTENCY_KEY}: must have 1 to 200 printable characters");
            Err(ApiError::invalid(IDEMPOTENCY_KEY, message))
        }
    }
}

/// The body's bytes; an error if the body exceeds `SchedulerLimits::body_bytes` or the connection broke.
pub fn read_body(bytes: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    bytes.map_err(|rejection| {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            ApiError::too_large(
                "the request body exceeds the size limit: move large texts into files of the repository",
            )
        } else {
            ApiError::malformed("the request body cannot be read: send it again")
        }
    })
}
