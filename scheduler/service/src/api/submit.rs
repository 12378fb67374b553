//! `POST /tasks`: a task is accepted once it is committed.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use cfq_proto::blob::BlobHash;
use cfq_proto::http::{CheckReply, SubmitReply, SubmitRequest};
use cfq_proto::ids::TaskId;
use cfq_proto::task::{Agent, TaskSpec, TaskState};
use cfq_proto::task_ref::TaskRef;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::open_tasks::OpenTaskPermit;
use super::validate;
use crate::store::{NewTask, Submitted};

const IDEMPOTENCY_KEY: &str = "Idempotency-Key";

pub(super) type SubmitResult = Result<(StatusCode, Json<SubmitReply>), ApiError>;

pub async fn submit(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> SubmitResult {
    let key = idempotency_key(&headers, &access)?;
    let request: SubmitRequest = validate::parse_body(&read_body(&api, bytes)?)?;
    // The request is hashed before the defaults are filled in, because the defaults may change between two tries.
    let canonical = serde_json::to_vec(&request).map_err(|e| ApiError::malformed(e.to_string()))?;
    validate::check_references(&request)?;
    let new = new_task(&api, &access, request, key, BlobHash::of(&canonical).to_string())?;
    submit_new(&api, &access, &new).await
}

/// Creates the task, or repeats the reply for its idempotency key.
pub(super) async fn submit_new(api: &Api, access: &Access, new: &NewTask) -> SubmitResult {
    let (permit, warnings) = match admit(api, access, new).await? {
        Ok(admitted) => admitted,
        Err(refusal) => return repeat_or_refuse(api, new, refusal).await,
    };
    let submitted = submit_within(api, permit, new).await?;
    on_submitted(api, &submitted).await;
    let is_new = matches!(submitted, Submitted::Created { .. });
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(reply(submitted, warnings)?)))
}

/// Submits the task. The permit is held until the task is written, also if the client disconnects meanwhile.
async fn submit_within(api: &Api, permit: OpenTaskPermit, new: &NewTask) -> Result<Submitted, ApiError> {
    if permit.is_unlimited() {
        return Ok(api.store.submit(new).await?);
    }
    let (store, new) = (api.store.clone(), new.clone());
    let written = tokio::spawn(async move {
        let submitted = store.submit(&new).await;
        drop(permit);
        submitted
    });
    let lost = |_| ApiError::busy("the task was not written: submit it again with the same idempotency key");
    Ok(written.await.map_err(lost)??)
}

/// `POST /tasks:check`: checks a task as its submission does, and submits nothing.
pub async fn check(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<CheckReply>, ApiError> {
    let request: SubmitRequest = validate::parse_body(&read_body(&api, bytes)?)?;
    validate::check_references(&request)?;
    let new = new_task(&api, &access, request, None, String::new())?;
    let (_, warnings) = admit(&api, &access, &new).await??;
    if let Some(deadline) = new.spec.deadline
        && deadline <= api.store.clock_ms().await? / 1000
    {
        return Err(past_deadline());
    }
    let agents = new.agents(&api.agents.current());
    Ok(Json(CheckReply { task: TaskSpec { agents, ..new.spec }, warnings }))
}

/// A validated task, with every default filled in.
pub(super) fn new_task(
    api: &Api,
    access: &Access,
    request: SubmitRequest,
    key: Option<String>,
    body_hash: String,
) -> Result<NewTask, ApiError> {
    let has_no_model = |agent: &Agent| request.agents.of(*agent).model.is_none();
    let agents_without_model: Vec<Agent> = Agent::ALL.into_iter().filter(has_no_model).collect();
    let spec = validate::with_defaults(request, &api.defaults)?;
    access.check_repository(&spec.repo)?;
    Ok(NewTask {
        token: access.token_id(),
        agents_without_model,
        id: TaskId::fresh(),
        title: validate::title_of(&spec),
        threshold: spec.threshold.unwrap_or(api.defaults.threshold),
        max_iterations: spec.max_iterations.unwrap_or(api.defaults.max_iterations),
        spec,
        key,
        body_hash,
    })
}

/// Counts and announces a task that was just created.
pub(super) async fn on_submitted(api: &Api, submitted: &Submitted) {
    if let Submitted::Created { id, number, state, .. } = submitted {
        api.open_tasks.on_created().await;
        if *state == TaskState::Ready {
            api.link.on_new_task();
        }
        tracing::info!(task = %number, %id, %state, "task accepted");
    }
}

/// Whether a new task may be created now: the permit and its warnings, or the reason to refuse it.
async fn admit(
    api: &Api,
    access: &Access,
    new: &NewTask,
) -> Result<Result<(OpenTaskPermit, Vec<String>), ApiError>, ApiError> {
    let permit = match api.open_tasks.admit(&api.store, access, 1).await? {
        Ok(permit) => permit,
        Err(refusal) => return Ok(Err(refusal)),
    };
    check_retried(api, access, &new.spec).await?;
    let current = api.agents.current();
    let checked = api.nodes.check_models(&api.store, &new.agents(&current), &current).await?;
    Ok(checked.map(|warnings| (permit, warnings)))
}

/// Refuses the retry of a task that the token may not change: the tasks that wait for it will wait for the new one.
pub(super) async fn check_retried(api: &Api, access: &Access, spec: &TaskSpec) -> Result<(), ApiError> {
    if let Some(TaskRef::Key(key)) = &spec.retry_of
        && let Some(task) = api.store.find_task(*key).await?
        && !access.may_change(&api.store, task).await?
    {
        return Err(ApiError::forbidden(format!("retry_of: {}", access.not_own(&key.to_string()))));
    }
    Ok(())
}

/// Repeats the reply to an earlier submission with the same idempotency key, because that reply may have been lost.
/// Without one, refuses the task.
async fn repeat_or_refuse(api: &Api, new: &NewTask, refusal: ApiError) -> SubmitResult {
    if new.key.is_none() {
        return Err(refusal);
    }
    match api.store.find_by_key(new).await? {
        Submitted::TooLate => Err(refusal),
        found => Ok((StatusCode::OK, Json(reply(found, Vec::new())?))),
    }
}

/// The reply to a submission, or why it was refused.
pub(super) fn reply(submitted: Submitted, mut warnings: Vec<String>) -> Result<SubmitReply, ApiError> {
    match submitted {
        Submitted::Created { id, number, state, warning } => {
            warnings.extend(warning);
            Ok(SubmitReply { id, number, state, created: true, warnings })
        }
        Submitted::Existing { id, number, state } => {
            Ok(SubmitReply { id, number, state, created: false, warnings: Vec::new() })
        }
        Submitted::TooLate => Err(past_deadline()),
        Submitted::KeyReused { number } => Err(ApiError::key_reused(format!(
            "the idempotency key was already used for {number} with another request: use a new key for a new task"
        ))),
        Submitted::UnknownTask { field, key } => {
            Err(ApiError::invalid(field, format!("{field}: there is no task {key}: `cfq ls` lists all tasks")))
        }
        Submitted::NotRetriable { number, state } => Err(ApiError::invalid(
            "retry_of",
            format!("retry_of: {number} is {state}: only a failed or cancelled task can be retried"),
        )),
        Submitted::RetryCycle { number } => Err(ApiError::invalid(
            "after",
            format!(
                "after: {number} waits for the task that is retried, so the retry cannot wait for it: leave it out"
            ),
        )),
    }
}

fn past_deadline() -> ApiError {
    ApiError::invalid("deadline", "deadline: is in the past; set a later one")
}

/// The idempotency key of a request, as it is stored.
pub(super) fn idempotency_key(headers: &HeaderMap, access: &Access) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=200).contains(&key.len()) => Ok(Some(access.stored_key(key.to_owned()))),
        _ => {
            let message = format!("{IDEMPOTENCY_KEY}: must have 1 to 200 printable characters");
            Err(ApiError::invalid(IDEMPOTENCY_KEY, message))
        }
    }
}

/// The body's bytes; an error if the body exceeds `SchedulerLimits::body_bytes` or the connection broke.
pub fn read_body(api: &Api, bytes: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    bytes.map_err(|rejection| {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            ApiError::too_large(format!(
                "the request body exceeds the limit of {} bytes: send less text, for example by moving large texts of a \
                 task into files of its repository",
                api.body_bytes
            ))
        } else {
            ApiError::malformed("the request body cannot be read: send it again")
        }
    })
}
