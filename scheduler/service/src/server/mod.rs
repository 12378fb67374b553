//! The HTTP server: listens on the TCP address and on the Unix socket, and limits their connections. Connections that
//! make no progress are closed, so that a client cannot hold resources without using them.

mod listen;
mod socket;
mod tls;
mod write_stall;

#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use cfq_link::stop::Stop;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::api;
use crate::config::SchedulerLimits;
use socket::{ClosedByClient, Socket, Stream};
use tls::Accepted;
use write_stall::WriteStall;

pub use listen::{ListenError, bind_socket, bind_tcp, create_socket, inherited_socket};
pub use tls::{Tls, TlsError};

/// Maximum size of a request's head, in bytes: a client without the token can make the server keep this much for each
/// connection.
const MAX_HEAD_BYTES: usize = 32 * 1024;

/// Maximum number of connections above the limit that get a reply; further ones are closed without one.
const MAX_REFUSED_CONNECTIONS: usize = 32;
/// Interval at which is checked whether the client has closed the connection.
const CLOSED_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a connection above the limit waits for its request.
const REFUSED_HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits of the connections of one listener.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Maximum number of open connections; further ones are refused with status 503.
    pub connections: usize,
    /// Maximum time until the complete head of the next request has arrived. It counts from the start of the
    /// connection or from the end of the last response, so idle connections are closed after this time too.
    pub request_head_timeout: Duration,
    /// Maximum time for which the client may accept no byte of a response.
    pub write_stall_timeout: Duration,
}

impl From<&SchedulerLimits> for ConnectionLimits {
    fn from(limits: &SchedulerLimits) -> Self {
        Self {
            connections: limits.connections,
            request_head_timeout: Duration::from_millis(limits.request_head_timeout_ms),
            write_stall_timeout: Duration::from_millis(limits.write_stall_timeout_ms),
        }
    }
}

/// Serves `router` until `stop` is raised; then accepts no connections, and returns when the open ones have ended. With
/// `tls`, clients on other machines must use it.
pub async fn serve<L: Listener<Io: Stream>>(
    mut listener: L,
    router: Router,
    limits: ConnectionLimits,
    tls: Option<Tls>,
    mut stop: Stop,
) {
    let accepted = Arc::new(Semaphore::new(limits.connections));
    let refused = Arc::new(Semaphore::new(MAX_REFUSED_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let io = tokio::select! {
            (io, _) = listener.accept() => io,
            Some(ended) = connections.join_next() => {
                log_panic(ended);
                continue;
            }
            () = stop.raised() => break,
        };
        if let Ok(permit) = accepted.clone().try_acquire_owned() {
            let served = serve_connection(io, router.clone(), limits, tls.clone(), true, stop.clone());
            connections.spawn(async move {
                served.await;
                drop(permit);
            });
        } else if let Ok(permit) = refused.clone().try_acquire_owned() {
            let limits = ConnectionLimits { request_head_timeout: REFUSED_HEAD_TIMEOUT, ..limits };
            let served = serve_connection(io, api::refusing_router(), limits, tls.clone(), false, stop.clone());
            connections.spawn(async move {
                served.await;
                drop(permit);
            });
        }
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        log_panic(ended);
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task panicked");
    }
}

async fn serve_connection<S: Stream>(
    stream: S,
    router: Router,
    limits: ConnectionLimits,
    tls: Option<Tls>,
    keep_alive: bool,
    mut stop: Stop,
) {
    let is_local = stream.is_local();
    let (socket, closed_by_client) = Socket::new(stream);
    let io = WriteStall::new(socket, limits.write_stall_timeout);
    let Some(tls) = tls else {
        return serve_requests(io, closed_by_client, router, limits, keep_alive, stop).await;
    };
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(limits.request_head_timeout, tls.accept(io)) => accepted,
        () = stop.raised() => return,
    };
    match accepted {
        Ok(Ok(Accepted::Tls(io))) => serve_requests(io, closed_by_client, router, limits, keep_alive, stop).await,
        Ok(Ok(Accepted::Plain(io))) if is_local => {
            serve_requests(io, closed_by_client, router, limits, keep_alive, stop).await;
        }
        Ok(Ok(Accepted::Plain(io))) => {
            let limits = ConnectionLimits { request_head_timeout: REFUSED_HEAD_TIMEOUT, ..limits };
            serve_requests(io, closed_by_client, api::plaintext_router(), limits, false, stop).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "tls handshake failed"),
        Err(_) => tracing::debug!("tls handshake took too long"),
    }
}

async fn serve_requests<S: Stream>(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    closed_by_client: ClosedByClient<S>,
    router: Router,
    limits: ConnectionLimits,
    keep_alive: bool,
    mut stop: Stop,
) {
    let io = TokioIo::new(io);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.request_head_timeout).keep_alive(keep_alive);
    builder.max_buf_size(MAX_HEAD_BYTES);
    let mut connection = pin!(builder.serve_connection(io, TowerToHyperService::new(router)));
    let closed = async {
        loop {
            tokio::time::sleep(CLOSED_CHECK_INTERVAL).await;
            if closed_by_client.check() {
                return;
            }
        }
    };
    let mut closed = pin!(closed);
    let mut is_stopping = false;
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            // The handlers of a client that has disconnected are dropped.
            () = closed.as_mut() => return,
            () = stop.raised(), if !is_stopping => {
                connection.as_mut().graceful_shutdown();
                is_stopping = true;
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, cause = ?std::error::Error::source(&error), "connection ended");
    }
}
