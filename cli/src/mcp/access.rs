//! What the tools reach: the scheduler, and files of the caller's machine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use cfq_deploy::Paths;
use cfq_proto::client::Client;
use rmcp::model::Extensions;

use super::error::ToolError;
use crate::connect::{self, ServerFile};

/// What a call may reach.
#[derive(Debug, Clone)]
pub enum Access {
    /// Of a caller on stdin: its files, and the scheduler of a data folder or in `CFQ_URL`.
    Local {
        /// The data folder.
        data: PathBuf,
        /// The cache folder.
        cache: PathBuf,
        /// Folder of the policies of this machine's server.
        server_policies_folder: PathBuf,
        /// The client of the last call, which all copies share.
        last: LastClient,
    },
    /// Of a caller over HTTP: only the scheduler that received the call, with the caller's token.
    Http {
        /// Client of the scheduler.
        client: Client,
        /// The server's root URL, as the caller reached it.
        url: String,
    },
}

/// The client of the last call, with the server that it reaches.
#[derive(Debug, Clone, Default)]
pub struct LastClient(Arc<Mutex<Option<(ServerFile, Client)>>>);

impl LastClient {
    /// A client of the server that runs now. A client holds open files, and its creation takes longer than a request,
    /// so it is used again until another server runs.
    fn get(&self, data: &Path) -> anyhow::Result<Client> {
        let Some(server) = connect::read_server_file(data) else { return connect::client(data) };
        // Plain data: consistent even if a thread panicked while it held the lock.
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, client)) = &*last
            && *known == server
        {
            return Ok(client.clone());
        }
        let client = connect::client(data)?;
        *last = Some((server, client.clone()));
        Ok(client)
    }
}

impl Access {
    /// Access of a program that the caller started.
    pub fn local(paths: &Paths) -> Self {
        Self::Local {
            data: paths.data.clone(),
            cache: paths.cache.clone(),
            server_policies_folder: paths.server_policies_folder(),
            last: LastClient::default(),
        }
    }

    /// A client of the scheduler. On stdin the scheduler is looked for in each call, because it may start after the
    /// editor, or restart at another address.
    pub fn client(&self) -> Result<Client, ToolError> {
        match self {
            Self::Local { data, last, .. } => Ok(last.get(data)?),
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
    /// Whether calls can reach files of the caller's machine.
    pub fn has_files(&self) -> bool {
        matches!(self, Self::Fixed(Access::Local { .. }))
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_is_used_again_until_another_server_runs() {
        cfq_link::outbound::install_crypto();
        let folder = tempfile::tempdir().unwrap();
        // Too deep for the path of a socket, so that each client would hold a handle of the folder.
        let data = folder.path().join("x".repeat(120));
        std::fs::create_dir_all(data.join("run")).unwrap();
        std::fs::write(connect::socket_file(&data), "").unwrap();
        let run = |pid: u32| {
            let server = ServerFile { url: "http://127.0.0.1:7710".to_owned(), pid, lan: false };
            std::fs::write(connect::server_file(&data), serde_json::to_string(&server).unwrap()).unwrap();
        };
        // Other tests of this process open and close files meanwhile, so only the handles of this folder are counted.
        let handles = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap();
            open.filter(|fd| {
                fd.as_ref().is_ok_and(|fd| std::fs::read_link(fd.path()).is_ok_and(|p| p.starts_with(&data)))
            })
            .count()
        };
        let last = LastClient::default();
        run(1);
        for _ in 0..20 {
            last.get(&data).unwrap();
        }
        assert_eq!(handles(), 1);
        run(2);
        last.get(&data).unwrap();
        assert_eq!(handles(), 2);
        std::fs::remove_file(connect::server_file(&data)).unwrap();
        assert!(last.get(&data).unwrap_err().to_string().contains("no cfq server is running"));
    }
}
