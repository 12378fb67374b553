//! Models behind an OpenAI-compatible server: another machine's engine, Ollama, vLLM, llama.cpp, a paid service.
//!
//! The endpoint is asked for a stream, so that tokens flow and a cancel reaches it by closing the connection. What it says
//! is mapped to whether a retry can help, and how much it may send is bounded. Whether it is up is learned from a
//! check every few seconds and from the jobs themselves.

mod chat;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cfq_link::outbound::endpoint_client;
use cfq_link::secret::{Secret, SecretError};
use cfq_proto::job::{JobFailure, Prompt, Written};
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{KvTiers, ModelState, Residency};
use cfq_proto::timing::Timing;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::candle::Changes;
use crate::engine::{Admitted, Ended, Engine, Outbox, Refused, generation};

/// Endpoints do not say how long a sequence may be; this is what current models take. The endpoint's own refusal is
/// what counts.
const CONTEXT: u32 = 131_072;

/// How to reach one server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Base address with the version, as in `http://127.0.0.1:8080/v1`.
    pub url: String,
    /// `env:NAME` or `file:PATH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// At most this many requests at once.
    #[serde(default = "default_sequences")]
    pub max_sequences: u32,
}

fn default_sequences() -> u32 {
    4
}

#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error("endpoint {endpoint}: {url:?} is not an http or https address")]
    Url { endpoint: String, url: String },
    /// The address goes into messages, logs and ledgers; so it may not hold a secret, and is not shown here.
    #[error(
        "endpoint {endpoint}: its url holds a user name or password: write it without, and name the API key with \
         key = \"env:NAME\" or \"file:PATH\""
    )]
    Userinfo { endpoint: String },
    #[error("endpoint {endpoint}: its key cannot be read")]
    Key {
        endpoint: String,
        #[source]
        source: SecretError,
    },
    #[error("endpoint {endpoint}: no http client")]
    Client {
        endpoint: String,
        #[source]
        source: reqwest::Error,
    },
}

/// The connection to one server, shared by the models behind it.
pub struct Server {
    name: String,
    url: String,
    key: Option<Secret>,
    client: reqwest::Client,
    /// Longest wait for the next step of an answer.
    patience: Duration,
    slots: Arc<Semaphore>,
    max_sequences: u32,
    /// Why it cannot be used; empty while it answers. `None` before the first check.
    down: Mutex<Option<String>>,
    changes: Arc<Changes>,
}

impl Server {
    pub fn new(
        name: &str,
        endpoint: &Endpoint,
        timing: &Timing,
        changes: Arc<Changes>,
    ) -> Result<Arc<Self>, EndpointError> {
        // Before anything else, and of what is no address as well: no message may show a password.
        let authority = endpoint.url.split_once("//").map_or(endpoint.url.as_str(), |(_, rest)| rest);
        if authority.split(['/', '\\', '?', '#']).next().is_some_and(|host| host.contains('@')) {
            return Err(EndpointError::Userinfo { endpoint: name.to_owned() });
        }
        let parsed = reqwest::Url::parse(&endpoint.url).ok().filter(|u| matches!(u.scheme(), "http" | "https"));
        if parsed.as_ref().is_some_and(|url| !url.username().is_empty() || url.password().is_some()) {
            return Err(EndpointError::Userinfo { endpoint: name.to_owned() });
        }
        if parsed.is_none() {
            return Err(EndpointError::Url { endpoint: name.to_owned(), url: endpoint.url.clone() });
        }
        let key = endpoint
            .key
            .as_deref()
            .map(Secret::load)
            .transpose()
            .map_err(|source| EndpointError::Key { endpoint: name.to_owned(), source })?;
        // Silence longer than a step may take would lose the lease anyway.
        let client = endpoint_client(timing.job_step())
            .map_err(|source| EndpointError::Client { endpoint: name.to_owned(), source })?;
        let max_sequences = endpoint.max_sequences.max(1);
        Ok(Arc::new(Self {
            name: name.to_owned(),
            url: endpoint.url.trim_end_matches('/').to_owned(),
            key,
            client,
            patience: timing.job_step(),
            slots: Arc::new(Semaphore::new(max_sequences as usize)),
            max_sequences,
            down: Mutex::new(None),
            changes,
        }))
    }

    fn down(&self) -> MutexGuard<'_, Option<String>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the last contact showed.
    fn seen(&self, problem: Option<String>) {
        let now = Some(problem.unwrap_or_default());
        let mut down = self.down();
        if *down != now {
            match now.as_deref() {
                Some("") => tracing::info!(endpoint = self.name, "endpoint answers"),
                reason => tracing::warn!(endpoint = self.name, reason, "endpoint cannot be used"),
            }
            *down = now;
            drop(down);
            self.changes.send_replace(());
        }
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key.reveal()),
            None => request,
        }
    }

    /// Any answer that is not a server's failure shows that it is up; a wrong key is the job's to report.
    async fn check(&self) {
        let ask = self.authorized(self.client.get(format!("{}/models", self.url))).timeout(Duration::from_secs(10));
        let problem = match ask.send().await {
            Ok(answer) if answer.status().is_server_error() => {
                Some(format!("{} answers {}", self.url, answer.status()))
            }
            Ok(_) => None,
            Err(error) => Some(format!("cannot reach {}: {}", self.url, chat::causes(&error))),
        };
        self.seen(problem);
    }

    /// Checks for ever: often while it is down, now and then while it answers.
    pub async fn watch(self: Arc<Self>, timing: Timing) {
        loop {
            self.check().await;
            let up = self.down().as_deref() == Some("");
            tokio::time::sleep(timing.beat() * if up { 5 } else { 1 }).await;
        }
    }

    fn residency(&self) -> Residency {
        match self.down().as_deref() {
            None => Residency::Loading,
            Some("") => Residency::Resident,
            Some(reason) => Residency::Unusable { reason: reason.to_owned() },
        }
    }
}

/// One model behind a server.
pub struct ProxyEngine {
    model: ModelId,
    /// The server's name for it.
    remote: String,
    server: Arc<Server>,
    /// Tokens per second of one sequence, as measured; 0 before the first.
    decode_rate: Arc<Mutex<f64>>,
}

impl ProxyEngine {
    /// `None` if the id does not name a model behind an OpenAI-compatible endpoint.
    pub fn new(model: ModelId, server: Arc<Server>) -> Option<Self> {
        match model.source() {
            ModelSource::OpenAi { model: remote, .. } => {
                Some(Self { model, remote, server, decode_rate: Arc::default() })
            }
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } | ModelSource::Ollama { .. } => {
                None
            }
        }
    }
}

impl Engine for ProxyEngine {
    fn state(&self) -> ModelState {
        let free = self.server.slots.available_permits() as u32;
        let rate = *self.decode_rate.lock().unwrap_or_else(PoisonError::into_inner);
        ModelState {
            model: self.model.clone(),
            residency: self.server.residency(),
            device: "proxy".to_owned(),
            need_bytes: 0,
            context_tokens: CONTEXT,
            kv_tokens_free: u64::from(CONTEXT) * u64::from(free),
            kv_tiers: KvTiers::default(),
            running: self.server.max_sequences - free.min(self.server.max_sequences),
            max_sequences: self.server.max_sequences,
            prefill_rate: 0.0,
            decode_rate: rate,
            load_rate: 0.0,
            tokens_per_byte: 0.3,
        }
    }

    fn admit_after(&self, prompt: Prompt, _written: Written) -> BoxFuture<'_, Result<Admitted, Refused>> {
        let slot = self.server.slots.clone().try_acquire_owned();
        let admitted = match slot {
            Ok(slot) => {
                self.server.changes.send_replace(());
                let slot = Slot { permit: Some(slot), changes: self.server.changes.clone() };
                let (server, remote) = (self.server.clone(), self.remote.clone());
                let rate = self.decode_rate.clone();
                Ok(Admitted::new(move || {
                    let (outbox, reader) = generation();
                    tokio::spawn(run(server, remote, prompt, outbox, slot, rate));
                    reader
                }))
            }
            // Its server counts the tokens, and here only slots are short.
            Err(_) => Err(Refused::NotNow { need: None, have: 0 }),
        };
        async move { admitted }.boxed()
    }
}

/// A slot at the server; the ledger hears when it is free again.
struct Slot {
    permit: Option<OwnedSemaphorePermit>,
    changes: Arc<Changes>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.permit.take();
        self.changes.send_replace(());
    }
}

async fn run(server: Arc<Server>, remote: String, prompt: Prompt, outbox: Outbox, slot: Slot, rate: Arc<Mutex<f64>>) {
    let began = Instant::now();
    let how = tokio::select! {
        how = chat::complete(&server, &remote, &prompt, &outbox, began) => how.map_err(Ended::Failed),
        () = outbox.cancelled() => Err(Ended::Cancelled),
    };
    match &how {
        Ok(done) => {
            server.seen(None);
            let decoding = done.usage.total_ms.saturating_sub(done.usage.first_token_ms);
            if decoding > 0 && done.usage.output_tokens > 8 {
                let measured = f64::from(done.usage.output_tokens) * 1e3 / decoding as f64;
                // Two digits are what a ledger needs.
                *rate.lock().unwrap_or_else(PoisonError::into_inner) = (measured / 10.0).round() * 10.0;
            }
        }
        Err(Ended::Failed(JobFailure::Unavailable { reason })) => {
            tracing::warn!(endpoint = server.name, reason, "endpoint failed");
            // One failed answer is not an endpoint down: the check tells.
            server.check().await;
        }
        Err(Ended::Failed(_) | Ended::Cancelled) => {}
    }
    drop(slot);
    outbox.end(how);
}
