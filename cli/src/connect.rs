//! Address and token of the server: from `CFQ_URL` and `CFQ_TOKEN`, else from the files that the running `cfq up` of
//! this data folder wrote.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_proto::client::{Client, ClientError};
use serde::{Deserialize, Serialize};

use crate::exit;

/// The file `run/server.json`, which `cfq up` writes for the other commands; readable by its owner only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    pub url: String,
    pub pid: u32,
}

pub fn server_file(data: &Path) -> PathBuf {
    data.join("run").join("server.json")
}

pub fn token_file(data: &Path) -> PathBuf {
    data.join("keys").join("api.token")
}

const HOW_TO_START: &str = "start cfq with `cfq up -d`, or set CFQ_URL and CFQ_TOKEN for a server elsewhere";

/// Creates a client for the server in `CFQ_URL`; if that is unset, for the local server of this data folder.
pub fn client(data: &Path) -> anyhow::Result<Client> {
    let http = cfq_link::outbound::api_client().context("cannot create an HTTP client")?;
    if let Ok(url) = std::env::var("CFQ_URL") {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(exit::usage(format!(
                "CFQ_URL is {url:?}; it must be an HTTP address, for example http://127.0.0.1:7710"
            )));
        }
        let token = match std::env::var("CFQ_TOKEN") {
            Ok(token) => token,
            // The token in this data folder is sent only to the local server of this data folder.
            Err(_) if own_url(data).is_some_and(|own| own == url.trim_end_matches('/')) => {
                read_token(&token_file(data))?
            }
            Err(_) => {
                return Err(exit::usage(format!(
                    "CFQ_URL is {url}, not the local server of {}: set CFQ_TOKEN to the token of the server at CFQ_URL",
                    data.display()
                )));
            }
        };
        return Ok(Client::new(http, &url, token.trim()));
    }
    let path = server_file(data);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(exit::unreachable(format!("no cfq server is running for {}: {HOW_TO_START}", data.display())));
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
    let token = match std::env::var("CFQ_TOKEN") {
        Ok(token) => token,
        Err(_) => read_token(&token_file(data))?,
    };
    Ok(Client::new(http, &server.url, token.trim()))
}

/// Returns the URL of the local server of this data folder; `None` if the server file cannot be read.
fn own_url(data: &Path) -> Option<String> {
    let text = std::fs::read_to_string(server_file(data)).ok()?;
    serde_json::from_str::<ServerFile>(&text).ok().map(|server| server.url)
}

fn read_token(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        exit::usage(format!("cannot read the API token in {} ({error}): set CFQ_TOKEN", path.display()))
    })
}

/// The message of a client error, with the next step.
pub fn describe_error(error: &ClientError) -> String {
    match error {
        ClientError::Unreachable { url, .. } => format!("no server responds at {url}: {HOW_TO_START}"),
        ClientError::Refused { status: 401, .. } => {
            "wrong API token: set CFQ_TOKEN to the server's token, or run this as the user who started the server"
                .to_owned()
        }
        ClientError::Refused { body, .. } => body.message.clone(),
        ClientError::UnexpectedResponse { url, source } => {
            format!("unexpected response from {url} ({source}): check that it is a cfq server, and of the same version")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_file_of_0_1_is_read() {
        let text = include_str!("../tests/fixtures/server-0.1.json");
        let server: ServerFile = serde_json::from_str(text).unwrap();
        assert_eq!(server, ServerFile { url: "http://127.0.0.1:7710".to_owned(), pid: 4711 });
        assert_eq!(serde_json::to_string(&server).unwrap(), text.trim());
    }
}
