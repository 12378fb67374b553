//! Address and token of the server: from `CFQ_URL` and `CFQ_TOKEN`, else from the files that the running `cfq up` of
//! this data folder wrote. `CFQ_TOKEN` is used only with `CFQ_URL`.
//!
//! The token in the data folder is sent only through the Unix socket in the data folder. Only the owner of the folder
//! can listen there; any user may listen on the TCP port of a server that was killed.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_proto::client::{Client, ClientError};
use serde::{Deserialize, Serialize};

use crate::exit;
use crate::membership::{self, Membership};
use crate::output;

/// The file `run/server.json`, which `cfq up` writes for the other commands; readable by its owner only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    pub url: String,
    pub pid: u32,
    /// Whether other machines reach the server.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lan: bool,
}

pub fn server_file(data: &Path) -> PathBuf {
    data.join("run").join("server.json")
}

/// The Unix socket of the running server. Its folder is private to the user who runs cfq.
pub fn socket_file(data: &Path) -> PathBuf {
    data.join("run").join("api.sock")
}

pub fn token_file(data: &Path) -> PathBuf {
    data.join("keys").join("api.token")
}

const HOW_TO_START: &str = "start cfq with `cfq up -d`, or set CFQ_URL and CFQ_TOKEN for a server elsewhere";
const HOW_TO_EXAMINE: &str =
    "if CFQ_URL is set, check that a cfq server listens there; otherwise see `cfq logs --process scheduler`";

/// Creates a client for the server in `CFQ_URL`; if that is unset, for the local server of this data folder.
pub fn client(data: &Path) -> anyhow::Result<Client> {
    if let Ok(url) = std::env::var("CFQ_URL") {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(exit::usage(format!(
                "CFQ_URL is {url:?}; it must be an HTTP address, for example http://127.0.0.1:7710"
            )));
        }
        return match std::env::var("CFQ_TOKEN") {
            Ok(token) => {
                if !is_encrypted_or_local(&url) {
                    output::print_stderr(&format!(
                        "cfq: warning: {url} is not encrypted, so others in the network can read CFQ_TOKEN: use https://"
                    ));
                }
                Ok(Client::new(http_client(data, &url)?, &url, token.trim()))
            }
            Err(_) if own_url(data).is_some_and(|own| own == url.trim_end_matches('/')) => local_client(data, &url),
            Err(_) => Err(exit::usage(format!(
                "CFQ_URL is {url}, not the local server of {}: set CFQ_TOKEN to the token of the server at CFQ_URL",
                data.display()
            ))),
        };
    }
    let path = server_file(data);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(exit::unreachable(match Membership::load(data).unwrap_or(None) {
                Some(joined) => format!(
                    "this machine runs models for {} and has no server of its own: run this command there, or set \
                     CFQ_URL={} and CFQ_TOKEN (the content of the file that `cfq token path` names there)",
                    joined.url, joined.url
                ),
                None => format!("no cfq server is running for {}: {HOW_TO_START}", data.display()),
            }));
        }
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Err(exit::usage(format!(
                "{} belongs to another user: run this as the user who started cfq, or set CFQ_URL and CFQ_TOKEN",
                path.display()
            )));
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let server: ServerFile = serde_json::from_str(&text)
        .with_context(|| format!("{} is damaged: run `cfq down`, then `cfq up -d`, to rewrite it", path.display()))?;
    if !socket_file(data).exists() {
        return Err(exit::unreachable(format!(
            "the server of {} has no socket for local commands, because it is of an older version or did not stop in \
             order: restart it with `cfq down` and `cfq up -d`",
            data.display()
        )));
    }
    local_client(data, &server.url)
}

pub fn is_encrypted_or_local(url: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else { return true };
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    url.scheme() == "https" || host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Creates an HTTP client for the server at `url`. With HTTPS, it trusts only the certificate authority in `CFQ_CA_FILE`;
/// if that is unset, that of the cluster which this machine joined at `url`; else those that the system trusts.
fn http_client(data: &Path, url: &str) -> anyhow::Result<reqwest::Client> {
    let chosen = std::env::var_os("CFQ_CA_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
    let joined = || {
        let joined = Membership::load(data).unwrap_or(None).filter(|joined| joined.url == url.trim_end_matches('/'))?;
        Some(membership::authority_file(data, joined.token_id))
    };
    let built = match chosen.or_else(joined).filter(|_| url.starts_with("https://")) {
        Some(file) => {
            let tls = cfq_link::tls::trust_only(&file)
                .map_err(|error| exit::usage(format!("{error:#}; it must hold the certificate authority of {url}")))?;
            cfq_link::outbound::tls_api_client(tls)
        }
        None => cfq_link::outbound::api_client(),
    };
    built.context("cannot create an HTTP client")
}

/// Creates a client for the server of this data folder, which `url` names. It reaches only this server, and uses the
/// token in the data folder.
pub fn local_client(data: &Path, url: &str) -> anyhow::Result<Client> {
    let path = socket_file(data);
    let short = cfq_link::unix_socket::short_path(&path).with_context(|| format!("cannot use {}", path.display()))?;
    let http = cfq_link::outbound::local_api_client(&short).context("cannot create an HTTP client")?;
    Ok(Client::with_token_file(http, url, &token_file(data)))
}

/// The membership of a machine that has joined a server, and on which no other server is chosen or runs.
pub fn only_membership(data: &Path) -> Option<Membership> {
    if std::env::var_os("CFQ_URL").is_some() || server_file(data).exists() {
        return None;
    }
    Membership::load(data).unwrap_or(None)
}

/// The server file, if it exists and is complete.
pub fn read_server_file(data: &Path) -> Option<ServerFile> {
    let text = std::fs::read_to_string(server_file(data)).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the URL of the local server of this data folder; `None` if the server file cannot be read.
fn own_url(data: &Path) -> Option<String> {
    read_server_file(data).map(|server| server.url)
}

/// Returns the URL in `CFQ_URL` if it is set and not that of the local server of this data folder.
pub fn foreign_url(data: &Path) -> Option<String> {
    let url = std::env::var("CFQ_URL").ok()?;
    let is_own = own_url(data).is_some_and(|own| own == url.trim_end_matches('/'));
    (!is_own).then_some(url)
}

/// The message of a client error, with the next step.
pub fn describe_error(error: &ClientError) -> String {
    if let ClientError::Unreachable { url, source } = error
        && let Some(problem) = cfq_link::tls::certificate_problem(source)
    {
        return format!(
            "the certificate of {url} is not accepted, because {problem}: set CFQ_CA_FILE to a copy of that server's file \
             keys/authority.pem in its data folder"
        );
    }
    match error {
        ClientError::Unreachable { url, source } if source.is_connect() => {
            format!("no server responds at {url}: {HOW_TO_START}")
        }
        ClientError::Unreachable { url, source } if source.is_timeout() => format!(
            "the server at {url} accepted the connection but did not answer in time: {HOW_TO_EXAMINE}, or restart it \
             with `cfq down` and `cfq up -d`"
        ),
        ClientError::Unreachable { url, source } => {
            format!("the connection to {url} failed ({}): {HOW_TO_EXAMINE}", root_cause(source))
        }
        ClientError::TokenFile { path, source } => {
            format!("cannot read the API token in {} ({source}): run this as the user who started cfq", path.display())
        }
        ClientError::Refused { status: 401, .. } => {
            "wrong API token, or one that was revoked or has expired: set CFQ_TOKEN to a valid token of the server, or run \
             this as the user who started the server"
                .to_owned()
        }
        ClientError::Refused { body, .. } => body.message.clone(),
        ClientError::UnexpectedResponse { url, source } => {
            format!("unexpected response from {url} ({source}): check that it is a cfq server, and of the same version")
        }
    }
}

/// The innermost cause of an error.
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_for_this_machine() {
        for url in ["https://den:1", "http://127.0.0.1:7710", "http://[::1]:7710", "http://localhost", "HTTPS://x"] {
            assert!(is_encrypted_or_local(url), "{url}");
        }
        for url in ["http://192.168.1.5:7710", "http://den", "http://localhost.evil", "http://[fd00::1]:7710"] {
            assert!(!is_encrypted_or_local(url), "{url}");
        }
    }

    #[test]
    fn server_file_of_0_1_is_read() {
        let text = include_str!("../tests/fixtures/server-0.1.json");
        let server: ServerFile = serde_json::from_str(text).unwrap();
        assert_eq!(server, ServerFile { url: "http://127.0.0.1:7710".to_owned(), pid: 4711, lan: false });
        assert_eq!(serde_json::to_string(&server).unwrap(), text.trim());
    }
}
