mod tls;

use std::net::SocketAddr;

use axum::routing::get;
use cfq_link::stop::{Stopper, channel};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::*;

/// Maximum wait of a test for the server. Normally the server acts within the limits below.
const WAIT: Duration = Duration::from_secs(20);
const REQUEST: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
/// Time until the reply to a request for `/slow`; longer than the timeouts of the tests.
const SLOW_REPLY: Duration = Duration::from_millis(900);
/// More than the socket buffers of both sides hold.
const LARGE_BYTES: usize = 64 * 1024 * 1024;

struct Server {
    address: SocketAddr,
    stopper: Stopper,
    served: tokio::task::JoinHandle<()>,
    /// Each running handler of `/endless` has a receiver.
    handlers: Arc<tokio::sync::watch::Sender<()>>,
}

impl Server {
    async fn start(limits: ConnectionLimits) -> Self {
        Self::start_with(limits, None).await
    }

    async fn start_with(limits: ConnectionLimits, tls: Option<Tls>) -> Self {
        let slow = async || {
            tokio::time::sleep(SLOW_REPLY).await;
            "slow"
        };
        let handlers = Arc::new(tokio::sync::watch::Sender::new(()));
        let running = handlers.clone();
        let endless = move || {
            let receiver = running.subscribe();
            async move {
                let _receiver = receiver;
                std::future::pending::<()>().await;
            }
        };
        let router = Router::new()
            .route("/", get(async || "ok"))
            .route("/slow", get(slow))
            .route("/endless", get(endless))
            .route("/large", get(async || vec![b'x'; LARGE_BYTES]));
        let listener = bind_tcp("127.0.0.1:0".parse().unwrap(), false).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stopper, stop) = channel();
        let served = tokio::spawn(serve(listener, router, limits, tls, stop));
        Self { address, stopper, served, handlers }
    }

    async fn send(&self, bytes: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream
    }
}

fn limits() -> ConnectionLimits {
    ConnectionLimits { connections: 100, request_head_timeout: WAIT * 10, write_stall_timeout: WAIT * 10 }
}

/// Reads until the text contains `end`.
async fn read_until(stream: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut text = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&text).contains(end) {
            assert_ne!(stream.read_buf(&mut text).await.unwrap(), 0, "{}", String::from_utf8_lossy(&text));
        }
    };
    tokio::time::timeout(WAIT, read).await.expect("a response");
    String::from_utf8(text).unwrap()
}

/// Waits until the server has closed the connection.
async fn closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let end =
        tokio::time::timeout(WAIT, stream.read_to_end(&mut rest)).await.expect("the server closes the connection");
    assert!(end.is_ok() || end.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn half_open_and_idle_connections_are_closed() {
    let server = Server::start(ConnectionLimits { request_head_timeout: Duration::from_millis(300), ..limits() }).await;
    let mut idle = server.send(REQUEST).await;
    read_until(&mut idle, "ok").await;
    let mut busy = server.send(&REQUEST.replace("/ ", "/slow ")).await;
    let mut open = Vec::new();
    for bytes in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: localhost\r\nX-A: b"].into_iter().cycle().take(60) {
        open.push(server.send(bytes).await);
    }
    for stream in open.iter_mut().chain([&mut idle]) {
        closed(stream).await;
    }
    read_until(&mut busy, "slow").await;
    read_until(&mut server.send(REQUEST).await, "ok").await;
}

#[tokio::test]
async fn connection_above_the_limit_is_refused_until_another_ends() {
    let server = Server::start(ConnectionLimits { connections: 2, ..limits() }).await;
    let mut first = server.send(REQUEST).await;
    read_until(&mut first, "ok").await;
    let _second = server.send("GET / HT").await;
    let mut third = server.send(REQUEST).await;
    let text = read_until(&mut third, "}}").await;
    assert!(
        text.starts_with("HTTP/1.1 503") && text.contains("retry-after: ") && text.contains("close some"),
        "{text}"
    );
    closed(&mut third).await;
    drop(first);
    let served = async {
        while !read_until(&mut server.send(REQUEST).await, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT, served).await.expect("a connection is free again");
}

#[tokio::test]
async fn client_that_does_not_read_its_response_is_disconnected() {
    let limits = ConnectionLimits { connections: 1, write_stall_timeout: Duration::from_millis(300), ..limits() };
    let server = Server::start(limits).await;
    let mut stalled = server.send(&REQUEST.replace("/ ", "/large ")).await;
    read_until(&mut stalled, "xxx").await;
    let served = async {
        while !read_until(&mut server.send(REQUEST).await, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT, served).await.expect("the connection of the stalled client is free again");
    let mut rest = Vec::new();
    let end = tokio::time::timeout(WAIT, stalled.read_to_end(&mut rest)).await.expect("the connection was closed");
    assert!(rest.len() < LARGE_BYTES / 2, "{end:?}: the client was not disconnected");
}

#[tokio::test]
async fn stop_finishes_running_requests_and_closes_idle_connections() {
    let server = Server::start(limits()).await;
    let mut idle = server.send(REQUEST).await;
    read_until(&mut idle, "ok").await;
    let mut running = server.send(&REQUEST.replace("/ ", "/slow ")).await;
    // The request is running once the server has read it; the connection before it is served by then.
    read_until(&mut server.send(REQUEST).await, "ok").await;
    server.stopper.stop();
    read_until(&mut running, "slow").await;
    closed(&mut idle).await;
    tokio::time::timeout(WAIT, server.served).await.expect("the server ends").unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn address_other_than_loopback_must_be_allowed() {
    for bind in ["0.0.0.0:0", "[::]:0"] {
        let error = bind_tcp(bind.parse().unwrap(), false).await.unwrap_err();
        assert!(error.to_string().contains("http.allow_plaintext"), "{error}");
    }
    for bind in ["127.0.0.1:0", "127.0.0.9:0"] {
        bind_tcp(bind.parse().unwrap(), false).await.unwrap();
    }
    bind_tcp("0.0.0.0:0".parse().unwrap(), true).await.unwrap();
}

#[tokio::test]
async fn socket_is_private_and_replaces_that_of_a_dead_process() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let chmod = |mode| std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    let path = folder.path().join("api.sock");
    chmod(0o755);
    assert!(matches!(bind_socket(&path), Err(ListenError::SocketFolder { mode: 0o755, .. })));
    chmod(0o700);
    drop(bind_socket(&path).unwrap());
    assert!(path.exists(), "the socket of an ended process is left behind");
    let listener = bind_socket(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    let (_stopper, stop) = channel();
    tokio::spawn(serve(listener, Router::new().route("/", get(async || "ok")), limits(), None, stop));
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream.write_all(REQUEST.as_bytes()).await.unwrap();
    read_until(&mut stream, "ok").await;
}

/// While a handler runs, hyper does not notice the end of a connection behind bytes that it has not parsed yet.
#[tokio::test]
async fn handler_ends_with_its_client_although_bytes_follow_the_request() {
    let server = Server::start(limits()).await;
    let running = async |count: usize| {
        let reached = async {
            while server.handlers.receiver_count() != count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(WAIT, reached).await.expect("the number of handlers");
    };
    for following in ["", REQUEST, "x"] {
        let stream = server.send(&format!("{}{following}", REQUEST.replace("/ ", "/endless "))).await;
        running(1).await;
        drop(stream);
        running(0).await;
    }
}
