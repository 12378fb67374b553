//! A few requests to a server, to tell users whether it can be used.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::timing::Timing;
use serde::Deserialize;

use super::endpoint::{Endpoint, EndpointError};
use super::protocol::Protocol;
use super::{EndpointClient, peer, report};

/// Longest wait for all replies.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
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

/// A list of models: in `data` with OpenAI's protocol, in `models` with Ollama's.
#[derive(Deserialize)]
struct ModelList {
    #[serde(alias = "models")]
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    #[serde(alias = "name")]
    id: String,
}

/// Requests the list of models of the endpoint `name` in this protocol.
///
/// # Errors
/// [`EndpointError`] if the endpoint is not configured correctly or its key cannot be loaded.
pub async fn probe(name: &str, endpoint: &Endpoint, protocol: Protocol) -> Result<Probe, EndpointError> {
    let client = EndpointClient::new(name, endpoint, &Timing::default(), Arc::default())?;
    let answered = tokio::time::timeout(PROBE_TIMEOUT, ask(&client, protocol)).await;
    Ok(answered
        .unwrap_or_else(|_| Probe::Down(format!("{} did not answer within {} s", client.url, PROBE_TIMEOUT.as_secs()))))
}

async fn ask(client: &EndpointClient, protocol: Protocol) -> Probe {
    let url = match protocol {
        Protocol::OpenAi => format!("{}/models", client.url),
        Protocol::Ollama => format!("{}/api/tags", client.root()),
    };
    let body = match get(client, url).await {
        Ok(body) => body,
        Err(failed) => return failed,
    };
    // Not every server has this list in the same form, so anything else is no error.
    let models = serde_json::from_slice::<ModelList>(&body).map_or_else(|_| Vec::new(), |list| list.data);
    if let Some(reason) = refusal(client, protocol).await {
        return Probe::Unusable(reason);
    }
    Probe::Answers { models: models.into_iter().map(|model| model.id).collect() }
}

/// Why Ollama must not be used in this protocol, because it would shorten prompts without saying so.
async fn refusal(client: &EndpointClient, protocol: Protocol) -> Option<String> {
    match protocol {
        // Other servers copy requests of Ollama, but not this greeting.
        Protocol::OpenAi => {
            let greeting = get(client, format!("{}/", client.root())).await.ok()?;
            let is_ollama = greeting.trim_ascii() == b"Ollama is running";
            is_ollama.then(|| {
                "is Ollama, which shortens long prompts without saying so if it is used by its OpenAI-compatible address"
                    .to_owned()
            })
        }
        Protocol::Ollama => report::unusable_ollama(client).await,
    }
}

/// The body of a reply; an empty one if it is too long.
async fn get(client: &EndpointClient, url: String) -> Result<Vec<u8>, Probe> {
    let mut response = match client.authorized(client.client.get(url)).send().await {
        Ok(response) => response,
        Err(error) => return Err(Probe::Down(format!("cannot reach {}: {}", client.url, peer::with_causes(&error)))),
    };
    match response.status().as_u16() {
        status @ (401 | 403) => return Err(Probe::RefusesKey(status)),
        500.. => return Err(Probe::Down(format!("{} answered {}", client.url, response.status()))),
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
