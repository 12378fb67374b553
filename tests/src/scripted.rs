//! A model server with scripted replies. It speaks the protocols of OpenAI and of Ollama and is not part of cfq.
//!
//! A reply belongs to a prompt, not to a call: the n-th *distinct* prompt to a model gets its n-th reply, and a
//! repeated prompt gets the reply it got before. So an attempt that is repeated after a crash gets the reply that the
//! first attempt would have got, as from a model with a fixed seed. All prompts after the last scripted reply get this
//! last reply.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Json, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::sync::watch;

mod answer;
mod calls;
mod ollama;

use answer::{Chunks, Protocol, endless, streamed, whole};
pub use calls::{Call, Calls, End};

/// A gate that blocks a reply until the test opens it.
#[derive(Debug, Clone)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    pub fn closed() -> Self {
        Self(watch::Sender::new(false))
    }

    pub fn open(&self) {
        self.0.send_replace(true);
    }

    async fn passed(&self) {
        // Cannot fail: `self` holds the sender.
        drop(self.0.subscribe().wait_for(|open| *open).await);
    }
}

/// The scripted reply to a call.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A complete text, streamed in chunks of 8 characters.
    Text(String),
    /// The text that this function returns for the call's messages, with this delay before each chunk.
    Computed(fn(&Value) -> String, Duration),
    /// A text that ends at the token limit (finish reason `length`).
    Truncated(String),
    /// A complete text with this delay before each chunk.
    Slow(String, Duration),
    /// The first text at once, the second after the gate is opened.
    Gated(String, String, Gate),
    /// An HTTP status with an error message.
    Status(u16, String),
    /// The connection stays open and nothing is sent.
    Hang,
    /// A stream of text that never ends.
    Endless,
}

#[derive(Default)]
struct ScriptedModel {
    replies: Vec<Reply>,
    prompts: Vec<String>,
    calls: u64,
}

#[derive(Default)]
struct Inner {
    models: HashMap<String, ScriptedModel>,
    requests: Vec<Value>,
    authorizations: Vec<(String, String)>,
    calls: Calls,
    down: bool,
    ollama: ollama::Ollama,
}

/// A running model server.
#[derive(Clone)]
pub struct ModelServer {
    inner: Arc<Mutex<Inner>>,
    pub addr: SocketAddr,
}

impl ModelServer {
    pub async fn start() -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into()).await
    }

    pub async fn start_at(address: IpAddr) -> Self {
        let listener = tokio::net::TcpListener::bind((address, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let inner = Arc::new(Mutex::new(Inner::default()));
        let app = axum::Router::new()
            .route("/v1/models", get(models))
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(text))
            .merge(ollama::routes())
            .with_state(inner.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { inner, addr }
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.addr)
    }

    /// Sets a model's replies and forgets its earlier prompts.
    pub fn script(&self, model: &str, replies: Vec<Reply>) {
        let mut inner = self.inner.lock().unwrap();
        inner.models.insert(model.to_owned(), ScriptedModel { replies, ..ScriptedModel::default() });
    }

    /// Sets whether the server is down: while it is down, it answers every request with 503.
    pub fn set_down(&self, down: bool) {
        self.inner.lock().unwrap().down = down;
    }

    /// Number of calls to a model, repeated prompts included.
    pub fn call_count(&self, model: &str) -> u64 {
        self.inner.lock().unwrap().models.get(model).map_or(0, |m| m.calls)
    }

    /// Distinct prompts to a model, in the order of their first call.
    pub fn prompts(&self, model: &str) -> Vec<String> {
        self.inner.lock().unwrap().models.get(model).map_or_else(Vec::new, |m| m.prompts.clone())
    }

    /// All calls so far, with the text sent and how each ended.
    pub fn all_calls(&self) -> Vec<Call> {
        let calls = self.inner.lock().unwrap().calls.clone();
        calls.all()
    }

    /// Model and `Authorization` header of each call; empty text if a call had no such header.
    pub fn authorizations(&self) -> Vec<(String, String)> {
        self.inner.lock().unwrap().authorizations.clone()
    }

    /// Request bodies of all calls.
    pub fn requests(&self) -> Vec<Value> {
        self.inner.lock().unwrap().requests.clone()
    }
}

type Shared = Arc<Mutex<Inner>>;

async fn models(State(inner): State<Shared>) -> Response {
    let inner = inner.lock().unwrap();
    if inner.down {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let data: Vec<Value> = inner.models.keys().map(|id| json!({ "id": id, "object": "model" })).collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

async fn chat(State(inner): State<Shared>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    answer_call(inner, &headers, body, Protocol::OpenAi).await
}

async fn text(State(inner): State<Shared>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    answer_call(inner, &headers, body, Protocol::OpenAiText).await
}

/// Answers a call as scripted, in this protocol.
async fn answer_call(inner: Shared, headers: &HeaderMap, body: Value, protocol: Protocol) -> Response {
    let call = inner.lock().unwrap().calls.begin(&body);
    let refused = |status: u16, body: Value| {
        call.finish(End::Refused);
        (StatusCode::from_u16(status).unwrap(), Json(body)).into_response()
    };
    let reply = {
        let mut inner = inner.lock().unwrap();
        inner.requests.push(body.clone());
        let name = body["model"].as_str().unwrap_or_default().to_owned();
        let authorization = headers.get(AUTHORIZATION).map_or("", |value| value.to_str().unwrap()).to_owned();
        inner.authorizations.push((name.clone(), authorization));
        if inner.down {
            return refused(503, json!("the model server is down"));
        }
        let Some(model) = inner.models.get_mut(&name) else {
            return refused(404, json!({ "error": { "message": format!("model {name} does not exist") } }));
        };
        model.calls += 1;
        let prompt = body.get("messages").unwrap_or(&body["prompt"]).to_string();
        let index = match model.prompts.iter().position(|p| *p == prompt) {
            Some(index) => index,
            None => {
                model.prompts.push(prompt);
                model.prompts.len() - 1
            }
        };
        model.replies.get(index).or(model.replies.last()).cloned()
    };
    let (chunks, finish, delay) = match reply {
        None => return refused(500, json!("nothing scripted")),
        Some(Reply::Status(status, message)) => return refused(status, json!({ "error": { "message": message } })),
        Some(Reply::Hang) => {
            let _recorded_on_disconnect = call;
            return std::future::pending().await;
        }
        Some(Reply::Endless) => return endless(protocol, call),
        Some(Reply::Text(text)) => (Chunks::of(&text), "stop", Duration::ZERO),
        Some(Reply::Computed(text, delay)) => (Chunks::of(&text(&body["messages"])), "stop", delay),
        Some(Reply::Truncated(text)) => (Chunks::of(&text), "length", Duration::ZERO),
        Some(Reply::Slow(text, delay)) => (Chunks::of(&text), "stop", delay),
        Some(Reply::Gated(first, rest, gate)) => (Chunks::gated(&first, &rest, gate), "stop", Duration::ZERO),
    };
    match body["stream"].as_bool().unwrap_or(false) {
        true => streamed(protocol, chunks, finish, delay, call),
        false => whole(chunks, finish, delay, call).await,
    }
}

/// A creator's reply: one file in the format that the prompt asks for.
pub fn file(path: &str, content: &str) -> String {
    format!("Here it is.\n\n{path}\n```python\n{content}\n```\n")
}

/// A critic's reply: a report with this score and these defects (severity, description).
pub fn review(score: u32, defects: &[(&str, &str)]) -> String {
    let defects: Vec<Value> = defects
        .iter()
        .map(|(severity, description)| {
            json!({
                "severity": severity, "category": "correctness", "location": "add.py:1", "description": description,
            })
        })
        .collect();
    json!({
        "quality_score": score, "defects": defects, "suggestions": ["explain more"],
        "required_changes": if score < 85 { vec!["fix it"] } else { vec![] },
    })
    .to_string()
}
