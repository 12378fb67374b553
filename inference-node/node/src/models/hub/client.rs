//! Speaking with a hub: three kinds of request, redirects by hand, and what each refusal means.
//!
//! - `GET /api/models/{repo}/revision/{rev}?blobs=true`: the commit that a revision stands for, and of each file its size
//!   and checksum (`lfs.sha256`, else `blobId`).
//! - `HEAD` and `GET /{repo}/resolve/{commit}/{file}`: the file, mostly by a redirect to signed storage elsewhere; the hub's
//!   own answer on the way names its checksum (`X-Linked-ETag`, else `ETag`) and size (`X-Linked-Size`).
//!
//! Redirects are followed here and not by the HTTP client, since the token goes to the hub's own origin only, and the
//! headers of the answers on the way are wanted. The status alone tells little (a gated repository answers 401 to nobody
//! and to a wrong token alike, an absent one too), so `X-Error-Code` decides where it is given.

use std::collections::BTreeMap;
use std::time::Duration;

use cfq_link::outbound;
use cfq_proto::model::is_relative_path;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_LENGTH, ETAG, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Method, Response, StatusCode, Url};
use serde::Deserialize;

use super::access::{Hub, Patience, Token, is_here};
use super::checksum::Checksum;
use super::error::HubError;

const REDIRECTS: usize = 8;
/// A repository's description; the largest known have some ten thousand files.
const DESCRIPTION: u64 = 32 << 20;

/// A request that came to nothing.
#[derive(Debug)]
pub(super) enum Trouble {
    /// May help: trying again, not before `wait` if the hub said so.
    Again {
        cause: HubError,
        wait: Option<Duration>,
    },
    Final(HubError),
}

impl Trouble {
    pub(super) fn again(cause: HubError) -> Self {
        Self::Again { cause, wait: None }
    }
}

/// A file as the hub describes it, as far as it does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Described {
    pub size: Option<u64>,
    pub checksum: Option<Checksum>,
}

/// What a revision stood for when it was asked.
#[derive(Debug)]
pub(super) struct Revision {
    pub commit: String,
    pub files: BTreeMap<String, Described>,
}

/// What a request is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
    pub file: Option<&'a str>,
}

/// The last answer of a chain of redirects.
pub(super) struct Answer {
    pub response: Response,
    /// From the hub itself, not from its storage.
    pub from_hub: bool,
    /// What the hub said about the file on the way.
    pub said: Described,
}

pub(super) struct Client {
    http: reqwest::Client,
    pub(super) endpoint: Url,
    token: Option<Token>,
    pub(super) patience: Patience,
}

impl Client {
    pub fn new(hub: &Hub) -> Result<Self, HubError> {
        let endpoint = hub.endpoint()?;
        let (secure, here) = (endpoint.scheme() == "https", is_here(&endpoint));
        let http = outbound::hub_client(secure, here, hub.patience.connect()).map_err(HubError::Client)?;
        let mut token = hub.token()?;
        if token.is_some() && !secure && !here {
            tracing::warn!(%endpoint, "the hub's address is not https: the token is not sent");
            token = None;
        }
        Ok(Self { http, endpoint, token, patience: hub.patience })
    }

    fn url(&self, segments: impl IntoIterator<Item = impl AsRef<str>>) -> Url {
        let mut url = self.endpoint.clone();
        // An http address has segments: only `mailto:` and the like have none.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    pub fn page(&self, repo: &str) -> String {
        self.url(repo.split('/')).to_string()
    }

    fn resolve(&self, subject: Subject<'_>) -> Url {
        let file = subject.file.unwrap_or_default();
        self.url(subject.repo.split('/').chain(["resolve", subject.revision]).chain(file.split('/')))
    }

    /// One try at the repository's description.
    pub async fn describe(&self, subject: Subject<'_>) -> Result<Revision, Trouble> {
        let mut url = self.url(["api", "models"].into_iter().chain(subject.repo.split('/')));
        if let Ok(mut path) = url.path_segments_mut() {
            path.extend(["revision", subject.revision]);
        }
        url.set_query(Some("blobs=true"));
        let answer = self.ask(Method::GET, url, None).await?;
        if !answer.response.status().is_success() {
            return Err(self.refusal(&answer, subject));
        }
        let bytes = self.body(answer.response, DESCRIPTION).await?;
        let strange = |why: String| Trouble::Final(HubError::Strange { what: subject.repo.to_owned(), why });
        let raw: Raw = serde_json::from_slice(&bytes).map_err(|error| strange(error.to_string()))?;
        // It becomes a folder's name.
        let fits = (7..=64).contains(&raw.sha.len()) && raw.sha.bytes().all(|b| b.is_ascii_hexdigit());
        if !fits {
            return Err(strange(format!("{:?} is no commit", raw.sha)));
        }
        let files = raw.siblings.into_iter().filter(|s| is_relative_path(&s.rfilename));
        Ok(Revision { commit: raw.sha, files: files.map(|s| (s.rfilename.clone(), s.described())).collect() })
    }

    /// One try at a file's size and checksum, for hubs whose description leaves them out.
    pub async fn look(&self, subject: Subject<'_>) -> Result<Described, Trouble> {
        let answer = self.ask(Method::HEAD, self.resolve(subject), None).await?;
        if answer.response.status().is_success() || is_redirect(answer.response.status()) {
            Ok(answer.said)
        } else {
            Err(self.refusal(&answer, subject))
        }
    }

    /// One try at a file's bytes, from `from` on; success has status 200 or 206.
    pub async fn open(&self, subject: Subject<'_>, from: u64) -> Result<Answer, Trouble> {
        let answer = self.ask(Method::GET, self.resolve(subject), (from > 0).then_some(from)).await?;
        match answer.response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => Ok(answer),
            _ => Err(self.refusal(&answer, subject)),
        }
    }

    async fn ask(&self, method: Method, mut url: Url, from: Option<u64>) -> Result<Answer, Trouble> {
        let mut said = Described::default();
        for _ in 0..REDIRECTS {
            let from_hub = url.origin() == self.endpoint.origin();
            // Compressed, sizes and ranges would mean something else.
            let mut request = self.http.request(method.clone(), url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| from_hub) {
                request = request.bearer_auth(token.secret.reveal());
            }
            if let Some(from) = from {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let response = match tokio::time::timeout(self.patience.stall(), request.send()).await {
                Ok(sent) => sent.map_err(|source| Trouble::again(self.unreachable(source)))?,
                Err(_) => {
                    let (have, size) = (from.unwrap_or(0), said.size.unwrap_or(0));
                    return Err(Trouble::again(HubError::Stalled { quiet: self.patience.stall(), have, size }));
                }
            };
            if from_hub {
                let headers = response.headers();
                said = Described {
                    checksum: checksum(headers).or(said.checksum),
                    size: size(headers, response.status()).or(said.size),
                };
            }
            let next = Some(&response)
                .filter(|r| is_redirect(r.status()))
                .and_then(|r| r.headers().get(LOCATION)?.to_str().ok())
                .and_then(|location| url.join(location).ok());
            match next {
                // What the hub has to say about a file is said before its storage is reached.
                Some(next) if method != Method::HEAD || next.origin() == self.endpoint.origin() => url = next,
                _ => return Ok(Answer { response, from_hub, said }),
            }
        }
        let why = format!("it sent us on more than {REDIRECTS} times");
        Err(Trouble::Final(HubError::Strange { what: self.endpoint.to_string(), why }))
    }

    pub(super) fn unreachable(&self, source: reqwest::Error) -> HubError {
        HubError::Unreachable { endpoint: self.endpoint.to_string(), source: source.without_url() }
    }

    async fn body(&self, mut response: Response, limit: u64) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        loop {
            let quiet = self.patience.stall();
            let chunk = match tokio::time::timeout(quiet, response.chunk()).await {
                Ok(chunk) => chunk.map_err(|source| Trouble::again(self.unreachable(source)))?,
                Err(_) => return Err(Trouble::again(HubError::Stalled { quiet, have: bytes.len() as u64, size: 0 })),
            };
            match chunk {
                None => return Ok(bytes),
                Some(chunk) if (bytes.len() + chunk.len()) as u64 <= limit => bytes.extend_from_slice(&chunk),
                Some(_) => {
                    let why = format!("it is longer than {limit} bytes");
                    return Err(Trouble::Final(HubError::Strange { what: self.endpoint.to_string(), why }));
                }
            }
        }
    }

    fn refusal(&self, answer: &Answer, subject: Subject<'_>) -> Trouble {
        let (status, headers) = (answer.response.status(), answer.response.headers());
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let (code, message) = (text("x-error-code"), text("x-error-message"));
        let repo = subject.repo.to_owned();
        let with_token = self.token.is_some();
        let what = subject.file.map_or_else(|| repo.clone(), |file| format!("{file} of {repo}"));
        let of_status = HubError::Status { status: status.as_u16(), what };
        if !answer.from_hub {
            // Signed addresses expire: the hub makes a new one for the next try.
            return Trouble::again(of_status);
        }
        match (status.as_u16(), code) {
            (_, "GatedRepo") => Trouble::Final(HubError::Gated { page: self.page(&repo), repo, with_token }),
            (_, "RevisionNotFound") => {
                Trouble::Final(HubError::NoRevision { repo, revision: subject.revision.to_owned() })
            }
            (_, "EntryNotFound") => {
                let file = subject.file.unwrap_or_default().to_owned();
                Trouble::Final(HubError::NoFile { repo, file, choices: Vec::new() })
            }
            (401, _)
                if let Some(token) = &self.token
                    && code != "RepoNotFound" =>
            {
                let page = self.url(["settings", "tokens"]).to_string();
                Trouble::Final(HubError::TokenRefused { from: token.from.clone(), page })
            }
            (401, _) | (404, "" | "RepoNotFound") | (_, "RepoNotFound") => {
                Trouble::Final(HubError::NoRepository { endpoint: self.endpoint.to_string(), repo, with_token })
            }
            (403, _) => {
                let said = if message.is_empty() { "it gives no reason" } else { message };
                Trouble::Final(HubError::Forbidden { repo, said: said.chars().take(300).collect() })
            }
            (429, _) => {
                let wait = retry_after(headers);
                let cause = HubError::TooMany { wait, with_token };
                match wait {
                    Some(wait) if wait > self.patience.longest_wait() => Trouble::Final(cause),
                    wait => Trouble::Again { cause, wait },
                }
            }
            (408 | 500..=599, _) => Trouble::Again { cause: of_status, wait: retry_after(headers) },
            _ => Trouble::Final(of_status),
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

/// Of the whole file; the length of a redirect or of a part is another.
fn size(headers: &HeaderMap, status: StatusCode) -> Option<u64> {
    let own = headers.get(CONTENT_LENGTH).filter(|_| status == StatusCode::OK);
    headers.get("x-linked-size").or(own)?.to_str().ok()?.parse().ok()
}

/// `Retry-After: 55`, or the draft standard's `RateLimit: "api";r=0;t=55`.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let plain = headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok()).and_then(|v| v.trim().parse().ok());
    let limit = || text("ratelimit")?.split(';').find_map(|part| part.trim().strip_prefix("t=")?.parse().ok());
    plain.or_else(limit).map(Duration::from_secs)
}

#[derive(Deserialize)]
struct Raw {
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
    fn described(self) -> Described {
        match self.lfs {
            // A large file's blob id is that of its pointer.
            Some(lfs) => {
                Described { size: lfs.size.or(self.size), checksum: lfs.sha256.as_deref().and_then(Checksum::sha256) }
            }
            None => Described { size: self.size, checksum: self.blob_id.as_deref().and_then(Checksum::git_blob) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::hub::access::HubConfig;

    #[test]
    fn names_cannot_leave_their_place_in_the_address() {
        let config = HubConfig { endpoint: Some("http://127.0.0.1:1/mirror/".into()), ..HubConfig::default() };
        let client = Client::new(&Hub::new(&config, |_| None)).unwrap();
        let subject = Subject { repo: "o/r", revision: "refs/pr/1", file: Some("a b/c?d#e%2f.gguf") };
        assert_eq!(
            client.resolve(subject).as_str(),
            "http://127.0.0.1:1/mirror/o/r/resolve/refs%2Fpr%2F1/a%20b/c%3Fd%23e%252f.gguf"
        );
    }

    #[test]
    fn a_wait_is_read_in_both_forms() {
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())])
        };
        assert_eq!(retry_after(&headers("retry-after", "7")), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(&headers("ratelimit", "\"api\";r=0;t=55")), Some(Duration::from_secs(55)));
        assert_eq!(retry_after(&headers("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")), None);
    }
}
