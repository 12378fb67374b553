//! What the tools reach: the scheduler, and files of the caller's machine.

use std::path::PathBuf;

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use cfq_deploy::Paths;
use cfq_proto::client::Client;
use rmcp::model::Extensions;

use super::error::ToolError;
use crate::connect;

/// What a call may reach.
#[derive(Debug, Clone)]
pub enum Access {
    /// Of a caller on stdin: its files, and the scheduler of a data folder or in `CFQ_URL`.
    Local {
        /// The data folder.
        data: PathBuf,
        /// Folder of the archives for which the caller names none.
        archives: PathBuf,
    },
    /// Of a caller over HTTP: only the scheduler that received the call, with the caller's token.
    Http {
        /// Client of the scheduler.
        client: Client,
        /// The server's root URL, as the caller reached it.
        url: String,
    },
}

impl Access {
    /// Access of a program that the caller started.
    pub fn local(paths: &Paths) -> Self {
        Self::Local { data: paths.data.clone(), archives: paths.cache.join("archives") }
    }

    /// A client of the scheduler. On stdin it is created for each call, because the scheduler may start after the
    /// editor, or restart at another address.
    pub fn client(&self) -> Result<Client, ToolError> {
        match self {
            Self::Local { data, .. } => Ok(connect::client(data)?),
            Self::Http { client, .. } => Ok(client.clone()),
        }
    }
}

/// From where the access of each call comes.
#[derive(Debug, Clone)]
pub enum AccessSource {
    /// All calls have the same access.
    Fixed(Access),
    /// A call has the token of its HTTP request.
    Request {
        /// Client for the connections to the scheduler.
        http: reqwest::Client,
        /// Root URL at which this process reaches the scheduler.
        url: String,
    },
}

impl AccessSource {
    /// The access of a call; its HTTP request is in the extensions.
    pub fn of_call(&self, extensions: &Extensions) -> Result<Access, ToolError> {
        match self {
            Self::Fixed(access) => Ok(access.clone()),
            Self::Request { http, url } => extensions
                .get::<Parts>()
                .and_then(|request| of_request(http, url, &request.headers))
                .ok_or_else(|| ToolError("the HTTP request of this call has no bearer token".to_owned())),
        }
    }
}

/// The access of an HTTP request; `None` without a bearer token.
pub fn of_request(http: &reqwest::Client, url: &str, headers: &HeaderMap) -> Option<Access> {
    let text = |name| headers.get(name).and_then(|value: &axum::http::HeaderValue| value.to_str().ok());
    let token = text(header::AUTHORIZATION)?.strip_prefix("Bearer ")?.trim();
    let client = Client::new(http.clone(), url, token);
    let reached = text(header::HOST).map_or_else(|| url.to_owned(), |host| format!("http://{host}"));
    Some(Access::Http { client, url: reached })
}
