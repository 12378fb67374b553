//! `POST /gc`: deletes what is older than the retention, or counts it.

use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use cfq_proto::http::{GcReply, GcRequest};

use super::Api;
use super::error::ApiError;
use super::submit::read_body;
use super::validate::parse_body;

/// Time after which a request starts no further batch: it replies before its time limit, and the client asks again.
const MAX_TIME: Duration = Duration::from_secs(3);

pub async fn collect(State(api): State<Api>, bytes: Result<Bytes, BytesRejection>) -> Result<Json<GcReply>, ApiError> {
    let request: GcRequest = parse_body(&read_body(&api, bytes)?)?;
    if request.older_than_days.is_some_and(|days| !days.is_finite() || days < 0.0) {
        return Err(ApiError::invalid("older_than_days", "older_than_days: must be 0 or a positive number of days"));
    }
    let began = Instant::now();
    let now_s = api.store.clock_ms().await? as f64 / 1000.0;
    let expiry = api.retention.expiry(now_s, request.older_than_days);
    api.store.mark_ended_tasks().await?;
    if request.dry_run {
        let counted = api.store.count_expired(&expiry).await?;
        return Ok(Json(GcReply { ended_before: expiry.tasks_ended_before, finished: true, ..counted }));
    }
    let mut reply = GcReply { ended_before: expiry.tasks_ended_before, finished: true, ..GcReply::default() };
    if let Some(before) = expiry.nodes_seen_before {
        let deleted = api.store.delete_lost_nodes(before).await?;
        (reply.nodes, reply.runners) = (deleted.nodes, deleted.runners);
    }
    if let Some(before) = expiry.tasks_ended_before {
        while let Some(batch) = api.store.delete_expired_tasks(before).await? {
            reply.tasks += batch.tasks;
            reply.events += batch.events;
            reply.blob_bytes += batch.blob_bytes;
            if began.elapsed() >= MAX_TIME {
                reply.finished = false;
                break;
            }
        }
    }
    tracing::info!(
        tasks = reply.tasks,
        nodes = reply.nodes,
        runners = reply.runners,
        "deleted expired rows on request"
    );
    Ok(Json(reply))
}
