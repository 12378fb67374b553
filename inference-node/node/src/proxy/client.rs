//! Client of one server: its health, what it tells about its models, and the slots for requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_engine::StateChanged;
use cfq_link::outbound::endpoint_client;
use cfq_link::secret::Secret;
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::endpoint::{Endpoint, EndpointError};
use super::peer;
use super::protocol::{Protocol, RemoteModel};
use super::report::{self, ModelReport};

/// Assumed context length of a model whose server does not report it, in tokens; it is common for current models. Such
/// servers refuse prompts that are too long.
const ASSUMED_CONTEXT_TOKENS: u32 = 131_072;
/// Timeout of a health check, and of the questions about models.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of heartbeat intervals between two health checks of a server that is up. Other servers are checked every
/// interval, as are servers that lack a model.
const HEALTHY_CHECK_INTERVALS: u32 = 5;

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
    /// The configured URL, without a slash at the end.
    pub(super) url: String,
    pub(super) key: Option<Secret>,
    pub(super) client: reqwest::Client,
    /// Maximum time without progress of a reply.
    pub(super) step_timeout: Duration,
    slots: Arc<Semaphore>,
    max_sequences: u32,
    /// Context length in the configuration.
    context_tokens: Option<u32>,
    health: Mutex<Health>,
    reports: Mutex<BTreeMap<RemoteModel, ModelReport>>,
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
            context_tokens: endpoint.context_tokens,
            health: Mutex::new(Health::Unknown),
            reports: Mutex::default(),
            changes,
        }))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The URL without the version of the OpenAI protocol. Other requests of the server are below it.
    pub(super) fn root(&self) -> &str {
        self.url.strip_suffix("/v1").unwrap_or(&self.url)
    }

    pub(super) fn changes(&self) -> Arc<StateChanged> {
        self.changes.clone()
    }

    pub(super) fn max_sequences(&self) -> u32 {
        self.max_sequences
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.slots.available_permits() as u32
    }

    /// A slot for one request; `None` if all are taken.
    pub(super) fn try_slot(&self) -> Option<OwnedSemaphorePermit> {
        self.slots.clone().try_acquire_owned().ok()
    }

    /// Adds a model behind the server.
    pub(super) fn add_model(&self, model: RemoteModel) {
        self.reports().insert(model, ModelReport::default());
    }

    pub(super) fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key.reveal()),
            None => request,
        }
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

    /// Records that the server has answered a request.
    pub(super) fn record_answer(&self) {
        self.set_health(Health::Up);
    }

    /// The request that tells whether the server is up.
    fn check_request(&self) -> reqwest::RequestBuilder {
        let mut models = self.reports().keys().map(|model| model.protocol).collect::<Vec<_>>();
        models.dedup();
        let url = match models[..] {
            [Protocol::Ollama] => format!("{}/api/version", self.root()),
            _ => format!("{}/models", self.url),
        };
        self.authorized(self.client.get(url)).timeout(CHECK_TIMEOUT)
    }

    /// Checks and sets the health of the server by a request that needs no model. Any response but a server error means
    /// that the server is up; a wrong key is reported by the jobs.
    pub(super) async fn check(&self) {
        let health = match self.check_request().send().await {
            Ok(response) if response.status().is_server_error() => {
                Health::Down(format!("{} answered {}", self.url, response.status()))
            }
            Ok(_) => {
                // The server may run other models than before.
                let is_new = *self.health() != Health::Up;
                self.ask_about_models(|report| is_new || report.unusable.is_some()).await;
                Health::Up
            }
            Err(error) => Health::Down(format!("cannot reach {}: {}", self.url, peer::with_causes(&error))),
        };
        self.set_health(health);
    }

    /// Asks the server about the models whose last report is selected.
    async fn ask_about_models(&self, is_selected: impl Fn(&ModelReport) -> bool) {
        let models: Vec<RemoteModel> =
            self.reports().iter().filter(|(_, report)| is_selected(report)).map(|(model, _)| model.clone()).collect();
        let ask = async {
            for model in models {
                let report = report::of_model(self, &model).await;
                self.set_report(&model, report);
            }
        };
        if tokio::time::timeout(CHECK_TIMEOUT, ask).await.is_err() {
            tracing::warn!(endpoint = self.name, "the server does not answer questions about its models in time");
        }
    }

    fn reports(&self) -> MutexGuard<'_, BTreeMap<RemoteModel, ModelReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what the server tells about a model; logs and notifies a change.
    fn set_report(&self, model: &RemoteModel, report: ModelReport) {
        let before = self.reports().insert(model.clone(), report.clone());
        if before.as_ref() == Some(&report) {
            return;
        }
        if let Some(reason) = &report.unusable {
            tracing::warn!(endpoint = self.name, model = model.name, reason, "model cannot be used");
        }
        self.changes.send_replace(());
    }

    /// What the server tells about a model.
    pub(super) fn report(&self, model: &RemoteModel) -> ModelReport {
        self.reports().get(model).cloned().unwrap_or_default()
    }

    /// Records that the server does not have the model. Returns the reason, for users.
    pub(super) fn record_missing(&self, model: &RemoteModel) -> String {
        let reason = report::missing(self, model);
        self.set_report(model, ModelReport { unusable: Some(reason.clone()), ..self.report(model) });
        reason
    }

    /// Length of the context of a model, in tokens: that of the configuration, else the reported one, else an assumed one.
    pub(super) fn context_tokens(&self, model: &RemoteModel) -> u32 {
        let report = self.report(model);
        let longest = report.max_context_tokens.unwrap_or(u32::MAX);
        match (self.context_tokens, model.protocol) {
            (Some(tokens), _) => tokens.min(longest),
            (None, Protocol::OpenAi) => report.context_tokens.unwrap_or(ASSUMED_CONTEXT_TOKENS),
            (None, Protocol::Ollama) => report.context_tokens.unwrap_or(report::OLLAMA_CONTEXT_TOKENS).min(longest),
        }
    }

    /// Checks the health of the server in an endless loop: frequently while it or one of its models cannot be used, else
    /// less often.
    pub async fn watch(self: Arc<Self>, timing: Timing) {
        loop {
            self.check().await;
            let is_usable = *self.health() == Health::Up && self.reports().values().all(|r| r.unusable.is_none());
            let intervals = if is_usable { HEALTHY_CHECK_INTERVALS } else { 1 };
            tokio::time::sleep(timing.heartbeat() * intervals).await;
        }
    }

    /// Residency of a model behind the server.
    pub(super) fn residency(&self, model: &RemoteModel) -> Residency {
        match &*self.health() {
            Health::Unknown => Residency::Loading,
            Health::Down(reason) => Residency::Unusable { reason: reason.clone() },
            Health::Up => match self.report(model).unusable {
                Some(reason) => Residency::Unusable { reason },
                None => Residency::Resident,
            },
        }
    }
}
