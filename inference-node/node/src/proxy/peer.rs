//! Failures of a server that answers chat completions, classified by whether a retry, a shorter prompt or nothing can
//! help. Their messages quote the server's replies only up to a maximum length and with the API key masked.

use std::ops::Deref;
use std::time::Instant;

use cfq_link::secret::Secret;
use cfq_proto::job::JobFailure;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::context_error::ContextExceeded;
use super::context_limit::ContextLimit;
use crate::error_text::why_unreachable;

/// Maximum length of a quote from an endpoint's message, in characters.
const MAX_QUOTE_CHARS: usize = 500;

/// URL of a server, or name of a program, for error messages: quotes from its replies are limited in length, and secrets
/// are masked if it echoes them.
pub(super) struct Peer<'a> {
    pub(super) name: String,
    /// The API key, or other secrets that a reply may echo.
    pub(super) secrets: Vec<&'a str>,
    /// The context and what the prompt needs of it; `None` if the request has no prompt.
    pub(super) context: Option<ContextLimit>,
}

impl<'a> Peer<'a> {
    pub(super) fn new(name: String, key: Option<&'a Secret>) -> Self {
        Self { name, secrets: key.map(Secret::reveal).into_iter().collect(), context: None }
    }

    /// Parses one part of a reply.
    pub(super) fn parse<T: DeserializeOwned>(&self, part: &[u8]) -> Result<T, JobFailure> {
        serde_json::from_slice(part).map_err(|error| {
            self.invalid_reply(&format!("{error} in {:?}", self.quote(&String::from_utf8_lossy(part))))
        })
    }

    /// The failure for an error in place of a part of the reply.
    pub(super) fn error_in_reply(&self, error: &Value) -> JobFailure {
        let message = error_message(error);
        self.too_long(error, &message)
            .unwrap_or_else(|| JobFailure::Unavailable { reason: format!("{}: {}", self.name, self.quote(&message)) })
    }

    fn too_long(&self, error: &Value, message: &str) -> Option<JobFailure> {
        Some(self.context?.failure(ContextExceeded::of(error, message)?))
    }

    /// Reads the next bytes of `answer`; fails if none arrive before `deadline`.
    pub(super) async fn chunk(
        &self,
        answer: &mut reqwest::Response,
        deadline: Instant,
    ) -> Result<Option<impl Deref<Target = [u8]> + use<>>, JobFailure> {
        match tokio::time::timeout_at(deadline.into(), answer.chunk()).await {
            Ok(read) => read.map_err(|error| self.unreachable(&error)),
            Err(_) => Err(JobFailure::Unavailable { reason: format!("no progress in the reply of {}", self.name) }),
        }
    }

    fn without_secrets(&self, text: &str) -> String {
        let secrets = self.secrets.iter().filter(|secret| !secret.is_empty());
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }

    pub(super) fn quote(&self, text: &str) -> String {
        // The key is masked before the text is cut, so that no part of the key remains at the end.
        shorten(&self.without_secrets(text))
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error) -> JobFailure {
        JobFailure::Unavailable { reason: format!("{}: {}", self.name, self.quote(&why_unreachable(error))) }
    }

    pub(super) fn invalid_reply(&self, what: &str) -> JobFailure {
        // A parser's error contains the value that it could not parse.
        JobFailure::Engine { reason: format!("{} sent an invalid chat completion: {}", self.name, self.quote(what)) }
    }

    /// Converts an error status into a failure. Server errors, timeouts and rate limits can be retried. A prompt that does
    /// not fit is found by the message, as servers use several statuses for it.
    pub(super) fn error_status(&self, status: reqwest::StatusCode, body: &[u8]) -> JobFailure {
        let body = serde_json::from_slice(body)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(body).trim().to_owned()));
        let error = body.get("error").unwrap_or(&body);
        let text = error_message(error);
        if let Some(failure) = self.too_long(error, &text) {
            return failure;
        }
        let reason = format!("{} answered {status}: {}", self.name, self.quote(&text));
        if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) {
            JobFailure::Unavailable { reason }
        } else {
            JobFailure::Rejected { reason }
        }
    }
}

/// The message in an error object of any shape.
pub(super) fn error_message(error: &Value) -> String {
    let message = error.get("message").or_else(|| error.get("detail")).unwrap_or(error);
    message.as_str().map_or_else(|| message.to_string(), str::to_owned)
}

/// Shortens a quote to [`MAX_QUOTE_CHARS`].
fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTE_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::{OutputFormat, Prompt, Sampling};

    use super::*;

    #[test]
    fn error_status_decides_whether_a_retry_can_help() {
        let peer = Peer::new("u".to_owned(), None);
        let of =
            |code: u16, body: &str| peer.error_status(reqwest::StatusCode::from_u16(code).unwrap(), body.as_bytes());
        for code in [500, 502, 503, 429, 408] {
            assert!(matches!(of(code, "busy"), JobFailure::Unavailable { .. }), "{code}");
        }
        for code in [301, 400, 401, 403, 404, 422] {
            assert!(matches!(of(code, "no"), JobFailure::Rejected { .. }), "{code}");
        }
        let text = of(401, r#"{"error":{"message":"wrong key","type":"x"}}"#).to_string();
        assert!(text.ends_with("401 Unauthorized: wrong key"), "{text}");
    }

    #[test]
    fn prompt_that_does_not_fit_is_no_other_failure() {
        let prompt =
            Prompt { messages: vec![], sampling: Sampling::default(), format: OutputFormat::Text, ..Prompt::default() };
        let context = ContextLimit::of(&prompt, 131_072);
        let peer = Peer { context: Some(context), ..Peer::new("u".to_owned(), None) };
        let message = "This model's maximum context length is 8192 tokens.";
        let too_long = JobFailure::TooLong { need: 8193, have: 8192 };
        let body = serde_json::json!({ "error": { "message": message } });
        for status in [reqwest::StatusCode::BAD_REQUEST, reqwest::StatusCode::INTERNAL_SERVER_ERROR] {
            assert_eq!(peer.error_status(status, body.to_string().as_bytes()), too_long);
        }
        assert_eq!(peer.error_in_reply(&body["error"]), too_long);
        let unknown = serde_json::json!("the input length exceeds the context length");
        assert_eq!(peer.error_in_reply(&unknown), JobFailure::TooLong { need: 131_073, have: 131_072 });
    }

    #[test]
    fn echoed_key_is_masked_even_at_the_cut() {
        let key = Secret::new("sk-0123456789");
        let peer = Peer::new("u".to_owned(), Some(&key));
        let echo = format!("{}sk-0123456789 is wrong", "x".repeat(MAX_QUOTE_CHARS - 5));
        let text = peer.error_status(reqwest::StatusCode::UNAUTHORIZED, echo.as_bytes()).to_string();
        assert!(text.contains("***") && !text.contains("sk-"), "{text}");
        assert!(peer.invalid_reply("invalid type: sk-0123456789").to_string().ends_with("***"));
    }

    #[test]
    fn failures_quote_little_of_a_long_text() {
        let peer = Peer::new("u".to_owned(), None);
        let text = "x".repeat(2 << 20);
        for failure in [peer.invalid_reply(&text), peer.error_status(reqwest::StatusCode::NOT_FOUND, text.as_bytes())] {
            let length = failure.to_string().chars().count();
            assert!(length < 2 * MAX_QUOTE_CHARS, "{length} characters");
        }
    }
}
