//! Alive, ready, and what is counted.

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::Api;
use super::error::ApiError;

/// The process answers.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// Tasks are accepted and placed: the database answers, somebody leads, NATS is there.
pub async fn readyz(State(api): State<Api>) -> Result<&'static str, ApiError> {
    if !api.store.has_leader().await? {
        return Err(ApiError::busy("no scheduler leads yet"));
    }
    if !api.link.get().is_some_and(cfq_link::Session::is_connected) {
        return Err(ApiError::busy("not connected to NATS: tasks are accepted, but wait"));
    }
    Ok("ready\n")
}

pub async fn metrics(State(api): State<Api>) -> Result<impl IntoResponse, ApiError> {
    let gauges = match api.store.gauges().await {
        Ok(gauges) => Some(gauges),
        Err(error) => {
            tracing::debug!(%error, "the database's figures are missing from the metrics");
            None
        }
    };
    let page = api.metrics.page(gauges.as_ref())?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page))
}
