//! Liveness, readiness, status and metrics.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, header};
use cfq_proto::http::ClusterStatus;

use super::Api;
use super::error::ApiError;

/// Liveness: the process answers.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// Readiness: succeeds if tasks are accepted and placed, that is, if the database answers, a scheduler is the leader
/// and NATS is connected.
pub async fn readyz(State(api): State<Api>) -> Result<&'static str, ApiError> {
    match reason_not_ready(&api).await? {
        Some(reason) => Err(ApiError::busy(reason)),
        None => Ok("ready\n"),
    }
}

/// Why tasks are not accepted and placed now; `None` if they are.
async fn reason_not_ready(api: &Api) -> Result<Option<&'static str>, ApiError> {
    if !api.store.has_leader().await? {
        return Ok(Some("no scheduler is the leader yet: retry in a moment"));
    }
    let is_connected = api.link.get().is_some_and(cfq_link::Session::is_connected);
    let reason = "not connected to NATS: tasks are accepted, but run only after the connection is restored";
    Ok((!is_connected).then_some(reason))
}

/// `GET /status`: the state of the cluster.
pub async fn status(State(api): State<Api>) -> Result<Json<ClusterStatus>, ApiError> {
    let not_ready = reason_not_ready(&api).await?;
    Ok(Json(api.store.cluster_status(api.started.elapsed().as_secs_f64(), not_ready).await?))
}

/// The metrics page. While the database is unavailable, the gauges that come from it keep their last values.
pub async fn metrics(State(api): State<Api>) -> Result<([(HeaderName, &'static str); 1], Vec<u8>), ApiError> {
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
