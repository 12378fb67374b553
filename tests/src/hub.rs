//! A model hub for tests, with Hugging Face's protocol over real HTTP: repository descriptions, `resolve` with
//! redirects to a storage server of another origin, ranges, entity tags, gated repositories, error codes. It can inject
//! faults of networks and hubs.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::Bytes;
use axum::routing::get;
use cfq_inference_node::models::{Hub, HubConfig, HubRetryPolicy};
use sha2::{Digest, Sha256};

use protocol::{blob, describe, resolve};

mod protocol;

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
    /// Error statuses for the next requests for a repository's description, each with an optional `Retry-After`, in
    /// seconds.
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

    /// Queues error statuses for the next requests for a repository's description, each with an optional `Retry-After`,
    /// in seconds.
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
