//! A model hub on this machine that speaks Hugging Face's protocol over real HTTP: descriptions of repositories, `resolve`
//! with redirects to storage under another origin, ranges, entity tags, gates, error codes; and it can behave as badly as
//! networks and hubs do.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cfq_inference_node::models::{Hub, HubConfig, Patience};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The token that opens gates here.
pub const TOKEN: &str = "hf_test_0123456789";

/// What the storage does with the next connection that asks for a file's bytes.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The connection breaks after so many bytes of this answer.
    CutAfter(usize),
    /// After so many bytes nothing more comes, and the connection stays.
    HangAfter(usize),
    /// One byte at a time with this wait between two, until the client goes.
    Trickle(Duration),
    /// A byte that is not the file's, at this place in the file.
    WrongAt(usize),
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    Status(u16),
}

#[derive(Debug, Clone)]
struct File {
    bytes: Bytes,
    large: bool,
    /// Instead of its length, where the hub speaks of it.
    claimed: Option<u64>,
}

#[derive(Default)]
struct Repository {
    gated: bool,
    /// By commit.
    snapshots: HashMap<String, BTreeMap<String, File>>,
    /// Branches and tags.
    refs: HashMap<String, String>,
    /// The description says neither size nor checksum.
    terse: bool,
}

/// A request as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorized: bool,
}

#[derive(Default)]
struct Inner {
    repositories: HashMap<String, Repository>,
    faults: Vec<Fault>,
    /// Statuses for the next descriptions asked for, with a `Retry-After`.
    refusals: Vec<(u16, Option<u64>)>,
    seen: Vec<Seen>,
    bytes_sent: u64,
    storage: Option<SocketAddr>,
    /// Every connection to the storage is cut after so many bytes.
    always_cut: Option<usize>,
}

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

    pub fn config(&self) -> HubConfig {
        HubConfig { endpoint: Some(format!("http://{}", self.addr)), token: None, patience: quick() }
    }

    /// For code in this process; with a token if one is given.
    pub fn hub(&self, token: Option<&str>) -> Hub {
        Hub::new(&self.config(), |name| token.filter(|_| name == "HF_TOKEN").map(Into::into))
    }

    /// A commit of a repository, with all its files; `main` stands for it from now on. Files above 1,000 bytes are large.
    pub fn commit(&self, repo: &str, files: &[(&str, &[u8])]) -> String {
        let mut sum = Sha256::new();
        for (name, bytes) in files {
            sum.update(name);
            sum.update(bytes);
        }
        let commit = hex(&sum.finalize())[..40].to_owned();
        let file =
            |bytes: &[u8]| File { bytes: Bytes::copy_from_slice(bytes), large: bytes.len() > 1_000, claimed: None };
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), file(bytes))).collect();
        let mut inner = self.inner();
        let repository = inner.repositories.entry(repo.to_owned()).or_default();
        repository.snapshots.insert(commit.clone(), files);
        repository.refs.insert("main".to_owned(), commit.clone());
        commit
    }

    pub fn tag(&self, repo: &str, name: &str, commit: &str) {
        let mut inner = self.inner();
        inner.repositories.get_mut(repo).unwrap().refs.insert(name.to_owned(), commit.to_owned());
    }

    pub fn gate(&self, repo: &str) {
        self.inner().repositories.get_mut(repo).unwrap().gated = true;
    }

    pub fn be_terse(&self, repo: &str) {
        self.inner().repositories.get_mut(repo).unwrap().terse = true;
    }

    /// The next connections to the storage, each with its fault.
    pub fn misbehave(&self, faults: &[Fault]) {
        self.inner().faults.extend_from_slice(faults);
    }

    pub fn always_cut_after(&self, bytes: Option<usize>) {
        self.inner().always_cut = bytes;
    }

    pub fn refuse_descriptions(&self, statuses: &[(u16, Option<u64>)]) {
        self.inner().refusals.extend_from_slice(statuses);
    }

    /// What a hub that was attacked, or a mirror that is stale, would serve: other bytes under the same commit.
    pub fn swap(&self, repo: &str, commit: &str, name: &str, bytes: &[u8]) {
        let mut inner = self.inner();
        let files = inner.repositories.get_mut(repo).unwrap().snapshots.get_mut(commit).unwrap();
        files.get_mut(name).unwrap().bytes = Bytes::copy_from_slice(bytes);
    }

    /// Lets a file seem this large.
    pub fn claim(&self, repo: &str, commit: &str, name: &str, size: u64) {
        let mut inner = self.inner();
        let files = inner.repositories.get_mut(repo).unwrap().snapshots.get_mut(commit).unwrap();
        files.get_mut(name).unwrap().claimed = Some(size);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.inner().seen.clone()
    }

    /// Ranges asked of the storage, in order; `None` is a whole file.
    pub fn ranges(&self) -> Vec<Option<String>> {
        self.seen().into_iter().filter(|s| s.path.starts_with("/blob/")).map(|s| s.range).collect()
    }

    pub fn bytes_sent(&self) -> u64 {
        self.inner().bytes_sent
    }
}

/// Waits for tests: a connection is stalled after half a second, retries come at once.
pub fn quick() -> Patience {
    Patience {
        stall_ms: 500,
        stall_bytes: 100,
        tries: 3,
        first_wait_ms: 1,
        longest_wait_ms: 2_000,
        ..Patience::default()
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
        self.claimed.unwrap_or(self.bytes.len() as u64)
    }

    fn sha256(&self) -> String {
        hex(&Sha256::digest(&self.bytes))
    }

    /// As git would: the id of the blob, or of the pointer that stands for a large file.
    fn blob_id(&self) -> String {
        let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\n", self.sha256());
        let content = if self.large { pointer.as_bytes() } else { &self.bytes[..] };
        git2::Oid::hash_object(git2::ObjectType::Blob, content).unwrap().to_string()
    }
}

fn note(inner: &mut Inner, method: &Method, path: &str, headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|v: &header::HeaderValue| v.to_str().unwrap().to_owned());
    let token = text(header::AUTHORIZATION);
    let range = text(header::RANGE);
    let authorized = token.is_some();
    inner.seen.push(Seen { method: method.to_string(), path: path.to_owned(), range, authorized });
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
    let trusted = note(&mut inner, &method, &format!("/api/models/{repo}/revision/{revision}"), &headers);
    if !inner.refusals.is_empty() {
        let (status, after) = inner.refusals.remove(0);
        let mut response = StatusCode::from_u16(status).unwrap().into_response();
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after.into());
        }
        return response;
    }
    let Some(repository) = inner.repositories.get(&repo) else {
        // Who may not know whether something is there is told what the absence is told.
        return refused(if trusted { 404 } else { 401 }, "RepoNotFound", "Repository not found");
    };
    let commit = repository.refs.get(&revision).cloned().unwrap_or(revision);
    let Some(files) = repository.snapshots.get(&commit) else {
        return refused(404, "RevisionNotFound", "Invalid rev id");
    };
    let sibling = |(name, file): (&String, &File)| -> Value {
        if repository.terse {
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
    let trusted = note(&mut inner, &method, &format!("/{repo}/resolve/{revision}/{path}"), &headers);
    let storage = inner.storage.unwrap();
    let Some(repository) = inner.repositories.get(&repo) else {
        return refused(401, "RepoNotFound", "Repository not found");
    };
    if repository.gated && !trusted {
        // The same to nobody and to a wrong token.
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
        note(&mut locked, &method, &format!("/blob/{sum}"), &headers);
        let files = locked.repositories.values().flat_map(|r| r.snapshots.values()).flat_map(BTreeMap::values);
        let Some(bytes) = files.filter(|f| f.large).find(|f| f.sha256() == sum).map(|f| f.bytes.clone()) else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let next = (!locked.faults.is_empty()).then(|| locked.faults.remove(0));
        (bytes, next.or(locked.always_cut.map(Fault::CutAfter)))
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
    if let Some(Fault::WrongAt(at)) = fault
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

/// In pieces, as networks bring them.
fn body(inner: Shared, rest: Bytes, fault: Option<Fault>) -> Body {
    let limit = match fault {
        Some(Fault::CutAfter(bytes) | Fault::HangAfter(bytes)) => bytes.min(rest.len()),
        _ => rest.len(),
    };
    let (piece, wait) = match fault {
        Some(Fault::Trickle(wait)) => (1, wait),
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
                // What was sent is on its way before the connection breaks.
                tokio::time::sleep(Duration::from_millis(30)).await;
                return Some((Err(std::io::Error::other("cut")), usize::MAX));
            }
            tokio::time::sleep(wait).await;
            let end = (at + piece).min(limit);
            inner.lock().unwrap().bytes_sent += (end - at) as u64;
            Some((Ok(rest.slice(at..end)), end))
        }
    });
    Body::from_stream(stream)
}
