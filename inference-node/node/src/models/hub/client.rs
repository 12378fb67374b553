//! The requests to a hub, their redirects, and the meaning of each error response.
//!
//! - `GET /api/models/{repo}/revision/{rev}?blobs=true`: the commit to which a revision resolves, and the size and
//!   checksum of each file (`lfs.sha256`, else `blobId`).
//! - `HEAD` and `GET /{repo}/resolve/{commit}/{file}`: the file, usually by a redirect to signed storage elsewhere. The
//!   hub's own response before the redirect has its checksum (`X-Linked-ETag`, else `ETag`) and size (`X-Linked-Size`).
//!
//! Redirects are followed here and not by the HTTP client, because the token is sent to the hub's own origin only, and
//! the headers of the responses before a redirect are needed. The HTTP status alone is ambiguous (a gated repository
//! answers 401 without a token and with a wrong one, and so does a missing repository), so `X-Error-Code` decides if it
//! is present.

use std::collections::BTreeMap;
use std::time::Duration;

use cfq_link::outbound;
use cfq_proto::model::is_relative_path;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_LENGTH, ETAG, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Method, Response, StatusCode, Url};
use serde::Deserialize;

use super::access::{Hub, HubRetryPolicy, HubToken, is_loopback};
use super::error::HubError;
use crate::models::checksum::Checksum;

/// Maximum number of redirects of one request.
const MAX_REDIRECTS: usize = 8;
/// Maximum size of a repository's description, in bytes; the largest known repositories have some ten thousand files.
const MAX_REPO_LISTING_BYTES: u64 = 32 << 20;
/// Maximum length of an error reason quoted from the hub, in characters.
const MAX_REASON_CHARS: usize = 300;

/// A failed request.
#[derive(Debug)]
pub(super) enum HubFailure {
    /// A retry may succeed. `wait` is the minimum wait that the hub demands, if any.
    Retryable { error: HubError, wait: Option<Duration> },
    /// A retry cannot succeed.
    Permanent(HubError),
}

impl HubFailure {
    pub(super) fn retryable(error: HubError) -> Self {
        Self::Retryable { error, wait: None }
    }
}

/// Size and checksum of a file; `None` if the hub does not provide them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct FileInfo {
    pub size: Option<u64>,
    pub checksum: Option<Checksum>,
}

/// A resolved revision.
#[derive(Debug)]
pub(super) struct Revision {
    pub commit: String,
    pub files: BTreeMap<String, FileInfo>,
}

/// The repository, revision and file of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTarget<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
    pub file: Option<&'a str>,
}

/// The last response of a chain of redirects.
pub(super) struct HubResponse {
    pub response: Response,
    /// Whether the response is from the hub itself and not from its storage.
    pub from_hub: bool,
    /// Size and checksum from the hub's headers.
    pub info: FileInfo,
}

/// Client of one hub.
pub(super) struct HubClient {
    http: reqwest::Client,
    pub(super) endpoint: Url,
    token: Option<HubToken>,
    pub(super) retry: HubRetryPolicy,
}

impl HubClient {
    pub fn new(hub: &Hub) -> Result<Self, HubError> {
        let endpoint = hub.endpoint()?;
        let (secure, loopback) = (endpoint.scheme() == "https", is_loopback(&endpoint));
        let http = outbound::hub_client(secure, loopback, hub.retry.connect_timeout()).map_err(HubError::HttpClient)?;
        let mut token = hub.token()?;
        if token.is_some() && !secure && !loopback {
            tracing::warn!(%endpoint, "hub address is not https, the token is not sent");
            token = None;
        }
        Ok(Self { http, endpoint, token, retry: hub.retry })
    }

    fn url(&self, segments: impl IntoIterator<Item = impl AsRef<str>>) -> Url {
        let mut url = self.endpoint.clone();
        // Every http URL has path segments; only URLs like `mailto:` have none.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    /// The web page of a repository.
    pub fn page(&self, repo: &str) -> String {
        self.url(repo.split('/')).to_string()
    }

    fn resolve(&self, target: RequestTarget<'_>) -> Url {
        let file = target.file.unwrap_or_default();
        self.url(target.repo.split('/').chain(["resolve", target.revision]).chain(file.split('/')))
    }

    /// Requests the description of a repository, without retries.
    pub async fn describe(&self, target: RequestTarget<'_>) -> Result<Revision, HubFailure> {
        let mut url = self.url(["api", "models"].into_iter().chain(target.repo.split('/')));
        if let Ok(mut path) = url.path_segments_mut() {
            path.extend(["revision", target.revision]);
        }
        url.set_query(Some("blobs=true"));
        let answer = self.request(Method::GET, url, None).await?;
        if !answer.response.status().is_success() {
            return Err(self.failure(&answer, target));
        }
        let bytes = self.body(answer.response, MAX_REPO_LISTING_BYTES).await?;
        let unexpected = |reason: String| {
            HubFailure::Permanent(HubError::UnexpectedResponse { what: target.repo.to_owned(), reason })
        };
        let raw: RawDescription = serde_json::from_slice(&bytes).map_err(|error| unexpected(error.to_string()))?;
        // The commit becomes a folder name.
        let valid = (7..=64).contains(&raw.sha.len()) && raw.sha.bytes().all(|b| b.is_ascii_hexdigit());
        if !valid {
            return Err(unexpected(format!("invalid commit {:?}", raw.sha)));
        }
        let files = raw.siblings.into_iter().filter(|s| is_relative_path(&s.rfilename));
        Ok(Revision { commit: raw.sha, files: files.map(|s| (s.rfilename.clone(), s.info())).collect() })
    }

    /// Requests size and checksum of a file, without retries; for hubs whose repository description omits them.
    pub async fn file_info(&self, target: RequestTarget<'_>) -> Result<FileInfo, HubFailure> {
        let answer = self.request(Method::HEAD, self.resolve(target), None).await?;
        if answer.response.status().is_success() || is_redirect(answer.response.status()) {
            Ok(answer.info)
        } else {
            Err(self.failure(&answer, target))
        }
    }

    /// Requests a file from byte offset `from` to its end, without retries. The response status is 200, 206 or 416.
    pub async fn open(&self, target: RequestTarget<'_>, from: u64) -> Result<HubResponse, HubFailure> {
        let answer = self.request(Method::GET, self.resolve(target), (from > 0).then_some(from)).await?;
        match answer.response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => Ok(answer),
            _ => Err(self.failure(&answer, target)),
        }
    }

    async fn request(&self, method: Method, mut url: Url, from: Option<u64>) -> Result<HubResponse, HubFailure> {
        let mut info = FileInfo::default();
        for _ in 0..MAX_REDIRECTS {
            let from_hub = url.origin() == self.endpoint.origin();
            // Compression is disabled, because sizes and ranges would not match compressed data.
            let mut request = self.http.request(method.clone(), url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| from_hub) {
                request = request.bearer_auth(token.secret.reveal());
            }
            if let Some(from) = from {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let response = match tokio::time::timeout(self.retry.stall_timeout(), request.send()).await {
                Ok(sent) => sent.map_err(|source| HubFailure::retryable(self.unreachable(source)))?,
                Err(_) => {
                    let (have, size) = (from.unwrap_or(0), info.size.unwrap_or(0));
                    return Err(HubFailure::retryable(HubError::Stalled {
                        duration: self.retry.stall_timeout(),
                        have,
                        size,
                    }));
                }
            };
            if from_hub {
                let headers = response.headers();
                info = FileInfo {
                    checksum: checksum(headers).or(info.checksum),
                    size: size(headers, response.status()).or(info.size),
                };
            }
            let next = Some(&response)
                .filter(|r| is_redirect(r.status()))
                .and_then(|r| r.headers().get(LOCATION)?.to_str().ok())
                .and_then(|location| url.join(location).ok());
            match next {
                // The headers about the file come from the hub, so HEAD need not follow the redirect to the storage.
                Some(next) if method != Method::HEAD || next.origin() == self.endpoint.origin() => url = next,
                _ => return Ok(HubResponse { response, from_hub, info }),
            }
        }
        let reason = format!("it redirected more than {MAX_REDIRECTS} times");
        Err(HubFailure::Permanent(HubError::UnexpectedResponse { what: self.endpoint.to_string(), reason }))
    }

    pub(super) fn unreachable(&self, source: reqwest::Error) -> HubError {
        HubError::Unreachable { endpoint: self.endpoint.to_string(), source: source.without_url() }
    }

    async fn body(&self, mut response: Response, limit: u64) -> Result<Vec<u8>, HubFailure> {
        let mut bytes = Vec::new();
        loop {
            let duration = self.retry.stall_timeout();
            let chunk = match tokio::time::timeout(duration, response.chunk()).await {
                Ok(chunk) => chunk.map_err(|source| HubFailure::retryable(self.unreachable(source)))?,
                Err(_) => {
                    return Err(HubFailure::retryable(HubError::Stalled {
                        duration,
                        have: bytes.len() as u64,
                        size: 0,
                    }));
                }
            };
            match chunk {
                None => return Ok(bytes),
                Some(chunk) if (bytes.len() + chunk.len()) as u64 <= limit => bytes.extend_from_slice(&chunk),
                Some(_) => {
                    let reason = format!("it is longer than {limit} bytes");
                    let what = self.endpoint.to_string();
                    return Err(HubFailure::Permanent(HubError::UnexpectedResponse { what, reason }));
                }
            }
        }
    }

    /// Converts an error response into a failure.
    fn failure(&self, answer: &HubResponse, target: RequestTarget<'_>) -> HubFailure {
        let (status, headers) = (answer.response.status(), answer.response.headers());
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let (code, message) = (text("x-error-code"), text("x-error-message"));
        let repo = target.repo.to_owned();
        let with_token = self.token.is_some();
        let what = target.file.map_or_else(|| repo.clone(), |file| format!("{file} of {repo}"));
        let unexpected = HubError::UnexpectedStatus { status: status.as_u16(), what };
        if !answer.from_hub {
            // Signed URLs expire: the hub creates a new one for the next attempt.
            return HubFailure::retryable(unexpected);
        }
        match (status.as_u16(), code) {
            (_, "GatedRepo") => HubFailure::Permanent(HubError::Gated { page: self.page(&repo), repo, with_token }),
            (_, "RevisionNotFound") => {
                HubFailure::Permanent(HubError::RevisionNotFound { repo, revision: target.revision.to_owned() })
            }
            (_, "EntryNotFound") => {
                let file = target.file.unwrap_or_default().to_owned();
                HubFailure::Permanent(HubError::FileNotFound { repo, file, choices: Vec::new() })
            }
            (401, _)
                if let Some(token) = &self.token
                    && code != "RepoNotFound" =>
            {
                let page = self.url(["settings", "tokens"]).to_string();
                HubFailure::Permanent(HubError::TokenRejected { from: token.from.clone(), page })
            }
            (401, _) | (404, "" | "RepoNotFound") | (_, "RepoNotFound") => {
                HubFailure::Permanent(HubError::RepositoryNotFound {
                    endpoint: self.endpoint.to_string(),
                    repo,
                    with_token,
                })
            }
            (403, _) => {
                let reason = if message.is_empty() { "without a reason" } else { message };
                let reason = reason.chars().take(MAX_REASON_CHARS).collect();
                HubFailure::Permanent(HubError::Forbidden { repo, reason })
            }
            (429, _) => {
                let wait = retry_after(headers);
                let error = HubError::RateLimited { wait, with_token };
                match wait {
                    Some(wait) if wait > self.retry.max_backoff() => HubFailure::Permanent(error),
                    wait => HubFailure::Retryable { error, wait },
                }
            }
            (408 | 500..=599, _) => HubFailure::Retryable { error: unexpected, wait: retry_after(headers) },
            _ => HubFailure::Permanent(unexpected),
        }
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn checksum(headers: &HeaderMap) -> Option<Checksum> {
    let tag = headers.get("x-linked-etag").or_else(|| headers.get(ETAG))?;
    Checksum::from_etag(tag.to_str().ok()?)
}

/// Size of the whole file. `Content-Length` is used only for status 200: with a redirect or a partial response, it is
/// only the length of that response.
fn size(headers: &HeaderMap, status: StatusCode) -> Option<u64> {
    let own = headers.get(CONTENT_LENGTH).filter(|_| status == StatusCode::OK);
    headers.get("x-linked-size").or(own)?.to_str().ok()?.parse().ok()
}

/// The wait that the hub demands: from `Retry-After: 55`, or from the draft standard's `RateLimit: "api";r=0;t=55`.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let plain = headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok()).and_then(|v| v.trim().parse().ok());
    let limit = || text("ratelimit")?.split(';').find_map(|part| part.trim().strip_prefix("t=")?.parse().ok());
    plain.or_else(limit).map(Duration::from_secs)
}

#[derive(Deserialize)]
struct RawDescription {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Sibling {
    fn info(self) -> FileInfo {
        match self.lfs {
            // The blob id of an LFS file is that of its pointer file, so it is not used.
            Some(lfs) => {
                FileInfo { size: lfs.size.or(self.size), checksum: lfs.sha256.as_deref().and_then(Checksum::sha256) }
            }
            None => FileInfo { size: self.size, checksum: self.blob_id.as_deref().and_then(Checksum::git_blob) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::hub::access::HubConfig;

    #[test]
    fn names_are_escaped_in_the_url() {
        let config = HubConfig { endpoint: Some("http://127.0.0.1:1/mirror/".into()), ..HubConfig::default() };
        let client = HubClient::new(&Hub::new(&config, |_| None)).unwrap();
        let target = RequestTarget { repo: "o/r", revision: "refs/pr/1", file: Some("a b/c?d#e%2f.gguf") };
        assert_eq!(
            client.resolve(target).as_str(),
            "http://127.0.0.1:1/mirror/o/r/resolve/refs%2Fpr%2F1/a%20b/c%3Fd%23e%252f.gguf"
        );
    }

    #[test]
    fn retry_after_is_parsed_in_both_forms() {
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())])
        };
        assert_eq!(retry_after(&headers("retry-after", "7")), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(&headers("ratelimit", "\"api\";r=0;t=55")), Some(Duration::from_secs(55)));
        assert_eq!(retry_after(&headers("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")), None);
    }
}
