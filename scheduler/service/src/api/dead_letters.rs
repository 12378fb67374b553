//! `/dead-letters`: jobs that are not retried any more, and their requeueing.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Path, Query, State};
use cfq_proto::http::{DeadLetterDetail, DeadLetterList, RequeueReply};
use cfq_proto::ids::{JobId, TaskKey};
use schemars::JsonSchema;
use serde::Deserialize;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use crate::store::Requeued;

#[derive(Debug, Deserialize, JsonSchema)]
pub struct ListQuery {
    /// `next` of the page before.
    after: Option<JobId>,
    /// Number of dead letters, at most 1000; 50 by default.
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<DeadLetterList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::malformed(e.body_text()))?;
    let limit = query.limit.unwrap_or(50).clamp(1, 1000) as usize;
    let mut dead_letters = api.store.dead_letters(query.after, limit as i64 + 1).await?;
    let is_cut = dead_letters.len() > limit;
    dead_letters.truncate(limit);
    let next = dead_letters.last().map(|last| last.job).filter(|_| is_cut);
    Ok(Json(DeadLetterList { dead_letters, next }))
}

pub async fn show(State(api): State<Api>, Path(key): Path<String>) -> Result<Json<DeadLetterDetail>, ApiError> {
    let job = find(&api, &key).await?;
    api.store.dead_letter(job).await?.map(Json).ok_or_else(|| unknown(&key))
}

pub async fn requeue(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
) -> Result<Json<RequeueReply>, ApiError> {
    let job = find(&api, &key).await?;
    let task = api.store.find_task_of_job(job).await?.ok_or_else(|| unknown(&key))?;
    if !access.may_change(&api.store, task).await? {
        return Err(ApiError::forbidden(access.not_own(&key)));
    }
    Err(ApiError::conflict(match api.store.requeue(job, &access.actor()).await? {
        Requeued::Done { number, state, hints } => {
            api.link.send_hints(hints).await;
            return Ok(Json(RequeueReply { job, number, state }));
        }
        Requeued::Unknown => return Err(unknown(&key)),
        Requeued::NotDead { state } => format!("the job is {state}: only a dead letter can be requeued"),
        Requeued::TaskEnded { number, state } => {
            format!("{number} is {state}: submit the task again with `cfq retry {number}`")
        }
        Requeued::Superseded { number, state } => {
            format!("{number} is {state} and has continued without this call: `cfq show {number}` shows its question")
        }
        Requeued::NotRepeatable { number } => format!(
            "{number} cannot repeat this review: `cfq resolve {number} --action switch_llm --agent beta` continues with a \
             new result"
        ),
        Requeued::Refused { number, rejection } => format!("{number} cannot continue: {rejection}"),
    }))
}

/// The dead letter that `key` (a job's id, or a task's number or id) names.
async fn find(api: &Api, key: &str) -> Result<JobId, ApiError> {
    let parsed: TaskKey =
        key.parse().map_err(|e: cfq_proto::ids::IdError| ApiError::invalid("key", format!("dead letter: {e}")))?;
    api.store.find_dead_letter(parsed).await?.ok_or_else(|| unknown(key))
}

fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!("{key} has no dead letter: `cfq dead ls` lists all dead letters"))
}
