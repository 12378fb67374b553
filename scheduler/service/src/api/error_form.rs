//! The form of an error: that of the API, or that of the OpenAI protocol below its prefix.

use axum::http::{Method, Uri};
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::openai::error::{self as openai, OpenAiError};

/// The response with an error to a request for this path.
pub fn response(error: ApiError, path: &str) -> Response {
    if path.starts_with(openai::PREFIX) { OpenAiError::from(error).into_response() } else { error.into_response() }
}

pub async fn unknown_path(uri: Uri) -> Response {
    let path = uri.path();
    if path.starts_with(openai::PREFIX) {
        return openai::unknown_path(path).into_response();
    }
    if let Some(error) = openai::path_without_prefix(path) {
        return error.into_response();
    }
    let message = format!("unknown path {path}: the API is under /api/v1, and the OpenAI-compatible API under /v1");
    ApiError::not_found(message).into_response()
}

pub async fn unsupported_method(method: Method, uri: Uri) -> Response {
    response(ApiError::unsupported_method(&method, uri.path()), uri.path())
}
