//! The Rust client of the HTTP API: what the command line, the MCP bridge and the tests use.

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
use crate::looping::EscalationAction;
use crate::task::TaskState;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing listens there, or the connection broke: asking again may help.
    #[error("cannot reach cfq at {url}")]
    Unreachable {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    /// The server refused, with its reason.
    #[error("{}", .body.message)]
    Refused { status: u16, body: ErrorBody },
    /// Something answered that is not cfq, or another version of it.
    #[error("{url} did not answer as cfq does")]
    Strange {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// One frame of a task's feed.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    Event(Box<Event>),
    Tokens(TokensData),
}

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
}

impl Client {
    /// `url` is the server's root, for example `http://127.0.0.1:7710`. `http` must have no proxy for loopback.
    pub fn new(http: reqwest::Client, url: &str, token: &str) -> Self {
        Self { http, base: url.trim_end_matches('/').to_owned(), token: token.to_owned() }
    }

    pub fn url(&self) -> &str {
        &self.base
    }

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

    pub async fn tasks(&self, state: Option<TaskState>, limit: u32) -> Result<TaskList, ClientError> {
        let state = state.map(|s| format!("&state={s}")).unwrap_or_default();
        self.get(&format!("/tasks?limit={limit}{state}")).await
    }

    pub async fn task(&self, key: TaskKey) -> Result<TaskDetail, ClientError> {
        self.get(&format!("/tasks/{key}")).await
    }

    pub async fn cancel(&self, key: TaskKey, reason: &str) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/cancel"), &CancelRequest { reason: reason.to_owned() }).await
    }

    pub async fn resolve(&self, key: TaskKey, action: EscalationAction) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/resolve"), &ResolveRequest { action }).await
    }

    /// Events of a task after `after` (its `task_seq`; 0 for all).
    pub async fn events(&self, key: TaskKey, after: i64) -> Result<EventList, ClientError> {
        self.get(&format!("/tasks/{key}/events?after={after}")).await
    }

    /// The artifact of an iteration with its ancestors; `None` asks for the best one.
    pub async fn artifacts(&self, key: TaskKey, iteration: Option<u32>) -> Result<ArtifactChain, ClientError> {
        let which = iteration.map_or_else(|| "best".to_owned(), |n| n.to_string());
        self.get(&format!("/tasks/{key}/artifacts/{which}")).await
    }

    pub async fn prs(&self) -> Result<Vec<PrView>, ClientError> {
        self.get("/prs").await
    }

    pub async fn pr(&self, number: i64) -> Result<PrView, ClientError> {
        self.get(&format!("/prs/{number}")).await
    }

    pub async fn nodes(&self) -> Result<Vec<NodeView>, ClientError> {
        self.get("/nodes").await
    }

    /// Makes a model ready on a node. The answer comes at once; the node's ledger tells how it ends.
    pub async fn load_model(&self, ask: &ModelRequest) -> Result<ModelAnswer, ClientError> {
        self.post("/models/load", ask).await
    }

    /// Lets a model go on a node, as soon as nothing runs on it.
    pub async fn unload_model(&self, ask: &ModelRequest) -> Result<ModelAnswer, ClientError> {
        self.post("/models/unload", ask).await
    }

    /// Ready to accept tasks: database and leader are there.
    pub async fn ready(&self) -> Result<(), ClientError> {
        let request = self.http.request(Method::GET, format!("{}/readyz", self.base)).timeout(Duration::from_secs(5));
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
        if response.status().is_success() { Ok(()) } else { Err(refusal(response).await) }
    }

    /// Events of a task after `after`, then live ones and tokens, until the connection ends. Ask again with the last
    /// `task_seq` seen: nothing is skipped.
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
            return Err(refusal(response).await);
        }
        let url = self.base.clone();
        let bytes = response.bytes_stream();
        Ok(futures::stream::unfold(
            (bytes, SseBuffer::default(), url, false),
            |(mut bytes, mut buffer, url, over)| async move {
                if over {
                    return None;
                }
                loop {
                    if let Some(frame) = buffer.next_frame() {
                        let frame =
                            frame.map_err(|source| ClientError::Strange { url: url.clone(), source: Box::new(source) });
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
            return Err(refusal(response).await);
        }
        let bytes = response.bytes().await.map_err(|source| self.unreachable(source))?;
        serde_json::from_slice(&bytes)
            .map_err(|source| ClientError::Strange { url: self.base.clone(), source: Box::new(source) })
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable { url: self.base.clone(), source }
    }
}

async fn refusal(response: reqwest::Response) -> ClientError {
    let status = response.status();
    let body = match response.json::<ErrorReply>().await {
        Ok(reply) => reply.error,
        Err(_) => ErrorBody {
            code: if status == StatusCode::NOT_FOUND { ErrorCode::NotFound } else { ErrorCode::Internal },
            message: format!("the server answered {status} without saying why; is it cfq that listens there?"),
            field: None,
            retry_after: None,
        },
    };
    ClientError::Refused { status: status.as_u16(), body }
}

/// Server-sent events, split at blank lines. Comments (keep-alives) and unknown event names are passed over.
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
    fn frames_are_found_across_chunks_and_comments_passed_over() {
        let mut buffer = SseBuffer::default();
        buffer.push(b": keep-alive\n\nevent: tok");
        assert!(buffer.next_frame().is_none());
        buffer.push(b"ens\ndata: {\"job\":\"0190b4b1-0000-7000-8000-000000000000\",\"attempt\":1,\"role\":\"alpha\",\"offset\":0,\"text\":\"hi\"}\n\n");
        let Some(Ok(Frame::Tokens(tokens))) = buffer.next_frame() else { panic!("a frame") };
        assert_eq!(tokens.text, "hi");
        assert!(buffer.next_frame().is_none());
    }
}
