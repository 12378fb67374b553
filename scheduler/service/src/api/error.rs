//! API errors: a code for programs, and for people a message that says what is wrong, in which field, and the next
//! step.

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cfq_proto::http::{ErrorBody, ErrorCode, ErrorReply};

use crate::store::StoreError;

/// Seconds after which a client should retry while the database or NATS is unavailable.
const RETRY_AFTER_SECONDS: u32 = 2;

/// An error reply: its HTTP status and its body.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { status, body: ErrorBody { code, message: message.into(), field: None, retry_after: None } }
    }

    /// The message for the user.
    pub fn message(&self) -> &str {
        &self.body.message
    }

    pub fn into_parts(self) -> (StatusCode, ErrorBody) {
        (self.status, self.body)
    }

    /// 400: `field` has an unusable value.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, ErrorCode::Invalid, message);
        error.body.field = Some(field.into());
        error
    }

    /// Names the field of the request that the error is about.
    pub fn set_field(&mut self, field: &str) {
        self.body.field = Some(field.to_owned());
    }

    /// The error of the task with this index in a batch.
    pub fn in_task(mut self, index: usize) -> Self {
        self.body.message = format!("tasks[{index}].{}", self.body.message);
        self.body.field = self.body.field.map(|field| format!("tasks[{index}].{field}"));
        self
    }

    /// 400: the request as a whole cannot be read.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::Invalid, message)
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, ErrorCode::Unauthorized, message)
    }

    /// 405: the path does not support the method.
    pub fn unsupported_method(method: &Method, path: &str) -> Self {
        let message = format!("{path} does not support {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, ErrorCode::Invalid, message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, ErrorCode::Forbidden, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorCode::NotFound, message)
    }

    pub fn key_reused(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, ErrorCode::KeyReused, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, ErrorCode::Conflict, message)
    }

    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::TooLarge, message)
    }

    /// 429: a limit of the token is reached; the request may succeed after `retry_after` seconds.
    pub fn too_many_requests(message: impl Into<String>, retry_after: u32) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorCode::TooManyRequests, message);
        error.body.retry_after = Some(retry_after);
        error
    }

    /// 503: the same request may succeed after `RETRY_AFTER_SECONDS`.
    pub fn busy(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Busy, message);
        error.body.retry_after = Some(RETRY_AFTER_SECONDS);
        error
    }

    fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::Internal, message)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        if error.may_retry() {
            tracing::warn!(%error, cause = ?std::error::Error::source(&error), "database unavailable");
            Self::busy("the database is unavailable: retry in a moment, or run `cfq doctor` to find the cause")
        } else {
            tracing::error!(%error, cause = ?std::error::Error::source(&error), "request failed");
            Self::internal("the request failed in the scheduler: the cause is in its log")
        }
    }
}

impl From<crate::metrics::MetricsError> for ApiError {
    fn from(error: crate::metrics::MetricsError) -> Self {
        tracing::error!(%error, "cannot encode the metrics");
        Self::internal("the metrics cannot be encoded: the cause is in the scheduler's log")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let retry_after = self.body.retry_after;
        let mut response = (self.status, Json(ErrorReply { error: self.body })).into_response();
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Reply to every request that another machine sends over plain HTTP to a server with TLS.
pub async fn plaintext() -> ApiError {
    ApiError::malformed(
        "this server speaks HTTPS to other machines: use https:// in the URL. If the request contained an API token, \
         replace it with `cfq token rotate`, because others may have read it",
    )
}

/// Reply to every request on a connection above the limit.
pub async fn too_many_connections() -> ApiError {
    ApiError::busy("too many connections to the server are open: close some, or retry in a moment")
}
