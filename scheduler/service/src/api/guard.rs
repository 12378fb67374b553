//! Who may talk to the API: the right Host, no foreign Origin, the bearer token. Health checks need no token.

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

/// Longest a request that is no feed may take. Statements end earlier; this is the net under all of them.
const LONGEST: Duration = Duration::from_secs(8);

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("cannot read the bearer token in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the token file {path} can be read by others (mode {mode:o}): chmod 600 it, or delete it for a new one")]
    Open { path: PathBuf, mode: u32 },
    #[error("the token in {path} has {length} characters, at least 16 are needed: delete it for a new one")]
    Short { path: PathBuf, length: usize },
}

/// The bearer token. Never printed.
#[derive(Clone)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Token {
    pub fn load(path: &Path) -> Result<Self, TokenError> {
        use std::os::unix::fs::PermissionsExt;
        let read = |source| TokenError::Read { path: path.to_owned(), source };
        let mode = std::fs::metadata(path).map_err(read)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Open { path: path.to_owned(), mode });
        }
        let text = std::fs::read_to_string(path).map_err(read)?.trim().to_owned();
        if text.len() < 16 {
            return Err(TokenError::Short { path: path.to_owned(), length: text.len() });
        }
        Ok(Self(text))
    }

    /// In time that depends on the offered text's length alone.
    fn is(&self, offered: &str) -> bool {
        let own = self.0.as_bytes();
        let differ = offered
            .bytes()
            .enumerate()
            .fold(0u8, |differ, (i, byte)| differ | (byte ^ own.get(i % own.len().max(1)).copied().unwrap_or(0)));
        (differ == 0) & (offered.len() == own.len())
    }
}

#[derive(Debug)]
pub struct Guard {
    token: Token,
    hosts: Vec<String>,
}

impl Guard {
    pub fn new(http: &HttpConfig, token: Token) -> Self {
        let mut hosts: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        hosts.push(http.bind.ip().to_string());
        hosts.extend(http.allowed_hosts.iter().map(|h| h.to_ascii_lowercase()));
        Self { token, hosts }
    }

    fn check(&self, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        let text = |name| headers.get(name).and_then(|v: &axum::http::HeaderValue| v.to_str().ok());
        let host = text(header::HOST).unwrap_or_default();
        if !self.hosts.contains(&name_of(host)) {
            return Err(ApiError::forbidden(format!(
                "this cfq does not answer for the host {host:?}; add it to allowed_hosts under [server], or use http://127.0.0.1"
            )));
        }
        if let Some(origin) = headers.get(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or_default();
            let authority = origin.split_once("://").map(|(_, rest)| rest);
            if authority != Some(host) {
                return Err(ApiError::forbidden(format!("requests from pages of {origin:?} are refused")));
            }
        }
        if matches!(path, "/healthz" | "/readyz") {
            return Ok(());
        }
        match text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer ")) {
            Some(offered) if self.token.is(offered.trim()) => Ok(()),
            Some(_) => Err(ApiError::unauthorized(
                "the token is not this cfq's; use the one in its token file, or set CFQ_TOKEN",
            )),
            None => Err(ApiError::unauthorized("a bearer token is needed: Authorization: Bearer <token>")),
        }
    }
}

/// The name in a Host header, without its port.
fn name_of(host: &str) -> String {
    let name = match host.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_string(),
        Err(_) => match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.contains(':') => name.to_owned(),
            _ => host.to_owned(),
        },
    };
    name.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

pub async fn admit(State(api): State<Api>, request: Request, next: Next) -> Response {
    match api.guard.check(request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Counts what was routed, by its pattern; a feed's time is that to its head.
pub async fn count(State(api): State<Api>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().to_string();
    let path = request.extensions().get::<MatchedPath>().map_or_else(|| "other".to_owned(), |p| p.as_str().to_owned());
    let response = next.run(request).await;
    api.metrics.http(&method, &path, response.status().as_u16(), began.elapsed().as_secs_f64());
    response
}

pub async fn within_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(LONGEST, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::busy("this took too long and was given up; ask again in a moment").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_read_without_its_port() {
        for (host, name) in [
            ("localhost:7710", "localhost"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("[::1]:7710", "::1"),
            ("[::1]", "::1"),
            ("Box.lan", "box.lan"),
        ] {
            assert_eq!(name_of(host), name, "{host}");
        }
    }

    #[test]
    fn a_token_is_itself_and_nothing_else() {
        let token = Token("0123456789abcdef".into());
        assert!(token.is("0123456789abcdef"));
        for other in ["", "0", "0123456789abcdeg", "0123456789abcdef0", "0123456789abcdef0123456789abcdef"] {
            assert!(!token.is(other), "{other}");
        }
        assert_eq!(format!("{token:?}"), "***");
    }

    #[test]
    fn a_token_file_others_can_read_is_refused_with_the_way_out() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Token::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(Token::load(&path).unwrap().is("0123456789abcdef"));
    }
}
