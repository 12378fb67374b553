//! Rust client of the HTTP API, for the command line and the tests.

mod agents;
mod control;
mod defects;
mod jobs;
mod machines;
mod schedules;
mod sse;
mod token;
mod tokens;

use futures::{Stream, StreamExt};
use reqwest::header::{ACCEPT, AUTHORIZATION};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::event::Event;
use crate::http::{
    ArtifactChain, BatchReply, BatchRequest, CancelRequest, CheckReply, ErrorBody, ErrorCode, ErrorReply, EventList,
    GcReply, GcRequest, ModelAnswer, ModelRequest, NodeList, NodeView, PrFilter, PrList, PrView, ResolveRequest,
    StateReply, SubmitReply, SubmitRequest, TaskDetail, TaskList, TaskQuery, TokensData,
};
use crate::ids::{ArtifactId, TaskKey};
use crate::label::Label;
use crate::task::TaskState;

use sse::SseBuffer;
use token::TokenSource;

/// Time limit of a request that is not a feed. The server itself ends such a request after 8 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a response that is not a feed, in bytes. The longest ones are the artifacts of a task.
const MAX_RESPONSE_BYTES: usize = 256 * 1024 * 1024;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing listens at the URL, the server did not answer in time, or the connection broke: a retry may help.
    #[error("cannot reach cfq at {url}")]
    Unreachable {
        /// Root URL of the server.
        url: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
    },
    /// The file with the API token cannot be read. No request was sent.
    #[error("cannot read the API token in {path}")]
    TokenFile {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The server rejected the request.
    #[error("{}", .body.message)]
    Refused {
        /// HTTP status.
        status: u16,
        /// The server's reason, as an error body.
        body: ErrorBody,
    },
    /// The response does not have the form that this version of cfq expects.
    #[error("unexpected response from {url}")]
    UnexpectedResponse {
        /// Root URL of the server.
        url: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// One frame of a task's feed.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// An event of the task's log.
    Event(Box<Event>),
    /// Newly generated text, which is not logged.
    Tokens(TokensData),
}

/// Client of one server.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    token: TokenSource,
}

impl Client {
    /// Creates a client. `url` is the server's root, for example `http://127.0.0.1:7710`. `http` must not use a proxy
    /// for loopback addresses.
    pub fn new(http: reqwest::Client, url: &str, token: &str) -> Self {
        Self { http, base: url.trim_end_matches('/').to_owned(), token: TokenSource::Text(token.to_owned()) }
    }

    /// Creates a client that reads the API token from `file` for every request, so that it continues after the token
    /// was rotated.
    pub fn with_token_file(http: reqwest::Client, url: &str, file: &Path) -> Self {
        Self { http, base: url.trim_end_matches('/').to_owned(), token: TokenSource::File(file.to_owned()) }
    }

    /// Returns the root URL of the server, without a trailing slash.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Submits a task. A repeated request with the same idempotency key and body returns the same task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn submit(
        &self,
        spec: &SubmitRequest,
        idempotency_key: Option<&str>,
    ) -> Result<SubmitReply, ClientError> {
        let mut request = self.request(Method::POST, "/tasks").json(spec);
        if let Some(key) = idempotency_key {
            request = request.header("Idempotency-Key", key);
        }
        self.send(request).await
    }

    /// Checks a task as its submission does, and submits nothing.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn check_task(&self, spec: &SubmitRequest) -> Result<CheckReply, ClientError> {
        self.post("/tasks:check", spec).await
    }

    /// Submits several tasks, of which all or none are created. A repeated request with the same idempotency key and
    /// body returns the same tasks.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn submit_batch(
        &self,
        batch: &BatchRequest,
        idempotency_key: Option<&str>,
    ) -> Result<BatchReply, ClientError> {
        let mut request = self.request(Method::POST, "/tasks:batch").json(batch);
        if let Some(key) = idempotency_key {
            request = request.header("Idempotency-Key", key);
        }
        self.send(request).await
    }

    /// Lists at most `limit` tasks, newest first, optionally only those in `state`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tasks(&self, state: Option<TaskState>, limit: u32) -> Result<TaskList, ClientError> {
        let state = state.map(|s| format!("&state={s}")).unwrap_or_default();
        self.get(&format!("/tasks?limit={limit}{state}")).await
    }

    /// Lists tasks.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn list_tasks(&self, query: &TaskQuery) -> Result<TaskList, ClientError> {
        self.get(&format!("/tasks?{query}")).await
    }

    /// Gets all details of a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn task(&self, key: TaskKey) -> Result<TaskDetail, ClientError> {
        self.get(&format!("/tasks/{key}")).await
    }

    /// Cancels a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cancel(&self, key: TaskKey, reason: &str) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/cancel"), &CancelRequest { reason: reason.to_owned() }).await
    }

    /// Answers a question of a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resolve(&self, key: TaskKey, answer: impl Into<ResolveRequest>) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/resolve"), &answer.into()).await
    }

    /// Lists the task's events whose `task_seq` is greater than `after`; 0 lists all events.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn events(&self, key: TaskKey, after: i64) -> Result<EventList, ClientError> {
        self.get(&format!("/tasks/{key}/events?after={after}")).await
    }

    /// Gets the artifact of an iteration and the earlier artifacts it is based on; `None` selects the best iteration.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn artifacts(&self, key: TaskKey, iteration: Option<u32>) -> Result<ArtifactChain, ClientError> {
        let which = iteration.map_or_else(|| "best".to_owned(), |n| n.to_string());
        self.get(&format!("/tasks/{key}/artifacts/{which}")).await
    }

    /// Gets an artifact by its id, and the earlier artifacts it is based on.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn artifact(&self, artifact: ArtifactId) -> Result<ArtifactChain, ClientError> {
        self.get(&format!("/artifacts/{artifact}")).await
    }

    /// Lists pull requests.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn prs(&self, filter: &PrFilter) -> Result<PrList, ClientError> {
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        let states = if states.is_empty() { String::new() } else { format!("&state={}", states.join(",")) };
        let after = filter.after.map(|after| format!("&after={after}")).unwrap_or_default();
        let repo =
            filter.repo.as_deref().map(|repo| format!("&repo={}", crate::http::query_value(repo))).unwrap_or_default();
        let since = filter.since.map(|since| format!("&since={since}")).unwrap_or_default();
        let labels: Vec<&str> = filter.labels.iter().map(Label::as_str).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("&label={}", labels.join(",")) };
        let sort = if filter.oldest_first { "&sort=oldest" } else { "" };
        self.get(&format!("/prs?limit={}{states}{labels}{repo}{since}{sort}{after}", filter.limit)).await
    }

    /// Gets a pull request.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pr(&self, number: i64) -> Result<PrView, ClientError> {
        self.get(&format!("/prs/{number}")).await
    }

    /// Lists all nodes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn nodes(&self) -> Result<Vec<NodeView>, ClientError> {
        Ok(self.get::<NodeList>("/nodes").await?.nodes)
    }

    /// Deletes what is older than the retention, or counts it. Repeat the request until `finished` is true.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn gc(&self, request: &GcRequest) -> Result<GcReply, ClientError> {
        self.post("/gc", request).await
    }

    /// Asks a node to load a model. Returns before the load finishes; the result of the load appears later in the
    /// node's ledger.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn load_model(&self, request: &ModelRequest) -> Result<ModelAnswer, ClientError> {
        self.post("/models/load", request).await
    }

    /// Asks a node to unload a model once no sequence runs on it. Returns without waiting for that.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unload_model(&self, request: &ModelRequest) -> Result<ModelAnswer, ClientError> {
        self.post("/models/unload", request).await
    }

    /// Succeeds if the server can accept tasks, that is, has a database and a leader.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn check_ready(&self) -> Result<(), ClientError> {
        let request = self.http.request(Method::GET, format!("{}/readyz", self.base)).timeout(Duration::from_secs(5));
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
        if response.status().is_success() { Ok(()) } else { Err(refused(response).await) }
    }

    /// Streams the task's events whose `task_seq` is greater than `after`, then new events and tokens as they arrive,
    /// until the connection ends. To reconnect without missing an event, use the last `task_seq` received as `after`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn watch(
        &self,
        key: TaskKey,
        after: i64,
    ) -> Result<impl Stream<Item = Result<Frame, ClientError>> + use<>, ClientError> {
        let request = self
            .http
            .request(Method::GET, format!("{}/api/v1/tasks/{key}/feed", self.base))
            .header(ACCEPT, "text/event-stream")
            .header("Last-Event-ID", after.to_string());
        let response = self.send_authorized(request).await?;
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        let url = self.base.clone();
        let bytes = response.bytes_stream();
        Ok(futures::stream::unfold(
            (bytes, SseBuffer::default(), url, false),
            |(mut bytes, mut buffer, url, ended)| async move {
                if ended {
                    return None;
                }
                loop {
                    if let Some(frame) = buffer.next_frame() {
                        let frame = frame.map_err(|source| ClientError::UnexpectedResponse {
                            url: url.clone(),
                            source: Box::new(source),
                        });
                        return Some((frame, (bytes, buffer, url, false)));
                    }
                    match bytes.next().await {
                        Some(Ok(chunk)) => buffer.push(&chunk),
                        Some(Err(source)) => {
                            let error = ClientError::Unreachable { url: url.clone(), source };
                            return Some((Err(error), (bytes, buffer, url, true)));
                        }
                        None => return None,
                    }
                }
            },
        ))
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}/api/v1{path}", self.base)).timeout(REQUEST_TIMEOUT)
    }

    /// Sends a request with the token. If the token was rotated after it was read, sends the request again.
    async fn send_authorized(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let token = self.token.read()?;
        let again = request.try_clone();
        let response = self.send_with(request, &token).await?;
        if response.status() == StatusCode::UNAUTHORIZED
            && let Some(again) = again
        {
            let current = self.token.read()?;
            if current != token {
                return self.send_with(again, &current).await;
            }
        }
        Ok(response)
    }

    async fn send_with(&self, request: RequestBuilder, token: &str) -> Result<Response, ClientError> {
        let request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        request.send().await.map_err(|source| self.unreachable(source))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.read(self.request(Method::GET, path)).await
    }

    /// Sends a request that changes nothing. Sends it again if the connection ends before the reply: the connection may
    /// have waited for a server that was about to end.
    async fn read<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ClientError> {
        let again = request.try_clone();
        match (self.send(request).await, again) {
            (Err(ClientError::Unreachable { source, .. }), Some(again))
                if !source.is_connect() && !source.is_timeout() =>
            {
                self.send(again).await
            }
            (sent, _) => sent,
        }
    }

    async fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    async fn send<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ClientError> {
        let response = self.send_authorized(request).await?;
        self.receive(response).await
    }

    async fn receive<T: DeserializeOwned>(&self, mut response: Response) -> Result<T, ClientError> {
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|source| self.unreachable(source))? {
            if bytes.len() + chunk.len() > MAX_RESPONSE_BYTES {
                return Err(self.unexpected(format!("it has more than {MAX_RESPONSE_BYTES} bytes")));
            }
            bytes.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&bytes).map_err(|source| self.unexpected(source))
    }

    fn unexpected(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::UnexpectedResponse { url: self.base.clone(), source: source.into() }
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable { url: self.base.clone(), source }
    }
}

async fn refused(response: Response) -> ClientError {
    let status = response.status();
    let body = match response.json::<ErrorReply>().await {
        Ok(reply) => reply.error,
        Err(_) => ErrorBody {
            code: if status == StatusCode::NOT_FOUND { ErrorCode::NotFound } else { ErrorCode::Internal },
            message: format!("the server returned {status} without a reason; check that cfq listens at this address"),
            field: None,
            retry_after: None,
        },
    };
    ClientError::Refused { status: status.as_u16(), body }
}
