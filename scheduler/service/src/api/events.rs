//! `GET /tasks/{key}/events`: the events of a task in one reply.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use cfq_proto::http::EventList;
use schemars::JsonSchema;
use serde::Deserialize;

use super::Api;
use super::error::ApiError;
use super::tasks::find;

#[derive(Debug, Deserialize, JsonSchema)]
pub struct EventsQuery {
    /// Returns only events whose `task_seq` is greater.
    after: Option<i64>,
}

/// All events whose `task_seq` is above `after`.
pub async fn list(
    State(api): State<Api>,
    Path(key): Path<String>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Result<Json<EventList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::invalid("after", format!("after: {}", e.body_text())))?;
    let task = find(&api, &key).await?;
    let mut events = Vec::new();
    let mut after = query.after.unwrap_or(0);
    loop {
        let page = api.store.task_events(task, after).await?;
        let Some(last) = page.last() else { return Ok(Json(EventList { events })) };
        after = last.task_seq;
        events.extend(page);
    }
}
