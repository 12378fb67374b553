//! The requests of Ollama that the scripted model server answers, beside those of OpenAI, for the same models. Like
//! Ollama, it truncates a prompt that does not fit the requested context, by removing the oldest messages, unless the
//! request forbids this. Unlike Ollama, it also removes system messages, so that a test can detect the truncation.
//! Source: Ollama 0.32, `server/routes.go` and `server/prompt.go`.

use std::collections::VecDeque;

use axum::extract::{Json, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, body::Body};
use serde_json::{Value, json};

use super::answer::Protocol;
use super::{Inner, Shared, answer_call};

/// Length of the context if neither the request nor the model states one.
const DEFAULT_CONTEXT: u64 = 4096;
/// The server counts one token for this many bytes.
const BYTES_PER_TOKEN: u64 = 4;
/// Longest context of all its models.
const MAX_CONTEXT: u64 = 32_768;

/// What the server does besides scripted replies.
pub(super) struct Ollama {
    pub(super) version: String,
    /// Models that are not on the server until they are pulled.
    pub(super) missing: Vec<String>,
    /// Whether the server says that it is Ollama, also to clients of the OpenAI protocol.
    pub(super) is_only_ollama: bool,
}

impl Default for Ollama {
    fn default() -> Self {
        Self { version: "0.32.15".to_owned(), missing: Vec::new(), is_only_ollama: false }
    }
}

pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/", get(greeting))
        .route("/api/version", get(version))
        .route("/api/tags", get(tags))
        .route("/api/show", post(show))
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/pull", post(pull))
}

fn has(inner: &Inner, model: &str) -> bool {
    inner.models.contains_key(model) && !inner.ollama.missing.iter().any(|missing| missing == model)
}

fn not_found(model: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": format!("model '{model}' not found") }))).into_response()
}

async fn greeting(State(inner): State<Shared>) -> &'static str {
    if inner.lock().unwrap().ollama.is_only_ollama { "Ollama is running" } else { "" }
}

async fn version(State(inner): State<Shared>) -> Response {
    let inner = inner.lock().unwrap();
    match inner.down {
        true => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        false => Json(json!({ "version": inner.ollama.version })).into_response(),
    }
}

async fn tags(State(inner): State<Shared>) -> Response {
    let inner = inner.lock().unwrap();
    let name = |model: &String| json!({ "name": format!("{model}:latest"), "model": format!("{model}:latest") });
    let models: Vec<Value> = inner.models.keys().filter(|model| has(&inner, model)).map(name).collect();
    Json(json!({ "models": models })).into_response()
}

async fn show(State(inner): State<Shared>, Json(body): Json<Value>) -> Response {
    let name = body["model"].as_str().unwrap_or_default();
    match has(&inner.lock().unwrap(), name) {
        false => not_found(name),
        true => Json(json!({
            "template": "{{ .Prompt }}", "parameters": "stop                           \"<|im_end|>\"",
            "details": { "family": "qwen2" },
            "model_info": { "general.architecture": "qwen2", "qwen2.context_length": MAX_CONTEXT },
        }))
        .into_response(),
    }
}

async fn chat(State(inner): State<Shared>, headers: HeaderMap, Json(mut body): Json<Value>) -> Response {
    let name = body["model"].as_str().unwrap_or_default().to_owned();
    if !has(&inner.lock().unwrap(), &name) {
        return not_found(&name);
    }
    let context = body["options"]["num_ctx"].as_u64().unwrap_or(DEFAULT_CONTEXT).min(MAX_CONTEXT);
    let tokens = |messages: &[Value]| {
        messages.iter().map(|m| m["content"].as_str().unwrap_or_default().len() as u64).sum::<u64>() / BYTES_PER_TOKEN
    };
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    if tokens(&messages) > context {
        if body["truncate"] == json!(false) {
            let error = json!({ "error": "the input length exceeds the context length" });
            return (StatusCode::BAD_REQUEST, Json(error)).into_response();
        }
        let mut kept: VecDeque<Value> = messages.into();
        while kept.len() > 1 && tokens(kept.make_contiguous()) > context {
            kept.pop_front();
        }
        body["messages"] = kept.into_iter().collect();
    }
    answer_call(inner, &headers, body, Protocol::Ollama).await
}

async fn generate(State(inner): State<Shared>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let name = body["model"].as_str().unwrap_or_default().to_owned();
    if !has(&inner.lock().unwrap(), &name) {
        return not_found(&name);
    }
    answer_call(inner, &headers, body, Protocol::OllamaText).await
}

async fn pull(State(inner): State<Shared>, Json(body): Json<Value>) -> Response {
    let name = body["model"].as_str().unwrap_or_default().to_owned();
    let mut lines = vec![json!({ "status": "pulling manifest" })];
    if inner.lock().unwrap().models.contains_key(&name) {
        for completed in [None, Some(400), Some(1000)] {
            lines.push(
                json!({ "status": "pulling abc", "digest": "sha256:abc", "total": 1000, "completed": completed }),
            );
        }
        lines.push(json!({ "status": "success" }));
        inner.lock().unwrap().ollama.missing.retain(|missing| *missing != name);
    } else {
        lines.push(json!({ "error": "pull model manifest: file does not exist" }));
    }
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    Response::builder().header("content-type", "application/x-ndjson").body(Body::from(text)).unwrap()
}

impl super::ModelServer {
    /// Base URL of Ollama's own protocol.
    pub fn ollama_url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Sets the version that the server reports as Ollama.
    pub fn set_ollama_version(&self, version: &str) {
        self.inner.lock().unwrap().ollama.version = version.to_owned();
    }

    /// Makes the server say that it is Ollama.
    pub fn greet_as_ollama(&self) {
        self.inner.lock().unwrap().ollama.is_only_ollama = true;
    }

    /// Removes a model from the server until it is pulled. Its script is kept.
    pub fn remove_until_pulled(&self, model: &str) {
        self.inner.lock().unwrap().ollama.missing.push(model.to_owned());
    }
}
