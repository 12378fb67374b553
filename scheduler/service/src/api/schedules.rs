//! `/schedules`: adding, listing, removing, pausing and continuing schedules, and submitting their tasks at once.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use axum::http::{HeaderMap, StatusCode};
use cfq_proto::blob::BlobHash;
use cfq_proto::http::{ScheduleList, ScheduleRemoved, ScheduleRequest, ScheduleView};
use cfq_proto::task::TaskSpec;
use cfq_scheduler_core::{CronError, CronExpression};
use jiff::tz::TimeZone;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::submit::{SubmitResult, idempotency_key, new_task, read_body, submit_new};
use super::validate::parse_body;
use crate::store::NewSchedule;

/// Maximum length of a schedule's name.
const MAX_NAME_CHARS: usize = 63;
/// Maximum number of schedules.
const MAX_SCHEDULES: i64 = 100;
/// Maximum size of a cron expression, in bytes.
const MAX_CRON_BYTES: usize = 200;

pub async fn add(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<ScheduleView>), ApiError> {
    let request: ScheduleRequest = parse_body(&read_body(&api, bytes)?)?;
    let ScheduleRequest { name, cron, time_zone, task } = request;
    if !is_name(&name) {
        let message = format!("name: {name:?} must be 1 to {MAX_NAME_CHARS} letters, digits, - and _");
        return Err(ApiError::invalid("name", message));
    }
    if cron.len() > MAX_CRON_BYTES {
        return Err(ApiError::invalid("cron", format!("cron: at most {MAX_CRON_BYTES} bytes")));
    }
    let cron: CronExpression =
        cron.parse().map_err(|error: CronError| ApiError::invalid("cron", format!("cron: {error}")))?;
    let zone = TimeZone::get(&time_zone).map_err(|_| {
        let message = format!("time_zone: {time_zone:?} is not a time zone: use a name such as Europe/Berlin or UTC");
        ApiError::invalid("time_zone", message)
    })?;
    check_task(&task)?;
    let canonical = serde_json::to_vec(&task).map_err(|e| ApiError::malformed(e.to_string()))?;
    let task = new_task(&api, &access, task, None, BlobHash::of(&canonical).to_string())?;
    let current = api.agents.current();
    api.nodes.check_models(&api.store, &task.agents(&current), &current).await??;
    if api.store.count_schedules().await? >= MAX_SCHEDULES {
        let message = format!("there are {MAX_SCHEDULES} schedules: remove some with `cfq schedule rm NAME`");
        return Err(ApiError::conflict(message));
    }
    let new = NewSchedule { name, cron, time_zone, zone, task };
    if !api.store.add_schedule(&new).await? {
        let message = format!(
            "name: there is a schedule {}: choose another name, or remove it with `cfq schedule rm {}`",
            new.name, new.name
        );
        return Err(ApiError::conflict(message));
    }
    tracing::info!(schedule = new.name, cron = %new.cron, "schedule added");
    Ok((StatusCode::CREATED, Json(view(&api, &new.name).await?)))
}

pub async fn list(State(api): State<Api>) -> Result<Json<ScheduleList>, ApiError> {
    Ok(Json(ScheduleList { schedules: api.store.schedules(None).await? }))
}

pub async fn remove(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<ScheduleRemoved>, ApiError> {
    if api.store.remove_schedule(&name).await? { Ok(Json(ScheduleRemoved { name })) } else { Err(unknown(&name)) }
}

/// `POST /schedules/{name}/run`: submits the task of a schedule now. The schedule itself does not change.
pub async fn run(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> SubmitResult {
    let key = idempotency_key(&headers, &access)?;
    let Some(task) = api.store.task_of_schedule(&name, key).await? else { return Err(unknown(&name)) };
    submit_new(&api, &access, &task).await
}

pub async fn pause(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<ScheduleView>, ApiError> {
    api.store.pause_schedule(&name).await?;
    view(&api, &name).await.map(Json)
}

pub async fn resume(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<ScheduleView>, ApiError> {
    api.store.resume_schedule(&name).await?;
    view(&api, &name).await.map(Json)
}

async fn view(api: &Api, name: &str) -> Result<ScheduleView, ApiError> {
    api.store.schedules(Some(name)).await?.pop().ok_or_else(|| unknown(name))
}

fn unknown(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no schedule {name:?}: `cfq schedule ls` lists all schedules"))
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_CHARS).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// Refuses fields that have a meaning only for a single task.
fn check_task(task: &TaskSpec) -> Result<(), ApiError> {
    for (field, is_set) in [
        ("run_at", task.run_at.is_some()),
        ("deadline", task.deadline.is_some()),
        ("after", !task.after.is_empty()),
        ("retry_of", task.retry_of.is_some()),
        ("name", task.name.is_some()),
    ] {
        if is_set {
            let field = format!("task.{field}");
            let message = format!("{field}: has no meaning for a task that is submitted again and again; leave it out");
            return Err(ApiError::invalid(field, message));
        }
    }
    Ok(())
}
