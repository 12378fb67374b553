//! An OpenAI-compatible model server whose replies a test writes down: the real protocol, outside the product.
//!
//! A reply belongs to a prompt, not to a call: the n-th *distinct* prompt to a model gets its n-th reply, and the same
//! prompt gets the same reply again. So an attempt that is repeated after a crash reads what the first would have read,
//! as a seeded model would answer. The last reply serves for all later prompts.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt;
use serde_json::{Value, json};

/// What a call gets.
#[derive(Debug, Clone)]
pub enum Reply {
    /// This text, in pieces of a few bytes.
    Text(String),
    /// The same, as a reply that reached its longest length.
    Cut(String),
    /// The same as `Text`, with a wait before each piece.
    Slow(String, Duration),
    /// An HTTP status with a message, instead of an answer.
    Status(u16, String),
    /// The connection stays open and nothing comes.
    Hang,
    /// Text that never ends.
    Endless,
}

#[derive(Default)]
struct Model {
    replies: Vec<Reply>,
    prompts: Vec<String>,
    calls: u64,
}

#[derive(Default)]
struct Inner {
    models: HashMap<String, Model>,
    requests: Vec<Value>,
    down: bool,
}

#[derive(Clone)]
pub struct ModelServer {
    inner: Arc<Mutex<Inner>>,
    pub addr: SocketAddr,
}

impl ModelServer {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let inner = Arc::new(Mutex::new(Inner::default()));
        let app = axum::Router::new()
            .route("/v1/models", get(models))
            .route("/v1/chat/completions", post(chat))
            .with_state(inner.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { inner, addr }
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.addr)
    }

    pub fn script(&self, model: &str, replies: Vec<Reply>) {
        let mut inner = self.inner.lock().unwrap();
        inner.models.insert(model.to_owned(), Model { replies, ..Model::default() });
    }

    /// Answers 503 to everything while it is down.
    pub fn set_down(&self, down: bool) {
        self.inner.lock().unwrap().down = down;
    }

    /// Calls a model received, repeated prompts included.
    pub fn calls(&self, model: &str) -> u64 {
        self.inner.lock().unwrap().models.get(model).map_or(0, |m| m.calls)
    }

    /// Distinct prompts a model received, in order.
    pub fn prompts(&self, model: &str) -> Vec<String> {
        self.inner.lock().unwrap().models.get(model).map_or_else(Vec::new, |m| m.prompts.clone())
    }

    /// Bodies of all calls.
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

async fn chat(State(inner): State<Shared>, Json(body): Json<Value>) -> Response {
    let reply = {
        let mut inner = inner.lock().unwrap();
        inner.requests.push(body.clone());
        if inner.down {
            return (StatusCode::SERVICE_UNAVAILABLE, "the model server is down").into_response();
        }
        let name = body["model"].as_str().unwrap_or_default().to_owned();
        let Some(model) = inner.models.get_mut(&name) else {
            let error = json!({ "error": { "message": format!("model {name} does not exist") } });
            return (StatusCode::NOT_FOUND, Json(error)).into_response();
        };
        model.calls += 1;
        let prompt = body["messages"].to_string();
        let index = match model.prompts.iter().position(|p| *p == prompt) {
            Some(index) => index,
            None => {
                model.prompts.push(prompt);
                model.prompts.len() - 1
            }
        };
        model.replies.get(index).or(model.replies.last()).cloned()
    };
    let stream = body["stream"].as_bool().unwrap_or(false);
    match reply {
        None => (StatusCode::INTERNAL_SERVER_ERROR, "nothing scripted").into_response(),
        Some(Reply::Status(status, message)) => {
            let error = json!({ "error": { "message": message } });
            (StatusCode::from_u16(status).unwrap(), Json(error)).into_response()
        }
        Some(Reply::Hang) => std::future::pending().await,
        Some(Reply::Endless) => {
            let pieces = futures::stream::repeat_with(|| piece("all work and no play "));
            sse(pieces.map(Ok::<Bytes, Infallible>))
        }
        Some(Reply::Text(text)) if !stream => whole(&text, "stop"),
        Some(Reply::Cut(text)) if !stream => whole(&text, "length"),
        Some(Reply::Slow(text, wait)) if !stream => {
            tokio::time::sleep(wait).await;
            whole(&text, "stop")
        }
        Some(Reply::Text(text)) => streamed(text, "stop", Duration::ZERO),
        Some(Reply::Cut(text)) => streamed(text, "length", Duration::ZERO),
        Some(Reply::Slow(text, wait)) => streamed(text, "stop", wait),
    }
}

fn whole(text: &str, finish: &str) -> Response {
    Json(json!({
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": finish }],
        "usage": { "prompt_tokens": 10, "completion_tokens": text.len() / 4, "total_tokens": 10 + text.len() / 4 },
    }))
    .into_response()
}

fn piece(text: &str) -> Bytes {
    let chunk = json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }] });
    format!("data: {chunk}\n\n").into()
}

fn streamed(text: String, finish: &str, wait: Duration) -> Response {
    let characters: Vec<char> = text.chars().collect();
    let mut pieces: Vec<Bytes> = characters.chunks(8).map(|c| piece(&c.iter().collect::<String>())).collect();
    let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": finish }] });
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": 10, "completion_tokens": text.len() / 4, "total_tokens": 0 } });
    pieces.push(format!("data: {end}\n\ndata: {usage}\n\ndata: [DONE]\n\n").into());
    let stream = futures::stream::iter(pieces).then(move |p| async move {
        tokio::time::sleep(wait).await;
        Ok::<Bytes, Infallible>(p)
    });
    sse(stream)
}

fn sse(stream: impl futures::Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    Response::builder().header("content-type", "text/event-stream").body(Body::from_stream(stream)).unwrap()
}

/// A creator's reply: one file in the form the prompt asks for.
pub fn file(path: &str, content: &str) -> String {
    format!("Here it is.\n\n{path}\n```python\n{content}\n```\n")
}

/// A critic's reply.
pub fn review(score: u32, defects: &[(&str, &str)]) -> String {
    let defects: Vec<Value> = defects
        .iter()
        .map(|(severity, description)| {
            json!({ "severity": severity, "category": "correctness", "location": "add.py:1", "description": description })
        })
        .collect();
    json!({
        "quality_score": score, "defects": defects, "suggestions": ["say more"],
        "required_changes": if score < 85 { vec!["mend it"] } else { vec![] },
    })
    .to_string()
}
