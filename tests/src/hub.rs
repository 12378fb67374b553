//! A model hub for tests, with Hugging Face's protocol over real HTTP: repository descriptions, `resolve` with
//! redirects to a storage server of another origin, ranges, entity tags, gated repositories, error codes. It can inject
//! faults of networks and hubs.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cfq_inference_node::models::{Hub, HubConfig, HubRetryPolicy};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The token that gives access to gated repositories.
pub const TOKEN: &str = "hf_test_0123456789";

/// A fault to inject into one connection to the storage server.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Breaks the connection after this many bytes of the body.
    CutAfter(usize),
    /// Sends nothing more after this many bytes, and keeps the connection open.
    HangAfter(usize),
    /// Sends one byte at a time, with this delay between two bytes, until the client disconnects.
    Trickle(Duration),
    /// Changes the byte at this offset of the file.
    CorruptAt(usize),
    /// Sends the whole file, whatever range was requested.
    IgnoreRange,
    /// Answers with this status and no body.
    Status(u16),
}

#[derive(Debug, Clone)]
struct File {
    bytes: Bytes,
    large: bool,
    /// Size that the hub advertises instead of the file's real length.
    advertised: Option<u64>,
}

#[derive(Default)]
struct Repository {
    gated: bool,
    /// Files of each commit, by name.
    snapshots: HashMap<String, BTreeMap<String, File>>,
    /// Commit to which each branch and tag points.
    refs: HashMap<String, String>,
    /// Whether the repository's description omits sizes and checksums.
    sizes_omitted: bool,
}

/// A request that the hub or its storage server received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenRequest {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorized: bool,
}

#[derive(Default)]
struct Inner {
    repositories: HashMap<String, Repository>,
    faults: Vec<Fault>,
    /// Statuses of the next description requests, each with an optional `Retry-After`, in seconds.
    failures: Vec<(u16, Option<u64>)>,
    seen: Vec<SeenRequest>,
    bytes_sent: u64,
    storage: Option<SocketAddr>,
    /// Number of bytes after which every connection to the storage server is cut; `None`: never.
    cut_every_connection: Option<usize>,
}

/// A running hub and its storage server.
#[derive(Clone)]
pub struct HubServer {
    inner: Arc<Mutex<Inner>>,
    pub addr: SocketAddr,
}

type Shared = Arc<Mutex<Inner>>;

impl HubServer {
    pub async fn start() -> Self {
        let inner = Shared::default();
        let hub = axum::Router::new()
            .route("/api/models/{org}/{name}/revision/{revision}", get(describe))
            .route("/{org}/{name}/resolve/{revision}/{*file}", get(resolve))
            .with_state(inner.clone());
        let storage = axum::Router::new().route("/blob/{sum}", get(blob)).with_state(inner.clone());
        let addr = serve(hub).await;
        inner.lock().unwrap().storage = Some(serve(storage).await);
        Self { inner, addr }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// Hub settings for a client of this hub, with short waits.
    pub fn config(&self) -> HubConfig {
        HubConfig { endpoint: Some(format!("http://{}", self.addr)), token: None, retry: short_waits() }
    }

    /// Creates a hub client in this process, with this token if it is given.
    pub fn hub(&self, token: Option<&str>) -> Hub {
        Hub::new(&self.config(), |name| token.filter(|_| name == "HF_TOKEN").map(Into::into))
    }

    /// Adds a commit with these files and points `main` at it; returns its id. Files above 1,000 bytes are large (LFS).
    pub fn commit(&self, repo: &str, files: &[(&str, &[u8])]) -> String {
        let mut sum = Sha256::new();
        for (name, bytes) in files {
            sum.update(name);
            sum.update(bytes);
        }
        let commit = hex(&sum.finalize())[..40].to_owned();
        let file =
            |bytes: &[u8]| File { bytes: Bytes::copy_from_slice(bytes), large: bytes.len() > 1_000, advertised: None };
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), file(bytes))).collect();
        let mut inner = self.inner();
        let repository = inner.repositories.entry(repo.to_owned()).or_default();
        repository.snapshots.insert(commit.clone(), files);
        repository.refs.insert("main".to_owned(), commit.clone());
        commit
    }

    /// Points a tag at a commit.
    pub fn tag(&self, repo: &str, name: &str, commit: &str) {
        let mut inner = self.inner();
        inner.repositories.get_mut(repo).unwrap().refs.insert(name.to_owned(), commit.to_owned());
    }

    /// Restricts the repository to clients with [`TOKEN`].
    pub fn gate(&self, repo: &str) {
        self.inner().repositories.get_mut(repo).unwrap().gated = true;
    }

    /// Leaves sizes and checksums out of the repository's description.
    pub fn omit_sizes(&self, repo: &str) {
        self.inner().repositories.get_mut(repo).unwrap().sizes_omitted = true;
    }

    /// Queues faults for the next connections to the storage server, one for each connection.
    pub fn inject_faults(&self, faults: &[Fault]) {
        self.inner().faults.extend_from_slice(faults);
    }

    /// Cuts every storage connection after this many bytes, until reset with `None`.
    pub fn cut_every_connection_after(&self, bytes: Option<usize>) {
        self.inner().cut_every_connection = bytes;
    }

    /// Queues error statuses for the next description requests, each with an optional `Retry-After`, in seconds.
    pub fn fail_descriptions(&self, statuses: &[(u16, Option<u64>)]) {
        self.inner().failures.extend_from_slice(statuses);
    }

    /// Replaces a file's bytes under the same commit, as a compromised hub or a stale mirror would.
    pub fn replace_bytes(&self, repo: &str, commit: &str, name: &str, bytes: &[u8]) {
        let mut inner = self.inner();
        let files = inner.repositories.get_mut(repo).unwrap().snapshots.get_mut(commit).unwrap();
        files.get_mut(name).unwrap().bytes = Bytes::copy_from_slice(bytes);
    }

    /// Makes the hub advertise this size for a file, instead of its real length.
    pub fn advertise_size(&self, repo: &str, commit: &str, name: &str, size: u64) {
        let mut inner = self.inner();
        let files = inner.repositories.get_mut(repo).unwrap().snapshots.get_mut(commit).unwrap();
        files.get_mut(name).unwrap().advertised = Some(size);
    }

    /// All requests received so far, in order.
    pub fn requests(&self) -> Vec<SeenRequest> {
        self.inner().seen.clone()
    }

    /// `Range` headers of the requests to the storage server, in order; `None` for a request for the whole file.
    pub fn ranges(&self) -> Vec<Option<String>> {
        self.requests().into_iter().filter(|s| s.path.starts_with("/blob/")).map(|s| s.range).collect()
    }

    /// Number of file bytes that the storage server has sent so far.
    pub fn bytes_sent(&self) -> u64 {
        self.inner().bytes_sent
    }
}

/// Retry policy with short waits: a connection counts as stalled after half a second, and retries are immediate.
pub fn short_waits() -> HubRetryPolicy {
    HubRetryPolicy {
        stall_timeout_ms: 500,
        stall_bytes: 100,
        max_attempts: 3,
        initial_backoff_ms: 1,
        max_backoff_ms: 2_000,
        ..HubRetryPolicy::default()
    }
}

async fn serve(app: axum::Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

impl File {
    fn size(&self) -> u64 {
        self.advertised.unwrap_or(self.bytes.len() as u64)
    }

    fn sha256(&self) -> String {
        hex(&Sha256::digest(&self.bytes))
    }

    /// Git blob id of the file or, for a large file, of its LFS pointer.
    fn blob_id(&self) -> String {
        let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\n", self.sha256());
        let content = if self.large { pointer.as_bytes() } else { &self.bytes[..] };
        git2::Oid::hash_object(git2::ObjectType::Blob, content).unwrap().to_string()
    }
}

/// Records a request; returns whether it carries [`TOKEN`].
fn record(inner: &mut Inner, method: &Method, path: &str, headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|v: &header::HeaderValue| v.to_str().unwrap().to_owned());
    let token = text(header::AUTHORIZATION);
    let range = text(header::RANGE);
    let authorized = token.is_some();
    inner.seen.push(SeenRequest { method: method.to_string(), path: path.to_owned(), range, authorized });
    token.as_deref() == Some(&format!("Bearer {TOKEN}"))
}

fn refused(status: u16, code: &str, message: &str) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    let headers = [("x-error-code", code.to_owned()), ("x-error-message", message.to_owned())];
    (status, headers, axum::Json(json!({ "error": message }))).into_response()
}

async fn describe(
    State(inner): State<Shared>,
    Path((org, name, revision)): Path<(String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let mut inner = inner.lock().unwrap();
    let repo = format!("{org}/{name}");
    let trusted = record(&mut inner, &method, &format!("/api/models/{repo}/revision/{revision}"), &headers);
    if !inner.failures.is_empty() {
        let (status, after) = inner.failures.remove(0);
        let mut response = StatusCode::from_u16(status).unwrap().into_response();
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after.into());
        }
        return response;
    }
    let Some(repository) = inner.repositories.get(&repo) else {
        // As on Hugging Face, a client without authorization gets the same answer for a missing repository as for a
        // private one.
        return refused(if trusted { 404 } else { 401 }, "RepoNotFound", "Repository not found");
    };
    let commit = repository.refs.get(&revision).cloned().unwrap_or(revision);
    let Some(files) = repository.snapshots.get(&commit) else {
        return refused(404, "RevisionNotFound", "Invalid rev id");
    };
    let sibling = |(name, file): (&String, &File)| -> Value {
        if repository.sizes_omitted {
            return json!({ "rfilename": name });
        }
        let mut sibling = json!({ "rfilename": name, "size": file.size(), "blobId": file.blob_id() });
        if file.large {
            sibling["lfs"] = json!({ "sha256": file.sha256(), "size": file.size(), "pointerSize": 130 });
        }
        sibling
    };
    let siblings: Vec<Value> = files.iter().map(sibling).collect();
    axum::Json(json!({ "id": repo, "sha": commit, "gated": repository.gated, "siblings": siblings })).into_response()
}

async fn resolve(
    State(inner): State<Shared>,
    Path((org, name, revision, path)): Path<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let mut inner = inner.lock().unwrap();
    let repo = format!("{org}/{name}");
    let trusted = record(&mut inner, &method, &format!("/{repo}/resolve/{revision}/{path}"), &headers);
    let storage = inner.storage.unwrap();
    let Some(repository) = inner.repositories.get(&repo) else {
        return refused(401, "RepoNotFound", "Repository not found");
    };
    if repository.gated && !trusted {
        // The answer is the same without a token and with a wrong token.
        return refused(401, "GatedRepo", "Access to this model is restricted.");
    }
    let commit = repository.refs.get(&revision).cloned().unwrap_or(revision);
    let Some(files) = repository.snapshots.get(&commit) else {
        return refused(404, "RevisionNotFound", "Invalid rev id");
    };
    let Some(file) = files.get(&path).cloned() else {
        return refused(404, "EntryNotFound", "Entry not found");
    };
    let tag = if file.large { file.sha256() } else { file.blob_id() };
    if !file.large {
        let headers = [("x-repo-commit", commit), ("etag", format!("\"{tag}\""))];
        let length = (header::CONTENT_LENGTH, file.bytes.len().to_string());
        return (headers, [length], if method == Method::HEAD { Bytes::new() } else { file.bytes }).into_response();
    }
    let headers = [
        ("x-repo-commit", commit),
        ("x-linked-etag", format!("\"{tag}\"")),
        ("x-linked-size", file.size().to_string()),
        ("accept-ranges", "bytes".to_owned()),
        ("location", format!("http://{storage}/blob/{tag}?X-Amz-Signature=secret")),
    ];
    (StatusCode::FOUND, headers).into_response()
}

async fn blob(State(inner): State<Shared>, Path(sum): Path<String>, method: Method, headers: HeaderMap) -> Response {
    let (bytes, fault) = {
        let mut locked = inner.lock().unwrap();
        record(&mut locked, &method, &format!("/blob/{sum}"), &headers);
        let files = locked.repositories.values().flat_map(|r| r.snapshots.values()).flat_map(BTreeMap::values);
        let Some(bytes) = files.filter(|f| f.large).find(|f| f.sha256() == sum).map(|f| f.bytes.clone()) else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let next = (!locked.faults.is_empty()).then(|| locked.faults.remove(0));
        (bytes, next.or(locked.cut_every_connection.map(Fault::CutAfter)))
    };
    if let Some(Fault::Status(status)) = fault {
        return StatusCode::from_u16(status).unwrap().into_response();
    }
    let total = bytes.len();
    let asked = headers.get(header::RANGE).and_then(|r| r.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-'));
    let from: Option<usize> = asked.and_then(|from| from.parse().ok());
    let from = from.filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
    if from.is_some_and(|from| from >= total) {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let mut rest = bytes.slice(from.unwrap_or(0)..);
    if let Some(Fault::CorruptAt(at)) = fault
        && let Some(at) = at.checked_sub(from.unwrap_or(0))
    {
        let mut changed = rest.to_vec();
        changed[at] ^= 0xff;
        rest = changed.into();
    }
    let mut response = Response::builder().header(header::ETAG, format!("\"{sum}\"")).header("accept-ranges", "bytes");
    response = response.header(header::CONTENT_LENGTH, rest.len());
    if let Some(from) = from {
        let range = format!("bytes {from}-{}/{total}", total - 1);
        response = response.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
    }
    response.body(body(inner, rest, fault)).unwrap()
}

/// Returns the response body as a stream of 16 KiB chunks, with the fault applied.
fn body(inner: Shared, rest: Bytes, fault: Option<Fault>) -> Body {
    let limit = match fault {
        Some(Fault::CutAfter(bytes) | Fault::HangAfter(bytes)) => bytes.min(rest.len()),
        _ => rest.len(),
    };
    let (chunk, delay) = match fault {
        Some(Fault::Trickle(delay)) => (1, delay),
        _ => (16 << 10, Duration::ZERO),
    };
    let ends = limit == rest.len();
    let hangs = matches!(fault, Some(Fault::HangAfter(_)));
    let stream = futures::stream::unfold(0, move |at| {
        let (inner, rest) = (inner.clone(), rest.clone());
        async move {
            if at >= limit {
                if ends || at == usize::MAX {
                    return None;
                }
                if hangs {
                    std::future::pending::<()>().await;
                }
                // Waits so that the bytes sent so far arrive before the connection breaks.
                tokio::time::sleep(Duration::from_millis(30)).await;
                return Some((Err(std::io::Error::other("cut")), usize::MAX));
            }
            tokio::time::sleep(delay).await;
            let end = (at + chunk).min(limit);
            inner.lock().unwrap().bytes_sent += (end - at) as u64;
            Some((Ok(rest.slice(at..end)), end))
        }
    });
    Body::from_stream(stream)
}
