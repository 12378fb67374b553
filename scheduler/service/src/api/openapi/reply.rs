//! What a handler returns, read from its type.

use axum::Json;
use axum::http::{HeaderName, StatusCode};
use axum::response::Response;
use axum::response::sse::Sse;
use cfq_proto::http::ErrorReply;
use schemars::{JsonSchema, Schema, SchemaGenerator};

use super::operation::SchemaOf;
use crate::api::error::ApiError;
use crate::api::openai::{OpenAiError, OpenAiErrorReply};

/// A handler whose reply is known. `Args` are the types of its arguments.
pub trait DocumentedHandler<Args> {
    type Output: Outcome;
}

macro_rules! documented_handler {
    ($($arg:ident),*) => {
        impl<F, Fut, $($arg),*> DocumentedHandler<($($arg,)*)> for F
        where
            F: Fn($($arg),*) -> Fut,
            Fut: Future<Output: Outcome>,
        {
            type Output = Fut::Output;
        }
    };
}

documented_handler!();
documented_handler!(A);
documented_handler!(A, B);
documented_handler!(A, B, C);
documented_handler!(A, B, C, D);

/// What a handler returns.
pub trait Outcome {
    /// The successful reply.
    type Reply: Reply;
    /// Name and schema of its errors, and of refusals before the request reaches the handler.
    const ERROR: (&'static str, SchemaOf);
}

impl<R: Reply, E: ErrorForm> Outcome for Result<R, E> {
    type Reply = R;
    const ERROR: (&'static str, SchemaOf) = (E::NAME, E::schema);
}

impl Outcome for &'static str {
    type Reply = Self;
    const ERROR: (&'static str, SchemaOf) = (ApiError::NAME, ApiError::schema);
}

/// The form of the errors of an API.
pub trait ErrorForm {
    const NAME: &'static str;
    fn schema(schemas: &mut SchemaGenerator) -> Schema;
}

impl ErrorForm for ApiError {
    const NAME: &'static str = "Error";
    fn schema(schemas: &mut SchemaGenerator) -> Schema {
        schemas.subschema_for::<ErrorReply>()
    }
}

impl ErrorForm for OpenAiError {
    const NAME: &'static str = "OpenAiError";
    fn schema(schemas: &mut SchemaGenerator) -> Schema {
        schemas.subschema_for::<OpenAiErrorReply>()
    }
}

/// The content of a successful reply: media type and schema; `None` if the operation names it.
pub trait Reply {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)>;
}

const JSON: &str = "application/json";
const TEXT: &str = "text/plain";
pub const EVENT_STREAM: &str = "text/event-stream";

impl<T: JsonSchema> Reply for Json<T> {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        Some((JSON, schemas.subschema_for::<T>()))
    }
}

impl<R: Reply> Reply for (StatusCode, R) {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        R::content(schemas)
    }
}

impl Reply for &'static str {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        Some((TEXT, schemas.subschema_for::<str>()))
    }
}

/// A text with its content type.
impl Reply for ([(HeaderName, &'static str); 1], Vec<u8>) {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        Some((TEXT, schemas.subschema_for::<str>()))
    }
}

impl<S> Reply for Sse<S> {
    fn content(schemas: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        Some((EVENT_STREAM, schemas.subschema_for::<str>()))
    }
}

impl Reply for Response {
    fn content(_: &mut SchemaGenerator) -> Option<(&'static str, Schema)> {
        None
    }
}
