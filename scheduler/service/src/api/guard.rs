//! Request checks: an allowed Host header, no foreign Origin, the bearer token. Health checks, `POST /join`, and the page
//! with the description of the API need no token.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::Response;

use super::Api;
use super::access::{Access, Tokens};
use super::error::ApiError;
use super::error_form;
use super::machines::JOIN_PATH;
use super::openapi;
use crate::config::HttpConfig;

/// Time limit of a request that is not a feed. Database statements have shorter limits; this one covers everything
/// else.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);

/// The bearer token and the Host header values that requests must have.
#[derive(Debug)]
pub struct Guard {
    tokens: Tokens,
    hosts: Vec<String>,
    /// Whether each IP address is accepted too, because this machine may get another one at any time. A web page in a browser
    /// that was redirected here (DNS rebinding) has a name in this header, never an address.
    any_address: bool,
}

impl Guard {
    pub fn new(http: &HttpConfig, tokens: Tokens) -> Self {
        let mut hosts: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        hosts.push(http.bind.ip().to_string());
        hosts.extend(http.allowed_hosts.iter().map(|h| h.to_ascii_lowercase()));
        Self { tokens, hosts, any_address: http.lan.is_some() }
    }

    /// The tokens with which clients may use the API.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// Checks a request. Returns the access of the request's token; `None` if the path needs no token.
    async fn check(&self, path: &str, headers: &HeaderMap) -> Result<Option<Access>, ApiError> {
        let text = |name| headers.get(name).and_then(|v: &axum::http::HeaderValue| v.to_str().ok());
        let host = text(header::HOST).unwrap_or_default();
        let name = host_name(host);
        let is_address = name.parse::<IpAddr>().is_ok();
        if !(self.hosts.contains(&name) || (self.any_address && is_address)) {
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
        if matches!(path, "/healthz" | "/readyz" | JOIN_PATH) || openapi::is_public(path) {
            return Ok(None);
        }
        match text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer ")) {
            Some(offered) => match self.tokens.check(offered.trim()).await? {
                Some(access) => Ok(Some(access)),
                None => Err(ApiError::unauthorized(
                    "wrong bearer token (API key), or one that was revoked or has expired: use the content of \
                     keys/api.token in the data folder of this cfq (`cfq token path` prints its path), or a token of \
                     `cfq token create --role`",
                )),
            },
            None => Err(ApiError::unauthorized(
                "missing bearer token (API key): send the header Authorization: Bearer <token>; `cfq token path` prints \
                 the path of the file that holds it",
            )),
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

/// Middleware that refuses requests without an allowed host, origin and token. Handlers find the [`Access`] in the request's
/// extensions.
pub async fn authorize(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    match api.guard.check(request.uri().path(), request.headers()).await {
        Ok(access) => {
            if let Some(access) = access {
                request.extensions_mut().insert(access);
            }
            next.run(request).await
        }
        Err(refusal) => error_form::response(refusal, request.uri().path()),
    }
}

/// Middleware that counts requests by route pattern and measures the time until the response headers, for feeds too.
pub async fn record_metrics(State(api): State<Api>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = method_label(request.method());
    let path = request.extensions().get::<MatchedPath>().map_or_else(|| "other".to_owned(), |p| p.as_str().to_owned());
    let response = next.run(request).await;
    api.metrics.observe_http(method, &path, response.status().as_u16(), began.elapsed().as_secs_f64());
    response
}

/// The method as a label. A client may send any token as a method, and each value of a label takes memory for ever.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        _ => "other",
    }
}

/// Middleware that ends a request after `REQUEST_TIMEOUT`.
pub async fn limit_time(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let error = ApiError::busy("the request took too long and was cancelled: retry in a moment");
            error_form::response(error, &path)
        }
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
}
