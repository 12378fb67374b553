//! The OpenAI-compatible API under `/v1`: any client of that protocol uses the models of the cluster. Each request is a job
//! of the queue and is placed like any other. The protocol: <https://platform.openai.com/docs/api-reference/chat>.
//!
//! A call lives as long as its client waits: a client that disconnects cancels it, and the database keeps nothing of it.

mod chat_request;
mod completions;
mod error;
mod message;
mod models;
mod open_call;
mod parameters;
mod reply;
mod schema;
mod streamed_text;
mod text_request;
mod tools;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};

pub use error::OpenAiError;
pub use schema::OpenAiErrorReply;

use super::Api;
use super::openapi::{Document, EVENT_STREAM, Operation};

/// Prefix of the paths of this API.
pub const PREFIX: &str = "/v1";
const JSON: &str = "application/json";
/// Name and description of the group of operations.
const TAG: (&str, &str) = ("OpenAI", "Model calls of clients of the OpenAI protocol; each is a job of the queue");

/// The routes of this API that are answered at once.
pub fn short_routes(document: &mut Document) -> Router<Api> {
    document
        .group(TAG.0, TAG.1)
        .add(
            Operation::get("/v1/models", "listModels", "List the models of the running nodes")
                .description("Also lists `alpha` and `beta`, the models of the agents.")
                .content::<schema::ModelList>(JSON),
            models::list,
        )
        .add(
            Operation::get("/v1/models/{*model}", "getModel", "Get one of the models")
                .parameter("model", "Id of the model, which may contain slashes")
                .content::<schema::Model>(JSON),
            models::show,
        )
        .into_router()
        .route("/v1/models/", get(models::list))
}

/// The routes whose requests take as long as a model generates.
pub fn long_routes(document: &mut Document) -> Router<Api> {
    document
        .group(TAG.0, TAG.1)
        .add(
            Operation::post("/v1/chat/completions", "createChatCompletion", "Continue a conversation")
                .description("With `stream`, the reply is chunks as server-sent events, and `[DONE]` at the end.")
                .body::<schema::ChatCompletionRequest>()
                .example(r#"{ "model": "alpha", "messages": [{ "role": "user", "content": "Say hello." }] }"#)
                .content::<schema::ChatCompletion>(JSON)
                .content::<schema::ChatCompletionChunk>(EVENT_STREAM),
            completions::chat,
        )
        .add(
            Operation::post("/v1/completions", "createCompletion", "Continue a text, without a chat template")
                .description(
                    "With `stream`, the reply is server-sent events of the same form, and `[DONE]` at the end.",
                )
                .body::<schema::TextCompletionRequest>()
                .example(r#"{ "model": "alpha", "prompt": "def add(a, b):", "max_tokens": 32 }"#)
                .content::<schema::TextCompletion>(JSON)
                .content::<schema::TextCompletion>(EVENT_STREAM),
            completions::text,
        )
        .into_router()
        .route("/v1/chat/completions/", post(completions::chat))
        .route("/v1/completions/", post(completions::text))
}

/// The error for a path below `/v1` that does not exist.
pub fn unknown_path(path: &str) -> OpenAiError {
    let message = match path.trim_end_matches('/') {
        "/v1/embeddings" => "embeddings are not supported: use another server for them".to_owned(),
        "/v1/responses" => {
            "the Responses API is not supported: set your client to the Chat Completions API (POST /v1/chat/completions)"
                .to_owned()
        }
        path if path.starts_with("/v1/v1") => format!("unknown path {path}: the base URL must contain /v1 only once"),
        path => format!("unknown path {path}: cfq has GET /v1/models, POST /v1/chat/completions and POST /v1/completions"),
    };
    OpenAiError::new(StatusCode::NOT_FOUND, message).with_code("unsupported_endpoint")
}

/// The error for a path of this API without its prefix; `None` for other paths.
pub fn path_without_prefix(path: &str) -> Option<OpenAiError> {
    let is_known =
        matches!(path.trim_end_matches('/'), "/chat/completions" | "/models" | "/completions" | "/responses");
    is_known.then(|| {
        let message = format!("unknown path {path}: the base URL of your client must end with /v1");
        OpenAiError::new(StatusCode::NOT_FOUND, message).with_code("unsupported_endpoint")
    })
}
