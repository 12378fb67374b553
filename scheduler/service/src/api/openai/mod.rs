//! The OpenAI-compatible API under `/v1`: any client of that protocol uses the models of the cluster. Each request is a job
//! of the queue and is placed like any other. The protocol: <https://platform.openai.com/docs/api-reference/chat>.
//!
//! A call lives as long as its client waits: a client that hangs up cancels it, and nothing of it is kept afterwards.

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
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};

pub use error::OpenAiError;

use super::Api;

/// Prefix of the paths of this API.
pub const PREFIX: &str = "/v1/";

/// The routes of this API that are answered at once.
pub fn short_routes() -> Router<Api> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::show))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embeddings))
}

/// The routes whose requests take as long as a model generates.
pub fn long_routes() -> Router<Api> {
    Router::new().route("/v1/chat/completions", post(chat::complete))
}

async fn completions(State(_): State<Api>) -> OpenAiError {
    OpenAiError::new(StatusCode::NOT_IMPLEMENTED, "text completions are not supported: use POST /v1/chat/completions")
}

async fn embeddings(State(_): State<Api>) -> OpenAiError {
    OpenAiError::new(
        StatusCode::NOT_IMPLEMENTED,
        "embeddings are not supported: cfq runs language models only; use another server for embeddings",
    )
}
