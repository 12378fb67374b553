//! A few requests to a server, to tell users whether it can be used.

use std::time::Duration;

use serde::Deserialize;

use super::endpoint::{Endpoint, EndpointError};
use super::protocol::Protocol;
use super::report;
use super::server::Server;
use crate::error_text::why_unreachable;

/// Longest wait for each reply.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// What Ollama answers at its root.
const OLLAMA_GREETING: &[u8] = b"Ollama is running";
/// Maximum size of a list of models, in bytes.
const MAX_LIST_BYTES: usize = 4 << 20;

/// What a server answered to the request for its list of models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// It answers; the names of its models, if it lists them.
    Answers {
        /// Names of the models; empty if the server does not list them.
        models: Vec<String>,
    },
    /// It answers the request with this status, so the URL is probably wrong.
    NoList(u16),
    /// It refuses the API key, with this status.
    RefusesKey(u16),
    /// It cannot be reached or reports an error of its own, for this reason.
    Down(String),
    /// It cannot be used with this protocol, for this reason.
    Unusable(String),
}

#[derive(Deserialize)]
struct OpenAiList {
    data: Vec<OpenAiModel>,
}

#[derive(Deserialize)]
struct OpenAiModel {
    id: String,
}

#[derive(Deserialize)]
struct OllamaList {
    models: Vec<OllamaModel>,
}

#[derive(Deserialize)]
struct OllamaModel {
    name: String,
}

/// Names in a list of models. Not every server has this list in the same form, so another form gives no names.
fn listed_names(list: &[u8], protocol: Protocol) -> Vec<String> {
    match protocol {
        Protocol::OpenAi => serde_json::from_slice::<OpenAiList>(list)
            .map_or_else(|_| Vec::new(), |list| list.data.into_iter().map(|model| model.id).collect()),
        Protocol::Ollama => serde_json::from_slice::<OllamaList>(list)
            .map_or_else(|_| Vec::new(), |list| list.models.into_iter().map(|model| model.name).collect()),
    }
}

/// Requests the list of models of the endpoint `name` in this protocol.
///
/// # Errors
/// [`EndpointError`] if the endpoint is not configured correctly or its key cannot be loaded.
pub async fn probe(name: &str, endpoint: &Endpoint, protocol: Protocol) -> Result<Probe, EndpointError> {
    let server = Server::new(name, endpoint, PROBE_TIMEOUT)?;
    let url = match protocol {
        Protocol::OpenAi => format!("{}/models", server.url),
        Protocol::Ollama => format!("{}/api/tags", server.root()),
    };
    let list = match tokio::time::timeout(PROBE_TIMEOUT, get(&server, url)).await {
        Ok(Ok(list)) => list,
        Ok(Err(failed)) => return Ok(failed),
        Err(_) => {
            let seconds = PROBE_TIMEOUT.as_secs();
            return Ok(Probe::Down(format!("{} did not answer within {seconds} s", server.url)));
        }
    };
    // A server that does not answer this can be used all the same.
    let refused = tokio::time::timeout(PROBE_TIMEOUT, refusal(&server, protocol)).await;
    Ok(match refused.ok().flatten() {
        Some(reason) => Probe::Unusable(reason),
        None => Probe::Answers { models: listed_names(&list, protocol) },
    })
}

/// Why the server must not be used with this protocol: it would silently truncate prompts, or is another program.
async fn refusal(server: &Server, protocol: Protocol) -> Option<String> {
    match protocol {
        // Other servers copy requests of Ollama, but not this greeting.
        Protocol::OpenAi => {
            let greeting = get(server, format!("{}/", server.root())).await.ok()?;
            let is_ollama = greeting.trim_ascii() == OLLAMA_GREETING;
            is_ollama.then(|| "is Ollama, whose OpenAI-compatible API silently truncates long prompts".to_owned())
        }
        Protocol::Ollama => report::unusable_ollama(server).await.ok().flatten(),
    }
}

/// The body of a reply; an empty one if it is too long.
async fn get(server: &Server, url: String) -> Result<Vec<u8>, Probe> {
    let mut response = match server.authorized(server.client.get(url)).send().await {
        Ok(response) => response,
        Err(error) => return Err(Probe::Down(format!("cannot reach {}: {}", server.url, why_unreachable(&error)))),
    };
    match response.status().as_u16() {
        status @ (401 | 403) => return Err(Probe::RefusesKey(status)),
        500.. => return Err(Probe::Down(format!("{} answered {}", server.url, response.status()))),
        200..=299 => {}
        status => return Err(Probe::NoList(status)),
    }
    let mut body = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        if body.len() + bytes.len() > MAX_LIST_BYTES {
            return Ok(Vec::new());
        }
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_although_servers_add_fields_of_the_other_protocol() {
        for (list, protocol, expected) in [
            (r#"{"data":[{"id":"a/b","name":"A: B"}]}"#, Protocol::OpenAi, vec!["a/b"]),
            (r#"{"models":[{"name":"x"}],"object":"list","data":[{"id":"m.gguf"}]}"#, Protocol::OpenAi, vec!["m.gguf"]),
            (r#"{"models":[{"name":"q:7b","model":"q:7b"}]}"#, Protocol::Ollama, vec!["q:7b"]),
            (r#"["a"]"#, Protocol::OpenAi, vec![]),
        ] {
            assert_eq!(listed_names(list.as_bytes(), protocol), expected, "{list}");
        }
    }
}
