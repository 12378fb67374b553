//! Errors in the form of the OpenAI protocol: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cfq_proto::http::{ErrorBody, ErrorCode};
use serde::Serialize;

use crate::api::error::ApiError;
use crate::store::StoreError;

/// Prefix of the paths of this API.
pub const PREFIX: &str = "/v1";
/// Seconds after which a client should repeat a request that was refused because the cluster is busy or unavailable.
const UNAVAILABLE_RETRY_S: u32 = 2;

/// Maximum length of a quoted text of the client, in characters.
const MAX_QUOTED_CHARS: usize = 100;

/// An error reply.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenAiError {
    status: StatusCode,
    body: Body,
    retry_after: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Body {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl OpenAiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        Self { status, body: Body { message: message.into(), kind, param: None, code: None }, retry_after: None }
    }

    /// 400: the value of `param` cannot be used.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, message);
        error.body.param = Some(param.into());
        error
    }

    /// A text of the client in quotes, cut to a length that fits into a message.
    pub fn quoted(text: &str) -> String {
        match text.char_indices().nth(MAX_QUOTED_CHARS) {
            Some((end, _)) => format!("{:?}...", &text[..end]),
            None => format!("{text:?}"),
        }
    }

    /// 503: the same request may succeed later.
    pub fn unavailable(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        error.retry_after = Some(UNAVAILABLE_RETRY_S);
        error
    }

    pub fn set_param(&mut self, param: &str) {
        self.body.param = Some(param.to_owned());
    }

    /// Names the parameter that constrains the output, if the engine refused the constraint; the errors of the engine's
    /// grammars name the constraint.
    pub fn with_constraint(mut self, param: Option<&'static str>) -> Self {
        let is_of_constraint = self.body.message.contains("constrain");
        if self.status == StatusCode::BAD_REQUEST && self.body.param.is_none() && is_of_constraint {
            self.body.param = param.map(str::to_owned);
        }
        self
    }

    pub fn with_code(mut self, code: &'static str) -> Self {
        self.body.code = Some(code);
        self
    }

    /// The body, for an error in a stream whose status has been sent already.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "error": self.body })
    }
}

impl From<ApiError> for OpenAiError {
    fn from(error: ApiError) -> Self {
        let (status, ErrorBody { code, message, field, retry_after }) = error.into_parts();
        let mut error = Self::new(status, message);
        error.body.param = field;
        error.body.code = match code {
            ErrorCode::Unauthorized => Some("invalid_api_key"),
            ErrorCode::TooManyRequests => Some("rate_limit_exceeded"),
            ErrorCode::TooLarge => Some("request_too_large"),
            ErrorCode::Invalid
            | ErrorCode::Forbidden
            | ErrorCode::NotFound
            | ErrorCode::KeyReused
            | ErrorCode::Conflict
            | ErrorCode::Busy
            | ErrorCode::Internal => None,
        };
        error.retry_after = retry_after;
        error
    }
}

impl From<StoreError> for OpenAiError {
    fn from(error: StoreError) -> Self {
        ApiError::from(error).into()
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
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
