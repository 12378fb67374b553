//! Finding the server: `CFQ_URL` and `CFQ_TOKEN`, else what the running `cfq up` of this data folder wrote down.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_proto::client::{Client, ClientError};
use serde::{Deserialize, Serialize};

use crate::exit;

/// What `cfq up` leaves for the other commands: `run/server.json`, readable by its owner only.
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

const START: &str = "start cfq with `cfq up -d`, or set CFQ_URL and CFQ_TOKEN for a server elsewhere";

pub fn client(data: &Path) -> anyhow::Result<Client> {
    let http = cfq_link::outbound::api_client().context("cannot make an HTTP client")?;
    if let Ok(url) = std::env::var("CFQ_URL") {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(exit::usage(format!("CFQ_URL is {url:?}: it must be like http://127.0.0.1:7710")));
        }
        let token = match std::env::var("CFQ_TOKEN") {
            Ok(token) => token,
            // The token of this data folder is for its own server and nobody else.
            Err(_) if own_url(data).is_some_and(|own| own == url.trim_end_matches('/')) => {
                read_token(&token_file(data))?
            }
            Err(_) => {
                return Err(exit::usage(format!(
                    "CFQ_URL names {url}, which is not the server of {}: set CFQ_TOKEN to that server's token",
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
            return Err(exit::unreachable(format!("no cfq server is running for {}: {START}", data.display())));
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
        .with_context(|| format!("{} is damaged: `cfq down`, then `cfq up -d`, writes it anew", path.display()))?;
    let token = match std::env::var("CFQ_TOKEN") {
        Ok(token) => token,
        Err(_) => read_token(&token_file(data))?,
    };
    Ok(Client::new(http, &server.url, token.trim()))
}

/// Where the server of this data folder said it listens.
fn own_url(data: &Path) -> Option<String> {
    let text = std::fs::read_to_string(server_file(data)).ok()?;
    serde_json::from_str::<ServerFile>(&text).ok().map(|server| server.url)
}

fn read_token(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        exit::usage(format!("cannot read the API token in {} ({error}): set CFQ_TOKEN", path.display()))
    })
}

/// The message of a client error with what to do about it.
pub fn explain(error: &ClientError) -> String {
    match error {
        ClientError::Unreachable { url, .. } => format!("nothing answers at {url}: {START}"),
        ClientError::Refused { status: 401, .. } => {
            "the server refused the token: set CFQ_TOKEN to its token, or run this as the user who started it"
                .to_owned()
        }
        ClientError::Refused { body, .. } => body.message.clone(),
        ClientError::Strange { url, source } => {
            format!(
                "{url} did not answer as cfq does ({source}): is another program on that port, or another version of cfq?"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_0_1_is_found() {
        let text = include_str!("../tests/fixtures/server-0.1.json");
        let server: ServerFile = serde_json::from_str(text).unwrap();
        assert_eq!(server, ServerFile { url: "http://127.0.0.1:7710".to_owned(), pid: 4711 });
        assert_eq!(serde_json::to_string(&server).unwrap(), text.trim());
    }
}
