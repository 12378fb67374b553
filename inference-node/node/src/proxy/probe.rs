//! A single request to a server, to tell users whether it can be used.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::timing::Timing;
use serde::Deserialize;

use super::endpoint::{Endpoint, EndpointError};
use super::{EndpointClient, peer};

/// Longest wait for the whole reply.
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
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
}

/// Requests the list of models of the endpoint `name`.
///
/// # Errors
/// [`EndpointError`] if the endpoint is not configured correctly or its key cannot be loaded.
pub async fn probe(name: &str, endpoint: &Endpoint) -> Result<Probe, EndpointError> {
    let client = EndpointClient::new(name, endpoint, &Timing::default(), Arc::default())?;
    let answered = tokio::time::timeout(PROBE_TIMEOUT, ask(&client)).await;
    Ok(answered
        .unwrap_or_else(|_| Probe::Down(format!("{} did not answer within {} s", client.url, PROBE_TIMEOUT.as_secs()))))
}

async fn ask(client: &EndpointClient) -> Probe {
    let mut response = match client.authorized(client.client.get(format!("{}/models", client.url))).send().await {
        Ok(response) => response,
        Err(error) => return Probe::Down(format!("cannot reach {}: {}", client.url, peer::with_causes(&error))),
    };
    match response.status().as_u16() {
        status @ (401 | 403) => return Probe::RefusesKey(status),
        500.. => return Probe::Down(format!("{} answered {}", client.url, response.status())),
        200..=299 => {}
        status => return Probe::NoList(status),
    }
    let mut body = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        if body.len() + bytes.len() > MAX_LIST_BYTES {
            return Probe::Answers { models: Vec::new() };
        }
        body.extend_from_slice(&bytes);
    }
    // Not every server has this list in the same form, so anything else is no error.
    let models = serde_json::from_slice::<ModelList>(&body).map_or_else(|_| Vec::new(), |list| list.data);
    Probe::Answers { models: models.into_iter().map(|model| model.id).collect() }
}
