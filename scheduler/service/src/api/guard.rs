//! Request checks: an allowed Host header, no foreign Origin, the bearer token. Health checks need no token.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::Api;
use super::error::ApiError;
use crate::config::HttpConfig;

/// Time limit of a request that is not a feed. Database statements have shorter limits; this one covers everything
/// else.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);

/// Minimum length of a bearer token, in bytes.
const MIN_TOKEN_BYTES: usize = 16;

/// Why the bearer token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ApiTokenError {
    #[error("cannot read the bearer token in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "other users can read the token file {path} (mode {mode:o}): run chmod 600 on the file, or delete it to get a new \
         token"
    )]
    Permissions { path: PathBuf, mode: u32 },
    #[error(
        "the token in {path} has {length} bytes but needs at least {MIN_TOKEN_BYTES}: delete the file to get a new token"
    )]
    TooShort { path: PathBuf, length: usize },
}

/// The bearer token. `Debug` does not print it.
#[derive(Clone)]
pub struct ApiToken(String);

impl std::fmt::Debug for ApiToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl ApiToken {
    pub fn load(path: &Path) -> Result<Self, ApiTokenError> {
        use std::os::unix::fs::PermissionsExt;
        let read = |source| ApiTokenError::Read { path: path.to_owned(), source };
        let mode = std::fs::metadata(path).map_err(read)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(ApiTokenError::Permissions { path: path.to_owned(), mode });
        }
        let text = std::fs::read_to_string(path).map_err(read)?.trim().to_owned();
        if text.len() < MIN_TOKEN_BYTES {
            return Err(ApiTokenError::TooShort { path: path.to_owned(), length: text.len() });
        }
        Ok(Self(text))
    }

    /// Whether `offered` is the token. The time of the comparison depends only on the length of `offered`.
    fn matches(&self, offered: &str) -> bool {
        let own = self.0.as_bytes();
        let differ = offered
            .bytes()
            .enumerate()
            .fold(0u8, |differ, (i, byte)| differ | (byte ^ own.get(i % own.len().max(1)).copied().unwrap_or(0)));
        (differ == 0) & (offered.len() == own.len())
    }
}

/// The bearer token and the Host header values that requests must have.
#[derive(Debug)]
pub struct Guard {
    token: ApiToken,
    hosts: Vec<String>,
}

impl Guard {
    pub fn new(http: &HttpConfig, token: ApiToken) -> Self {
        let mut hosts: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        hosts.push(http.bind.ip().to_string());
        hosts.extend(http.allowed_hosts.iter().map(|h| h.to_ascii_lowercase()));
        Self { token, hosts }
    }

    fn check(&self, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        let text = |name| headers.get(name).and_then(|v: &axum::http::HeaderValue| v.to_str().ok());
        let host = text(header::HOST).unwrap_or_default();
        if !self.hosts.contains(&host_name(host)) {
            return Err(ApiError::forbidden(format!(
                "the host {host:?} is not allowed: add it to allowed_hosts under [server], or use http://127.0.0.1"
            )));
        }
        if let Some(origin) = headers.get(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or_default();
            let authority = origin.split_once("://").map(|(_, rest)| rest);
            if authority != Some(host) {
                return Err(ApiError::forbidden(format!(
                    "requests from pages of the origin {origin:?} are not allowed: use a client outside the browser"
                )));
            }
        }
        if matches!(path, "/healthz" | "/readyz") {
            return Ok(());
        }
        match text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer ")) {
            Some(offered) if self.token.matches(offered.trim()) => Ok(()),
            Some(_) => Err(ApiError::unauthorized(
                "wrong bearer token: use the one in the token file of this cfq, or set CFQ_TOKEN",
            )),
            None => Err(ApiError::unauthorized("missing bearer token: send the header Authorization: Bearer <token>")),
        }
    }
}

/// The name in a Host header without its port, in lower case.
fn host_name(host: &str) -> String {
    let name = match host.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_string(),
        Err(_) => match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.contains(':') => name.to_owned(),
            _ => host.to_owned(),
        },
    };
    name.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

/// Middleware that refuses requests without an allowed host, origin and token.
pub async fn authorize(State(api): State<Api>, request: Request, next: Next) -> Response {
    match api.guard.check(request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Middleware that counts requests by route pattern and measures the time until the response headers, for feeds too.
pub async fn record_metrics(State(api): State<Api>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().to_string();
    let path = request.extensions().get::<MatchedPath>().map_or_else(|| "other".to_owned(), |p| p.as_str().to_owned());
    let response = next.run(request).await;
    api.metrics.observe_http(&method, &path, response.status().as_u16(), began.elapsed().as_secs_f64());
    response
}

/// Middleware that ends a request after `REQUEST_TIMEOUT`.
pub async fn limit_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::busy("the request took too long and was cancelled: retry in a moment").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_name_excludes_the_port() {
        for (host, name) in [
            ("localhost:7710", "localhost"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("[::1]:7710", "::1"),
            ("[::1]", "::1"),
            ("Box.lan", "box.lan"),
        ] {
            assert_eq!(host_name(host), name, "{host}");
        }
    }

    #[test]
    fn token_matches_only_itself() {
        let token = ApiToken("0123456789abcdef".into());
        assert!(token.matches("0123456789abcdef"));
        for other in ["", "0", "0123456789abcdeg", "0123456789abcdef0", "0123456789abcdef0123456789abcdef"] {
            assert!(!token.matches(other), "{other}");
        }
        assert_eq!(format!("{token:?}"), "***");
    }

    #[test]
    fn token_file_readable_by_others_is_refused_with_the_fix() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = ApiToken::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(ApiToken::load(&path).unwrap().matches("0123456789abcdef"));
    }
}
