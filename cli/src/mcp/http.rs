//! The tools over streamable HTTP at `/mcp`, in the scheduler's process and behind the checks of its API: an allowed
//! Host, no foreign Origin, the bearer token. Every request carries all that it needs, so there are no sessions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use cfq_proto::client::ClientError;
use cfq_proto::http::{ErrorBody, ErrorCode, ErrorReply};
use cfq_proto::ids::TaskKey;
use cfq_scheduler::HttpServer;
use rmcp::transport::StreamableHttpServerConfig;

use super::access::{self, AccessSource};
use super::bridge::Bridge;
#[cfg(feature = "mcp-fixtures")]
use super::fixtures::service;
use super::handoff::ARCHIVES;
use crate::{archive, connect};

/// Returns what creates the routes for the scheduler's HTTP server.
///
/// # Errors
/// reqwest's error if no HTTP client can be created.
pub fn http_routes() -> Result<impl FnOnce(HttpServer) -> Router, reqwest::Error> {
    let http = cfq_link::outbound::api_client()?;
    Ok(move |server| routes(http, server))
}

fn routes(http: reqwest::Client, server: HttpServer) -> Router {
    let HttpServer { address, body_bytes, mut stop } = server;
    let own = Own { http, url: format!("http://{}", reachable(address)) };
    // The scheduler has checked Host and Origin already; it allows the hosts of its configuration.
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_max_request_body_bytes(body_bytes)
        .disable_allowed_hosts();
    // A wait for a change ends when the server stops; the client asks again.
    let stopped = config.cancellation_token.clone();
    tokio::spawn(async move {
        stop.raised().await;
        stopped.cancel();
    });
    let source = AccessSource::Request { http: own.http.clone(), url: own.url.clone() };
    let bridge = move || Ok(Bridge::new(source.clone()));
    Router::new()
        .route_service("/mcp", service(bridge, config))
        .route(&format!("{ARCHIVES}/{{task}}"), get(download))
        .with_state(own)
}

/// The HTTP service of what `bridge` creates. With the feature `mcp-fixtures`, `fixtures::service` takes its place.
#[cfg(not(feature = "mcp-fixtures"))]
fn service(
    bridge: impl Fn() -> Result<Bridge, std::io::Error> + Send + Sync + 'static,
    config: StreamableHttpServerConfig,
) -> rmcp::transport::StreamableHttpService<
    Bridge,
    rmcp::transport::streamable_http_server::session::never::NeverSessionManager,
> {
    rmcp::transport::StreamableHttpService::new(bridge, std::sync::Arc::default(), config)
}

/// The address at which this process reaches itself.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// The connection of this process to its own API.
#[derive(Debug, Clone)]
struct Own {
    http: reqwest::Client,
    url: String,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Download {
    #[serde(default = "yes")]
    audit: bool,
}

fn yes() -> bool {
    true
}

/// `GET /mcp/archives/TASK`: the archive of a task.
async fn download(
    State(own): State<Own>,
    Path(task): Path<String>,
    query: Result<Query<Download>, QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let Some(access) = access::of_request(&own.http, &own.url, &headers) else {
        return refused(StatusCode::UNAUTHORIZED, ErrorCode::Unauthorized, "missing bearer token");
    };
    let audit = match query {
        Ok(Query(Download { audit })) => audit,
        Err(error) => return refused(StatusCode::BAD_REQUEST, ErrorCode::Invalid, error.body_text()),
    };
    let task = match task.parse::<TaskKey>() {
        Ok(task) => task,
        Err(error) => return refused(StatusCode::BAD_REQUEST, ErrorCode::Invalid, error.to_string()),
    };
    let packed = match access.client() {
        Ok(client) => archive::pack_task(&client, task, audit).await,
        Err(error) => return refused(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::Internal, error.0),
    };
    match packed {
        Ok(packed) => {
            let name = format!("attachment; filename=\"{}\"", packed.file_name());
            let head = [(header::CONTENT_TYPE, "application/zstd"), (header::CONTENT_DISPOSITION, name.as_str())];
            (head, packed.bytes).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// The response to a request whose archive could not be made.
fn failed(error: &anyhow::Error) -> Response {
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Refused { status, body }) => {
            let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_GATEWAY);
            (status, Json(ErrorReply { error: body.clone() })).into_response()
        }
        Some(other) => refused(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Busy, connect::describe_error(other)),
        None => refused(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::Internal, format!("{error:#}")),
    }
}

fn refused(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Response {
    let error = ErrorBody { code, message: message.into(), field: None, retry_after: None };
    (status, Json(ErrorReply { error })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_on_all_addresses_is_reached_on_loopback() {
        for (address, reached) in [
            ("0.0.0.0:7710", "127.0.0.1:7710"),
            ("[::]:7710", "[::1]:7710"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("192.168.1.5:7710", "192.168.1.5:7710"),
        ] {
            assert_eq!(reachable(address.parse().unwrap()).to_string(), reached);
        }
    }
}
