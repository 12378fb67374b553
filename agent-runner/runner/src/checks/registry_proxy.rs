//! HTTP proxy through which a preparation reaches registries of packages, and nothing else.
//!
//! The preparation runs in a sandbox without network. The proxy accepts its connections on a port inside of the
//! sandbox, and connects only to the hosts that the machine's owner lists. The proxy resolves host names. Sources: RFC
//! 9110 (CONNECT), RFC 9112 (the absolute form of a request's target).

use std::collections::BTreeSet;
use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use hyper::http::uri::PathAndQuery;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Port in the sandbox.
pub(super) const PROXY_PORT: u16 = 3128;
/// Maximum number of open connections. More wait.
const MAX_CONNECTIONS: usize = 128;
/// Time after which a connection is accepted again if that failed.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Maximum length of a host name, in bytes (RFC 1035).
const MAX_HOST_BYTES: usize = 253;
/// Time to connect to a registry.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of problems that are kept.
const MAX_PROBLEMS: usize = 20;
/// A header that older clients send to proxies.
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// A host that a preparation may reach: `HOST` on its usual ports, or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Registry {
    host: String,
    port: Option<u16>,
}

/// The registries of the package managers that the documentation names.
const PUBLIC_REGISTRIES: [&str; 13] = [
    "pypi.org",
    "files.pythonhosted.org",
    "registry.npmjs.org",
    "registry.yarnpkg.com",
    "index.crates.io",
    "static.crates.io",
    "proxy.golang.org",
    "sum.golang.org",
    "repo.maven.apache.org",
    "repo1.maven.org",
    "plugins.gradle.org",
    "plugins-artifacts.gradle.org",
    "services.gradle.org",
];

impl Registry {
    /// The registries that are reachable if the configuration names none.
    pub(super) fn public() -> Vec<Self> {
        PUBLIC_REGISTRIES.map(|host| Self { host: host.to_owned(), port: None }).into()
    }

    /// Name or address.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    fn permits(&self, host: &str, port: u16, default_port: u16) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host);
        self.host.eq_ignore_ascii_case(host) && port == self.port.unwrap_or(default_port)
    }
}

impl TryFrom<String> for Registry {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let invalid = || format!("{text:?} is neither HOST nor HOST:PORT, as `mirror.lan:8080`");
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        let host = match uri.authority() {
            Some(authority) if authority.as_str() == text && !text.contains('@') => authority.host(),
            _ => return Err(invalid()),
        };
        let port = uri.port_u16();
        if host.is_empty() || (port.is_none() && host.len() != text.len()) {
            return Err(invalid());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl From<Registry> for String {
    fn from(Registry { host, port }: Registry) -> Self {
        port.map_or(host.clone(), |port| format!("{host}:{port}"))
    }
}

/// What the connections of a proxy share.
#[derive(Debug)]
struct Shared {
    registries: Vec<Registry>,
    problems: Mutex<BTreeSet<String>>,
}

impl Shared {
    fn add_problem(&self, problem: String) {
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        if problems.len() < MAX_PROBLEMS {
            problems.insert(problem);
        }
    }
}

/// A proxy that runs until it is dropped.
#[derive(Debug)]
pub(super) struct RegistryProxy {
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RegistryProxy {
    /// Starts a proxy that accepts connections on `listener`.
    ///
    /// # Errors
    /// If the system refuses a thread or an event queue.
    pub fn start(listener: TcpListener, registries: Vec<Registry>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = Arc::new(Shared { registries, problems: Mutex::default() });
        let (stop, stopped) = oneshot::channel();
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("registry-proxy".to_owned()).spawn(move || {
            runtime.block_on(async move {
                tokio::select! {
                    ended = serve(listener, of_thread) => {
                        if let Err(error) = ended {
                            tracing::warn!(%error, "the proxy of a preparation ended");
                        }
                    }
                    _ = stopped => {}
                }
            });
            // Tunnels that are open end with the runtime; names that are being resolved are not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Hosts that were requested and are not listed, or cannot be reached, each with the reason.
    pub fn problems(&self) -> Vec<String> {
        self.shared.problems.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for RegistryProxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is in the log.
            drop(thread.join());
        }
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let open = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = open.clone().acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // Too many open files, for example.
            Err(error) => {
                tracing::warn!(%error, "the proxy of a preparation cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let shared = shared.clone();
        // A tunnel goes on after the connection has been served.
        let permit = Arc::new(permit);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, &shared, &permit));
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades()
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "a connection to the proxy of a preparation failed");
            }
            drop(permit);
        });
    }
}

type ProxyResponse = Response<Either<Incoming, Full<Bytes>>>;

async fn answer(
    request: Request<Incoming>,
    shared: &Arc<Shared>,
    permit: &Arc<OwnedSemaphorePermit>,
) -> Result<ProxyResponse, hyper::Error> {
    let default_port = if request.method() == Method::CONNECT { 443 } else { 80 };
    let uri = request.uri();
    let is_valid = request.method() == Method::CONNECT || uri.scheme_str() == Some("http");
    let Some(host) = uri.host().filter(|host| is_valid && host.len() <= MAX_HOST_BYTES).map(str::to_owned) else {
        return Ok(refuse(StatusCode::BAD_REQUEST, "this is a proxy for http and https"));
    };
    let port = uri.port_u16().unwrap_or(default_port);
    if !shared.registries.iter().any(|registry| registry.permits(&host, port, default_port)) {
        let reason = format!("{host}:{port} is not in `registries` under [checks] in cfq.toml");
        shared.add_problem(reason.clone());
        return Ok(refuse(StatusCode::FORBIDDEN, &reason));
    }
    let target = (host.trim_start_matches('[').trim_end_matches(']'), port);
    let stream = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await {
        Ok(Ok(stream)) => stream,
        failed => {
            let reason = match failed {
                Ok(Err(error)) => format!("cannot connect to {host}:{port}: {error}"),
                Ok(Ok(_)) | Err(_) => format!("cannot connect to {host}:{port} within {} s", CONNECT_TIMEOUT.as_secs()),
            };
            shared.add_problem(reason.clone());
            return Ok(refuse(StatusCode::BAD_GATEWAY, &reason));
        }
    };
    if request.method() == Method::CONNECT {
        tokio::spawn(tunnel(request, stream, permit.clone()));
        return Ok(Response::new(Either::Right(Full::default())));
    }
    match forward(request, stream).await {
        Ok(response) => Ok(response.map(Either::Left)),
        Err(error) => Ok(refuse(StatusCode::BAD_GATEWAY, &format!("{host} failed: {error}"))),
    }
}

fn refuse(status: StatusCode, reason: &str) -> ProxyResponse {
    let mut response = Response::new(Either::Right(Full::from(format!("cfq: {reason}\n"))));
    *response.status_mut() = status;
    response
}

/// Copies bytes between a client and a registry until both have ended.
async fn tunnel(request: Request<Incoming>, mut registry: TcpStream, _permit: Arc<OwnedSemaphorePermit>) {
    let copied = match hyper::upgrade::on(request).await {
        Ok(client) => tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut registry).await,
        Err(error) => Err(io::Error::other(error)),
    };
    if let Err(error) = copied {
        tracing::debug!(%error, "a tunnel to a registry failed");
    }
}

/// Sends a request that is not encrypted.
async fn forward(mut request: Request<Incoming>, registry: TcpStream) -> hyper::Result<Response<Incoming>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(registry)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to a registry failed");
        }
    });
    let host = request.uri().authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
    let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    *request.uri_mut() = Uri::from(path);
    let headers = request.headers_mut();
    for header in [&PROXY_CONNECTION, &PROXY_AUTHORIZATION, &CONNECTION] {
        headers.remove(header);
    }
    if let Some(host) = host {
        headers.insert(HOST, host);
    }
    sender.send_request(request).await
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn registry(text: &str) -> Registry {
        Registry::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn registries_are_hosts_with_or_without_a_port() {
        let plain = registry("pypi.org");
        assert!(plain.permits("PyPI.org.", 443, 443) && plain.permits("pypi.org", 80, 80));
        for (host, port) in [("pypi.org", 22), ("pypi.org", 80), ("a.pypi.org", 443), ("pypi.org.evil", 443)] {
            assert!(!plain.permits(host, port, 443), "{host}:{port}");
        }
        let own = registry("mirror.lan:8080");
        assert!(own.permits("mirror.lan", 8080, 80) && !own.permits("mirror.lan", 80, 80));
        assert_eq!(String::from(own), "mirror.lan:8080");
        assert!(registry("[::1]:80").permits("[::1]", 80, 80));
        for text in ["", "https://pypi.org", "pypi.org/simple", "a@pypi.org", "pypi.org:x", "pypi.org:", "*", "a b"] {
            assert!(Registry::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    /// A server that replies with the first line of the request and its headers.
    fn echo_server() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten().take(3) {
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                    head.push(byte[0]);
                }
                let length = head.len();
                stream.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").as_bytes()).unwrap();
                stream.write_all(&head).unwrap();
            }
        });
        port
    }

    fn exchange(proxy: u16, request: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", proxy)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    #[test]
    fn proxy_reaches_only_the_registries() {
        let server = echo_server();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy =
            RegistryProxy::start(listener, vec![registry(&format!("127.0.0.1:{server}")), registry("127.0.0.1:1")])
                .unwrap();
        let reply = exchange(
            port,
            &format!(
                "GET http://127.0.0.1:{server}/simple/?a=b HTTP/1.1\r\nHost: other\r\nConnection: close\r\nProxy-Authorization: x\r\n\r\n"
            ),
        );
        assert!(reply.starts_with("HTTP/1.1 200 OK") && reply.contains("GET /simple/?a=b HTTP/1.1"), "{reply}");
        assert!(reply.contains(&format!("host: 127.0.0.1:{server}")), "{reply}");
        assert!(!reply.contains("other") && !reply.to_lowercase().contains("proxy-authorization"), "{reply}");
        let tunnelled = format!(
            "CONNECT 127.0.0.1:{server} HTTP/1.1\r\nHost: x\r\n\r\nGET /in HTTP/1.1\r\nhost: y\r\nconnection: close\r\n\r\n"
        );
        let reply = exchange(port, &tunnelled);
        assert!(reply.contains("GET /in HTTP/1.1"), "{reply}");
        let secret = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        for request in [
            format!("CONNECT 127.0.0.1:{secret} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
            format!("GET http://localhost:{server}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
        ] {
            let reply = exchange(port, &request);
            assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("is not in `registries`"), "{reply}");
        }
        let refused = [secret, server].map(|port| format!(":{port} is not in `registries` under [checks] in cfq.toml"));
        assert_eq!(proxy.problems(), [format!("127.0.0.1{}", refused[0]), format!("localhost{}", refused[1])]);
        let closed = "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        assert!(exchange(port, closed).starts_with("HTTP/1.1 502"));
        assert!(proxy.problems()[1].starts_with("cannot connect to 127.0.0.1:1: "), "{:?}", proxy.problems());
        let long = format!("CONNECT {}:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "a".repeat(254));
        assert!(exchange(port, &long).starts_with("HTTP/1.1 400"));
        assert_eq!(proxy.problems().len(), 3);
        let reply = exchange(port, "GET /local HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        assert!(reply.starts_with("HTTP/1.1 400"), "{reply}");
        drop(proxy);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "the proxy has ended");
    }
}
