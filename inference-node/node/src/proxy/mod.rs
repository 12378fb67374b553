//! Models behind an OpenAI-compatible server: another machine's engine, Ollama, vLLM, llama.cpp, a paid service.
//!
//! The reply is requested as a stream, so that tokens arrive as they are generated and a cancellation reaches the
//! server by closing the connection. Errors are classified by whether a retry can help, and the size of a reply is
//! limited. The health of a server is known from a check every few seconds and from the jobs themselves.

mod chat;
mod chunk;
mod control_names;
mod endpoint;
mod peer;
mod probe;
mod reported_names;
mod sse;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cfq_engine::{AdmitError, Admitted, Engine, Generation, GenerationError, Outbox, StateChanged};
use cfq_link::outbound::endpoint_client;
use cfq_link::secret::Secret;
use cfq_proto::job::{GeneratedTokens, JobFailure, Prompt};
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{KvTiers, ModelState, Residency};
use cfq_proto::timing::Timing;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::proxy::control_names::ControlNames;
pub use endpoint::{Endpoint, EndpointError};
pub use probe::{Probe, probe};

/// Assumed context length of a model behind an endpoint, in tokens; it is common for current models. Endpoints do not
/// report the actual length; they refuse prompts that are too long.
const ASSUMED_CONTEXT_TOKENS: u32 = 131_072;
/// Assumed number of tokens per byte of a prompt, since endpoints do not report this ratio.
const TOKENS_PER_BYTE: f64 = 0.3;
/// Timeout of a health check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of heartbeat intervals between two health checks of a server that is up. Other servers are checked every
/// interval.
const HEALTHY_CHECK_INTERVALS: u32 = 5;
/// A reply must have more tokens than this to be used for measuring the decode rate.
const MIN_MEASURED_TOKENS: u32 = 8;

/// Whether a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Health {
    /// The server has not been checked yet.
    Unknown,
    Up,
    /// The server does not answer or reports a server error, with the reason.
    Down(String),
}

/// Client of one server, shared by the models behind it.
pub struct EndpointClient {
    name: String,
    url: String,
    key: Option<Secret>,
    client: reqwest::Client,
    /// Maximum time without progress of a reply.
    step_timeout: Duration,
    slots: Arc<Semaphore>,
    max_sequences: u32,
    health: Mutex<Health>,
    /// Names of the control tokens of each model behind this server; `None` if the server does not tell them.
    control_names: Mutex<BTreeMap<String, Option<Arc<ControlNames>>>>,
    changes: Arc<StateChanged>,
}

impl EndpointClient {
    /// A client of the endpoint `name`. `changes` is notified when the state of a model behind it changes.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn new(
        name: &str,
        endpoint: &Endpoint,
        timing: &Timing,
        changes: Arc<StateChanged>,
    ) -> Result<Arc<Self>, EndpointError> {
        endpoint.check(name)?;
        let key = endpoint
            .key
            .as_deref()
            .map(Secret::load)
            .transpose()
            .map_err(|source| EndpointError::Key { endpoint: name.to_owned(), source })?;
        // The read timeout is the limit of one step: without progress for longer than that, the job would lose its
        // lease anyway.
        let client = endpoint_client(timing.job_step_timeout())
            .map_err(|source| EndpointError::Client { endpoint: name.to_owned(), source })?;
        let max_sequences = endpoint.max_sequences.max(1);
        Ok(Arc::new(Self {
            name: name.to_owned(),
            url: endpoint.url.trim_end_matches('/').to_owned(),
            key,
            client,
            step_timeout: timing.job_step_timeout(),
            slots: Arc::new(Semaphore::new(max_sequences as usize)),
            max_sequences,
            health: Mutex::new(Health::Unknown),
            control_names: Mutex::default(),
            changes,
        }))
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the health; logs and notifies a change.
    fn set_health(&self, now: Health) {
        let mut health = self.health();
        if *health != now {
            match &now {
                Health::Down(reason) => tracing::warn!(endpoint = self.name, reason, "endpoint cannot be used"),
                Health::Unknown | Health::Up => tracing::info!(endpoint = self.name, "endpoint answers"),
            }
            *health = now;
            drop(health);
            self.changes.send_replace(());
        }
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key.reveal()),
            None => request,
        }
    }

    /// Checks and sets the health of the server by requesting its list of models. Any response but a server error means
    /// that the server is up; a wrong key is reported by the jobs.
    async fn check(&self) {
        let request = self.authorized(self.client.get(format!("{}/models", self.url))).timeout(CHECK_TIMEOUT);
        let health = match request.send().await {
            Ok(response) if response.status().is_server_error() => {
                Health::Down(format!("{} answered {}", self.url, response.status()))
            }
            Ok(_) => {
                // The server may run another model than before.
                if *self.health() != Health::Up {
                    self.read_control_names().await;
                }
                Health::Up
            }
            Err(error) => Health::Down(format!("cannot reach {}: {}", self.url, peer::with_causes(&error))),
        };
        self.set_health(health);
    }

    /// Asks the server for the names of the control tokens of each model.
    async fn read_control_names(&self) {
        let models: Vec<String> = self.names().keys().cloned().collect();
        let read = async {
            for remote in models {
                let names = reported_names::of_model(self, &remote).await.map(Arc::new);
                self.names().insert(remote, names);
            }
        };
        if tokio::time::timeout(CHECK_TIMEOUT, read).await.is_err() {
            tracing::warn!(
                endpoint = self.name,
                "the server does not say in time which control tokens its models have"
            );
        }
    }

    fn names(&self) -> MutexGuard<'_, BTreeMap<String, Option<Arc<ControlNames>>>> {
        self.control_names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of the control tokens of the server's model `remote`; `None` if the server does not tell them.
    fn control_names(&self, remote: &str) -> Option<Arc<ControlNames>> {
        self.names().get(remote).cloned().flatten()
    }

    /// Checks the health of the server in an endless loop: frequently while it is not up, else less often.
    pub async fn watch(self: Arc<Self>, timing: Timing) {
        loop {
            self.check().await;
            let intervals = if *self.health() == Health::Up { HEALTHY_CHECK_INTERVALS } else { 1 };
            tokio::time::sleep(timing.heartbeat() * intervals).await;
        }
    }

    fn residency(&self) -> Residency {
        match &*self.health() {
            Health::Unknown => Residency::Loading,
            Health::Up => Residency::Resident,
            Health::Down(reason) => Residency::Unusable { reason: reason.clone() },
        }
    }
}

/// One model behind a server.
pub struct ProxyEngine {
    model: ModelId,
    /// Name of the model on the server.
    remote: String,
    server: Arc<EndpointClient>,
    /// Measured decode rate of one sequence, in tokens per second; 0 before the first measurement.
    decode_rate: Arc<Mutex<f64>>,
}

impl ProxyEngine {
    /// An engine for `model`; `None` if the id does not name a model behind an OpenAI-compatible endpoint.
    pub fn new(model: ModelId, server: Arc<EndpointClient>) -> Option<Self> {
        match model.source() {
            ModelSource::OpenAi { model: remote, .. } => {
                server.names().insert(remote.clone(), None);
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
            context_tokens: ASSUMED_CONTEXT_TOKENS,
            kv_tokens_free: u64::from(ASSUMED_CONTEXT_TOKENS) * u64::from(free),
            kv_tiers: KvTiers::default(),
            running: self.server.max_sequences - free.min(self.server.max_sequences),
            max_sequences: self.server.max_sequences,
            prefill_rate: 0.0,
            decode_rate: rate,
            load_rate: 0.0,
            tokens_per_byte: TOKENS_PER_BYTE,
        }
    }

    fn admit_resumed(
        &self,
        prompt: Prompt,
        _generated: GeneratedTokens,
    ) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
        let slot = self.server.slots.clone().try_acquire_owned();
        let admitted = match slot {
            Ok(slot) => {
                self.server.changes.send_replace(());
                let slot = RequestSlot { permit: Some(slot), changes: self.server.changes.clone() };
                let (server, remote) = (self.server.clone(), self.remote.clone());
                let rate = self.decode_rate.clone();
                Ok(Admitted::new(move || {
                    let (outbox, reader) = Generation::channel();
                    tokio::spawn(run(server, remote, prompt, outbox, slot, rate));
                    reader
                }))
            }
            // Only the number of requests is limited here, since tokens are counted by the server.
            Err(_) => Err(AdmitError::NotNow { need: None, have: 0 }),
        };
        async move { admitted }.boxed()
    }
}

/// A slot for one request. Dropping it frees the slot and notifies of the change.
struct RequestSlot {
    permit: Option<OwnedSemaphorePermit>,
    changes: Arc<StateChanged>,
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.permit.take();
        self.changes.send_replace(());
    }
}

async fn run(
    server: Arc<EndpointClient>,
    remote: String,
    prompt: Prompt,
    outbox: Outbox,
    slot: RequestSlot,
    rate: Arc<Mutex<f64>>,
) {
    let started = Instant::now();
    let outcome = tokio::select! {
        outcome = chat::complete(&server, &remote, &prompt, &outbox, started) => {
            outcome.map_err(GenerationError::Failed)
        }
        () = outbox.cancelled() => Err(GenerationError::Cancelled),
    };
    match &outcome {
        Ok(done) => {
            server.set_health(Health::Up);
            let decode_ms = done.usage.total_ms.saturating_sub(done.usage.first_token_ms);
            if decode_ms > 0 && done.usage.output_tokens > MIN_MEASURED_TOKENS {
                let measured = f64::from(done.usage.output_tokens) * 1e3 / decode_ms as f64;
                // Rounded, so that the reported state does not change with every job.
                *rate.lock().unwrap_or_else(PoisonError::into_inner) = (measured / 10.0).round() * 10.0;
            }
        }
        Err(GenerationError::Failed(JobFailure::Unavailable { reason })) => {
            tracing::warn!(endpoint = server.name, reason, "endpoint failed");
            // A failed reply does not prove that the server is down, so its health is checked.
            server.check().await;
        }
        Err(GenerationError::Failed(_) | GenerationError::Cancelled) => {}
    }
    drop(slot);
    outbox.end(outcome);
}
