//! Configuration of the servers of models.

use cfq_link::secret::{Secret, SecretError};
use serde::{Deserialize, Serialize};

use super::protocol::Protocol;

/// Minimum configured context length, in tokens. It holds the prompt's template and a short reply.
pub(super) const MIN_CONFIGURED_CONTEXT_TOKENS: u32 = 1024;
/// Default number of concurrent requests.
const DEFAULT_SEQUENCES: u32 = 4;
/// The same for Ollama, whose own default is one request at a time (`OLLAMA_NUM_PARALLEL`): the others would wait there
/// without a sign of progress.
const DEFAULT_OLLAMA_SEQUENCES: u32 = 1;

/// Configuration of one server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Base URL: with the version for the OpenAI protocol, as in `http://127.0.0.1:8080/v1`; with or without it for
    /// Ollama.
    pub url: String,
    /// API key, as `env:NAME` or `file:PATH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Maximum number of concurrent requests. If unset, 1 for a server with models in Ollama's protocol, else 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sequences: Option<u32>,
    /// Context length of its models, in tokens. Ollama loads models with it; other servers have a length of their own,
    /// which they report or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u32>,
}

/// Why an endpoint cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The URL is invalid.
    #[error("endpoint {endpoint}: {url:?} is not an http or https URL, such as http://127.0.0.1:8080/v1")]
    Url { endpoint: String, url: String },
    /// No prompt fits a context of this length.
    #[error(
        "endpoint {endpoint}: context_tokens = {tokens} is too small: use at least {MIN_CONFIGURED_CONTEXT_TOKENS}"
    )]
    Context { endpoint: String, tokens: u32 },
    /// The URL contains credentials. Such a URL is refused, because URLs appear in messages, logs and heartbeats. This
    /// message does not contain the URL.
    #[error(
        "endpoint {endpoint}: its url contains a user name or password: remove it, and configure the API key with \
         key = \"env:NAME\" or \"file:PATH\""
    )]
    Userinfo { endpoint: String },
    /// The API key cannot be loaded.
    #[error("endpoint {endpoint}: cannot read its key")]
    Key {
        endpoint: String,
        #[source]
        source: SecretError,
    },
    /// No HTTP client could be created.
    #[error("endpoint {endpoint}: cannot create an HTTP client")]
    Client {
        endpoint: String,
        #[source]
        source: reqwest::Error,
    },
}

impl Endpoint {
    /// Maximum number of concurrent requests to a server with models in these protocols.
    pub(super) fn sequences(&self, mut protocols: impl Iterator<Item = Protocol>) -> u32 {
        let default = match protocols.any(|protocol| protocol == Protocol::Ollama) {
            true => DEFAULT_OLLAMA_SEQUENCES,
            false => DEFAULT_SEQUENCES,
        };
        self.max_sequences.unwrap_or(default).max(1)
    }

    /// Checks the URL and the form of the key. The key is not loaded: it may be in the environment of another process.
    ///
    /// # Errors
    /// [`EndpointError`], without [`EndpointError::Client`].
    pub fn check(&self, name: &str) -> Result<(), EndpointError> {
        // Checked before the URL is parsed, since the message about an invalid URL shows it, and no message may show a
        // password.
        let authority = self.url.split_once("//").map_or(self.url.as_str(), |(_, rest)| rest);
        if authority.split(['/', '\\', '?', '#']).next().is_some_and(|host| host.contains('@')) {
            return Err(EndpointError::Userinfo { endpoint: name.to_owned() });
        }
        let parsed = reqwest::Url::parse(&self.url).ok().filter(|u| matches!(u.scheme(), "http" | "https"));
        if parsed.as_ref().is_some_and(|url| !url.username().is_empty() || url.password().is_some()) {
            return Err(EndpointError::Userinfo { endpoint: name.to_owned() });
        }
        if parsed.is_none() {
            return Err(EndpointError::Url { endpoint: name.to_owned(), url: self.url.clone() });
        }
        if let Some(tokens) = self.context_tokens.filter(|tokens| *tokens < MIN_CONFIGURED_CONTEXT_TOKENS) {
            return Err(EndpointError::Context { endpoint: name.to_owned(), tokens });
        }
        let source = self.key.as_deref().map_or(Ok(()), Secret::check_form);
        source.map_err(|source| EndpointError::Key { endpoint: name.to_owned(), source })
    }
}
