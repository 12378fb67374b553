//! The OpenAI-compatible API under `/v1`: any client of that protocol uses the models of the cluster. Each request is a job
//! of the queue and is placed like any other. The protocol: <https://platform.openai.com/docs/api-reference/chat>.
//!
//! A call lives as long as its client waits: a client that disconnects cancels it, and the database keeps nothing of it.

mod chat;
mod error;
mod message;
mod models;
mod open_call;
mod reply;
mod request;
mod streamed_text;
mod tools;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};

pub use error::OpenAiError;

use super::Api;

/// Prefix of the paths of this API.
pub const PREFIX: &str = "/v1";

/// The routes of this API that are answered at once.
pub fn short_routes() -> Router<Api> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/", get(models::list))
        .route("/v1/models/{*model}", get(models::show))
}

/// The routes whose requests take as long as a model generates.
pub fn long_routes() -> Router<Api> {
    Router::new()
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/chat/completions/", post(chat::complete))
}

/// The error for a path below `/v1` that does not exist.
pub fn unknown_path(path: &str) -> OpenAiError {
    let message = match path.trim_end_matches('/') {
        "/v1/completions" => "text completions are not supported: use POST /v1/chat/completions".to_owned(),
        "/v1/embeddings" => "embeddings are not supported: use another server for them".to_owned(),
        "/v1/responses" => {
            "the Responses API is not supported: set your client to the Chat Completions API (POST /v1/chat/completions)"
                .to_owned()
        }
        path if path.starts_with("/v1/v1") => format!("unknown path {path}: the base URL must contain /v1 only once"),
        path => format!("unknown path {path}: cfq has GET /v1/models and POST /v1/chat/completions"),
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
