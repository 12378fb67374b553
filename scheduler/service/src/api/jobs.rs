//! `GET /jobs`: the list of model calls.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use cfq_proto::http::{JobFilter, JobList};
use cfq_proto::job::JobState;
use schemars::JsonSchema;
use serde::Deserialize;

use super::Api;
use super::error::ApiError;
use super::tasks;

/// Number of jobs in a page if the request names none.
const DEFAULT_PAGE_JOBS: u32 = 50;
/// Maximum number of jobs in a page.
const MAX_PAGE_JOBS: u32 = 1_000;

/// Query of the request. The texts are parsed here, so that an error names its field.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobsQuery {
    /// Number or id of a task.
    task: Option<String>,
    /// States, separated by commas.
    state: Option<String>,
    /// Name of a node.
    node: Option<String>,
    /// Id of a model.
    model: Option<String>,
    /// `next` of the page before.
    after: Option<String>,
    /// Number of jobs, at most 1000; 50 by default.
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<JobsQuery>, QueryRejection>,
) -> Result<Json<JobList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::malformed(format!("cannot read the query: {}", e.body_text())))?;
    let task = match &query.task {
        Some(key) => Some(tasks::find(&api, key).await?),
        None => None,
    };
    let states = query.state.iter().flat_map(|text| text.split(',')).map(str::parse::<JobState>);
    let states = states.collect::<Result<_, _>>().map_err(|e| ApiError::invalid("state", format!("state: {e}")))?;
    let filter = JobFilter {
        task: None,
        states,
        node: field("node", query.node.as_deref())?,
        model: field("model", query.model.as_deref())?,
        after: field("after", query.after.as_deref())?,
        limit: query.limit.unwrap_or(DEFAULT_PAGE_JOBS).clamp(1, MAX_PAGE_JOBS),
    };
    let limit = filter.limit as usize;
    // One job more than requested, to know whether there is another page.
    let mut jobs = api.store.list_jobs(&filter, task, i64::from(filter.limit) + 1).await?;
    let is_last = jobs.len() <= limit;
    jobs.truncate(limit);
    let next = if is_last { None } else { jobs.last().map(|job| job.id) };
    Ok(Json(JobList { jobs, next }))
}

fn field<T: std::str::FromStr<Err: std::fmt::Display>>(name: &str, text: Option<&str>) -> Result<Option<T>, ApiError> {
    text.map(str::parse).transpose().map_err(|e| ApiError::invalid(name, format!("{name}: {e}")))
}
