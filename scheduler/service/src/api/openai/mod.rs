//! The OpenAI-compatible API under `/v1`: any client of that protocol uses the models of the cluster. Each request is a job
//! of the queue and is placed like any other. The protocol: <https://platform.openai.com/docs/api-reference/chat>.
//!
//! A call lives as long as its client waits: a client that disconnects cancels it, and the database keeps nothing of it.

mod chat_request;
mod completions;
pub mod error;
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
use cfq_proto::http::ApiTokenRole;

pub use error::OpenAiError;
pub use schema::OpenAiErrorReply;

use super::Api;
use super::openapi::{Document, EVENT_STREAM, Operation};

/// Seconds after which a client should retry if too many calls are open.
pub const CALL_RETRY_AFTER_SECONDS: u32 = 5;
const JSON: &str = "application/json";
/// Name and description of the group of operations.
const TAG: (&str, &str) = ("OpenAI", "Model calls of clients of the OpenAI protocol; each is a job of the queue");

/// The routes of this API that are answered at once.
pub fn short_routes(document: &mut Document) -> Router<Api> {
    document
        .group(TAG.0, TAG.1)
        .add(
            Operation::get("/v1/models", "listModels", "List the models of the running nodes")
                .alias("/v1/models/")
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
}

/// The routes whose requests take as long as a model generates.
pub fn long_routes(document: &mut Document) -> Router<Api> {
    document
        .group(TAG.0, TAG.1)
        .add(
            Operation::post("/v1/chat/completions", "createChatCompletion", "Continue a conversation")
                .alias("/v1/chat/completions/")
                .role(ApiTokenRole::Submit)
                .description("With `stream`, the reply is chunks as server-sent events, and `[DONE]` at the end.")
                .body::<schema::ChatCompletionRequest>()
                .example(r#"{ "model": "alpha", "messages": [{ "role": "user", "content": "Say hello." }] }"#)
                .content::<schema::ChatCompletion>(JSON)
                .content::<schema::ChatCompletionChunk>(EVENT_STREAM),
            completions::chat,
        )
        .add(
            Operation::post("/v1/completions", "createCompletion", "Continue a text, without a chat template")
                .alias("/v1/completions/")
                .role(ApiTokenRole::Submit)
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
}
