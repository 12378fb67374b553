//! Failures of a server that answers chat completions, classified by whether a retry can help. Their messages quote the
//! server's replies only up to a maximum length and with the API key masked.

use std::ops::Deref;
use std::time::Instant;

use cfq_link::secret::Secret;
use cfq_proto::job::JobFailure;
use serde_json::Value;

/// Maximum length of a quote from an endpoint's message, in characters.
const MAX_QUOTE_CHARS: usize = 500;

/// Formats an error with its causes in one line.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

/// URL and API key of a server, for error messages: quotes from the server's replies are limited in length, and the API
/// key is masked if the server echoes it.
pub(super) struct Peer<'a> {
    pub(super) url: String,
    pub(super) key: Option<&'a Secret>,
}

impl Peer<'_> {
    /// Reads the next bytes of `answer`; fails if none arrive before `deadline`.
    pub(super) async fn chunk(
        &self,
        answer: &mut reqwest::Response,
        deadline: Instant,
    ) -> Result<Option<impl Deref<Target = [u8]> + use<>>, JobFailure> {
        match tokio::time::timeout_at(deadline.into(), answer.chunk()).await {
            Ok(read) => read.map_err(|error| self.unreachable(&error)),
            Err(_) => Err(JobFailure::Unavailable { reason: format!("no progress in the reply of {}", self.url) }),
        }
    }

    fn without_key(&self, text: &str) -> String {
        match self.key.map(Secret::reveal) {
            Some(key) if !key.is_empty() => text.replace(key, "***"),
            Some(_) | None => text.to_owned(),
        }
    }

    pub(super) fn quote(&self, text: &str) -> String {
        // The key is masked before the text is cut, so that no part of the key remains at the end.
        shorten(&self.without_key(text))
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error) -> JobFailure {
        JobFailure::Unavailable { reason: format!("{}: {}", self.url, self.quote(&with_causes(error))) }
    }

    pub(super) fn invalid_reply(&self, what: &str) -> JobFailure {
        // A parser's error contains the value that it could not parse.
        JobFailure::Engine { reason: format!("{} sent an invalid chat completion: {}", self.url, self.quote(what)) }
    }

    /// Converts an error status into a failure. Server errors, timeouts and rate limits can be retried.
    pub(super) fn error_status(&self, status: reqwest::StatusCode, body: &[u8]) -> JobFailure {
        let text = match serde_json::from_slice::<Value>(body) {
            Ok(value) => error_message(value.get("error").unwrap_or(&value)),
            Err(_) => String::from_utf8_lossy(body).trim().to_owned(),
        };
        let reason = format!("{} answered {status}: {}", self.url, self.quote(&text));
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
    use super::*;

    #[test]
    fn error_status_decides_whether_a_retry_can_help() {
        let peer = Peer { url: "u".to_owned(), key: None };
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
    fn echoed_key_is_masked_even_at_the_cut() {
        let key = Secret::new("sk-0123456789");
        let peer = Peer { url: "u".to_owned(), key: Some(&key) };
        let echo = format!("{}sk-0123456789 is wrong", "x".repeat(MAX_QUOTE_CHARS - 5));
        let text = peer.error_status(reqwest::StatusCode::UNAUTHORIZED, echo.as_bytes()).to_string();
        assert!(text.contains("***") && !text.contains("sk-"), "{text}");
        assert!(peer.invalid_reply("invalid type: sk-0123456789").to_string().ends_with("***"));
    }

    #[test]
    fn failures_quote_little_of_a_long_text() {
        let peer = Peer { url: "u".to_owned(), key: None };
        let text = "x".repeat(2 << 20);
        for failure in [peer.invalid_reply(&text), peer.error_status(reqwest::StatusCode::NOT_FOUND, text.as_bytes())] {
            let length = failure.to_string().chars().count();
            assert!(length < 2 * MAX_QUOTE_CHARS, "{length} characters");
        }
    }
}
