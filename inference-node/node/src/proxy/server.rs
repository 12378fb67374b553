//! Connection to one model server.

use std::time::Duration;

use cfq_link::outbound::endpoint_client;
use cfq_link::secret::Secret;

use super::endpoint::{Endpoint, EndpointError};

/// Maximum time in which a server loads a model.
const LOADING_TIMEOUT: Duration = Duration::from_secs(600);

/// Address, API key and HTTP clients of one model server.
pub(super) struct Server {
    /// Name of the endpoint in the configuration.
    pub(super) name: String,
    /// The configured URL, without a slash at the end.
    pub(super) url: String,
    pub(super) key: Option<Secret>,
    pub(super) client: reqwest::Client,
    /// Client for requests during which the server may load a model before it answers.
    pub(super) patient_client: reqwest::Client,
}

impl Server {
    /// `read_timeout` is the maximum time without data in a reply.
    pub(super) fn new(name: &str, endpoint: &Endpoint, read_timeout: Duration) -> Result<Self, EndpointError> {
        endpoint.check(name)?;
        let key = endpoint
            .key
            .as_deref()
            .map(Secret::load)
            .transpose()
            .map_err(|source| EndpointError::Key { endpoint: name.to_owned(), source })?;
        let client = |read_timeout| {
            endpoint_client(read_timeout).map_err(|source| EndpointError::Client { endpoint: name.to_owned(), source })
        };
        Ok(Self {
            name: name.to_owned(),
            url: endpoint.url.trim_end_matches('/').to_owned(),
            key,
            client: client(read_timeout)?,
            patient_client: client(read_timeout.max(LOADING_TIMEOUT))?,
        })
    }

    /// The URL without the version of the OpenAI protocol. Other requests of the server are below it.
    pub(super) fn root(&self) -> &str {
        self.url.strip_suffix("/v1").unwrap_or(&self.url)
    }

    /// Adds the API key to a request.
    pub(super) fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key.reveal()),
            None => request,
        }
    }
}
