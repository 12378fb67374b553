//! Liveness, readiness and metrics.

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::Api;
use super::error::ApiError;

/// Liveness: the process answers.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// Readiness: succeeds if tasks are accepted and placed, that is, if the database answers, a scheduler is the leader
/// and NATS is connected.
pub async fn readyz(State(api): State<Api>) -> Result<&'static str, ApiError> {
    if !api.store.has_leader().await? {
        return Err(ApiError::busy("no scheduler is the leader yet: retry in a moment"));
    }
    if !api.link.get().is_some_and(cfq_link::Session::is_connected) {
        let message = "not connected to NATS: tasks are accepted, but run only after the connection is restored";
        return Err(ApiError::busy(message));
    }
    Ok("ready\n")
}

/// The metrics page. While the database is unavailable, the gauges that come from it keep their last values.
pub async fn metrics(State(api): State<Api>) -> Result<impl IntoResponse, ApiError> {
    let gauges = match api.store.gauges().await {
        Ok(gauges) => Some(gauges),
        Err(error) => {
            tracing::debug!(%error, "cannot read gauges from the database; the metrics page shows their last values");
            None
        }
    };
    let page = api.metrics.encode(gauges.as_ref())?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page))
}
