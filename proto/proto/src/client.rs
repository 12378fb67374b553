//! Rust client of the HTTP API, for the command line and the tests.

use futures::{Stream, StreamExt};
use reqwest::header::{ACCEPT, AUTHORIZATION};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

use crate::event::Event;
use crate::http::{
    ArtifactChain, CancelRequest, ErrorBody, ErrorCode, ErrorReply, EventList, ModelAnswer, ModelRequest, NodeView,
    PrView, ResolveRequest, StateReply, SubmitReply, SubmitRequest, TaskDetail, TaskList, TokensData,
};
use crate::ids::TaskKey;
use crate::loop_step::EscalationAction;
use crate::task::TaskState;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing listens at the URL, or the connection broke: a retry may help.
    #[error("cannot reach cfq at {url}")]
    Unreachable {
        /// Root URL of the server.
        url: String,
        /// Cause.
        #[source]
        source: reqwest::Error,
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
    token: String,
}

impl Client {
    /// Creates a client. `url` is the server's root, for example `http://127.0.0.1:7710`. `http` must not use a proxy
    /// for loopback addresses.
    pub fn new(http: reqwest::Client, url: &str, token: &str) -> Self {
        Self { http, base: url.trim_end_matches('/').to_owned(), token: token.to_owned() }
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

    /// Lists at most `limit` tasks, newest first, optionally only those in `state`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tasks(&self, state: Option<TaskState>, limit: u32) -> Result<TaskList, ClientError> {
        let state = state.map(|s| format!("&state={s}")).unwrap_or_default();
        self.get(&format!("/tasks?limit={limit}{state}")).await
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

    /// Answers the open question of a task with `action`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resolve(&self, key: TaskKey, action: EscalationAction) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/resolve"), &ResolveRequest { action }).await
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

    /// Lists all pull requests.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn prs(&self) -> Result<Vec<PrView>, ClientError> {
        self.get("/prs").await
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
        self.get("/nodes").await
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
            .header(AUTHORIZATION, format!("Bearer {}", self.token))
            .header(ACCEPT, "text/event-stream")
            .header("Last-Event-ID", after.to_string());
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
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
        self.http
            .request(method, format!("{}/api/v1{path}", self.base))
            .header(AUTHORIZATION, format!("Bearer {}", self.token))
            .timeout(Duration::from_secs(30))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(self.request(Method::GET, path)).await
    }

    async fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    async fn send<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ClientError> {
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        let bytes = response.bytes().await.map_err(|source| self.unreachable(source))?;
        serde_json::from_slice(&bytes)
            .map_err(|source| ClientError::UnexpectedResponse { url: self.base.clone(), source: Box::new(source) })
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable { url: self.base.clone(), source }
    }
}

async fn refused(response: reqwest::Response) -> ClientError {
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

/// Parser of server-sent events, which end with a blank line. Comments (keep-alives) and unknown event names are
/// skipped.
#[derive(Default)]
struct SseBuffer {
    bytes: Vec<u8>,
}

impl SseBuffer {
    fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend(chunk.iter().filter(|b| **b != b'\r'));
    }

    fn next_frame(&mut self) -> Option<Result<Frame, serde_json::Error>> {
        loop {
            let end = self.bytes.windows(2).position(|w| w == b"\n\n")?;
            let block: Vec<u8> = self.bytes.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&block);
            let mut name = "message";
            let mut data = String::new();
            for line in text.lines() {
                if let Some(value) = line.strip_prefix("event:") {
                    name = value.trim();
                } else if let Some(value) = line.strip_prefix("data:") {
                    data.push_str(value.strip_prefix(' ').unwrap_or(value));
                }
            }
            match name {
                "event" => return Some(serde_json::from_str(&data).map(|e| Frame::Event(Box::new(e)))),
                "tokens" => return Some(serde_json::from_str(&data).map(Frame::Tokens)),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_span_chunks_and_comments_are_skipped() {
        let mut buffer = SseBuffer::default();
        buffer.push(b": keep-alive\n\nevent: tok");
        assert!(buffer.next_frame().is_none());
        buffer.push(b"ens\ndata: {\"job\":\"0190b4b1-0000-7000-8000-000000000000\",\"attempt\":1,\"role\":\"alpha\",\"offset\":0,\"text\":\"hi\"}\n\n");
        let Some(Ok(Frame::Tokens(tokens))) = buffer.next_frame() else { panic!("a frame") };
        assert_eq!(tokens.text, "hi");
        assert!(buffer.next_frame().is_none());
    }
}
