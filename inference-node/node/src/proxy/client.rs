//! Client of one server: its health, what it reports about its models, and its request slots.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cfq_engine::StateChanged;
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use futures::StreamExt;

use super::endpoint::{Endpoint, EndpointError};
use super::protocol::{Protocol, RemoteModel};
use super::report::{self, ModelReport};
use super::server::Server;
use super::slots::RequestSlots;
use crate::error_text::why_unreachable;

/// Assumed context length of a model whose server does not report it, in tokens; it is common for current models. Such
/// servers refuse prompts that are too long.
const ASSUMED_CONTEXT_TOKENS: u32 = 131_072;
/// Timeout of a health check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Age at which all reports are requested again: a model may be loaded with another context length, or replaced.
const MAX_REPORT_AGE: Duration = Duration::from_secs(300);
/// Maximum number of models about which the server is asked at the same time.
const MAX_CONCURRENT_QUESTIONS: usize = 4;
/// Number of heartbeat intervals between two health checks of a server that is up or refuses the key. Other servers are checked every
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
    /// The server does not accept the key, with the reason.
    RefusesKey(String),
}

/// Client of one server, shared by the models behind it.
pub struct EndpointClient {
    pub(super) server: Server,
    /// Maximum time without progress of a reply.
    pub(super) step_timeout: Duration,
    pub(super) slots: RequestSlots,
    /// Held during a check: jobs that fail together do not check the server at the same time.
    checking: tokio::sync::Mutex<()>,
    /// Configured context length.
    context_tokens: Option<u32>,
    health: Mutex<Health>,
    reports: Mutex<BTreeMap<RemoteModel, ModelReport>>,
    /// Time at which all reports were last read; `None` if the server was down since then.
    reported_at: Mutex<Option<Instant>>,
    changes: Arc<StateChanged>,
}

impl EndpointClient {
    /// A client of the endpoint `name`, which serves these models. `changes` is notified when the state of one of them
    /// changes.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn new(
        name: &str,
        endpoint: &Endpoint,
        models: impl IntoIterator<Item = RemoteModel>,
        timing: &Timing,
        changes: Arc<StateChanged>,
    ) -> Result<Arc<Self>, EndpointError> {
        let reports: BTreeMap<RemoteModel, ModelReport> =
            models.into_iter().map(|model| (model, ModelReport::default())).collect();
        // The read timeout is the limit of one step: without progress for longer than that, the job would lose its
        // lease anyway.
        let server = Server::new(name, endpoint, timing.job_step_timeout())?;
        let max_sequences = endpoint.sequences(reports.keys().map(|model| model.protocol));
        Ok(Arc::new(Self {
            server,
            step_timeout: timing.job_step_timeout(),
            slots: RequestSlots::new(max_sequences, changes.clone()),
            context_tokens: endpoint.context_tokens,
            health: Mutex::new(Health::Unknown),
            checking: tokio::sync::Mutex::default(),
            reports: Mutex::new(reports),
            reported_at: Mutex::default(),
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
                Health::Down(reason) | Health::RefusesKey(reason) => {
                    tracing::warn!(endpoint = self.server.name, reason, "endpoint cannot be used");
                }
                Health::Unknown | Health::Up => tracing::info!(endpoint = self.server.name, "endpoint answers"),
            }
            if matches!(now, Health::Down(_) | Health::RefusesKey(_)) {
                // The server may run other models afterwards.
                *self.reported_at() = None;
            }
            *health = now;
            drop(health);
            self.changes.send_replace(());
        }
    }

    /// Why the server cannot be used; `None` if it answers, or was not checked yet.
    pub(super) fn down_reason(&self) -> Option<String> {
        match &*self.health() {
            Health::Down(reason) | Health::RefusesKey(reason) => Some(reason.clone()),
            Health::Unknown | Health::Up => None,
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
            [Protocol::Ollama] => format!("{}/api/version", self.server.root()),
            _ => format!("{}/models", self.server.url),
        };
        self.server.authorized(self.server.client.get(url)).timeout(CHECK_TIMEOUT)
    }

    /// Checks and sets the health of the server by a request that needs no model. Any response but a server error or 401
    /// (RFC 9110, section 15.5.2: the key is missing or not valid) means that the server can be used. With 403, a key may
    /// not list models, but may call them.
    pub async fn check(&self) {
        let _checking = self.checking.lock().await;
        let health = match self.check_request().send().await {
            Ok(response) if response.status().is_server_error() => {
                Health::Down(format!("{} answered {}", self.server.url, response.status()))
            }
            Ok(response) if response.status() == reqwest::StatusCode::UNAUTHORIZED => {
                let (problem, verb) = match self.server.key {
                    Some(_) => ("refuses the API key", "correct"),
                    None => ("needs an API key", "set"),
                };
                let (url, name) = (&self.server.url, &self.server.name);
                Health::RefusesKey(format!(
                    "{url} {problem} (status 401): {verb} `key` under [endpoints.{name}] in cfq.toml, and start cfq again"
                ))
            }
            Ok(_) => {
                let is_old = self.reported_at().is_none_or(|at| at.elapsed() >= MAX_REPORT_AGE);
                self.ask_about_models(|report| is_old || report.is_incomplete || report.unusable.is_some()).await;
                if is_old {
                    *self.reported_at() = Some(Instant::now());
                }
                Health::Up
            }
            Err(error) => Health::Down(format!("cannot reach {}: {}", self.server.url, why_unreachable(&error))),
        };
        self.set_health(health);
    }

    fn reported_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.reported_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the server about the models whose last report is selected.
    async fn ask_about_models(&self, is_selected: impl Fn(&ModelReport) -> bool) {
        let models: Vec<RemoteModel> =
            self.reports().iter().filter(|(_, report)| is_selected(report)).map(|(model, _)| model.clone()).collect();
        let ask = |model: RemoteModel| async move {
            let before = self.report(&model);
            let was_incomplete = before.is_incomplete;
            let report = report::of_model(&self.server, &model, before).await;
            if report.is_incomplete && !was_incomplete {
                tracing::warn!(
                    endpoint = self.server.name,
                    model = model.name,
                    "no answer to questions about this model"
                );
            }
            self.set_report(&model, report);
        };
        futures::stream::iter(models).for_each_concurrent(MAX_CONCURRENT_QUESTIONS, ask).await;
    }

    /// Adds a model that the server serves. Its next check asks about it.
    pub fn add(&self, model: &RemoteModel) {
        self.reports()
            .entry(model.clone())
            .or_insert_with(|| ModelReport { is_incomplete: true, ..ModelReport::default() });
    }

    fn reports(&self) -> MutexGuard<'_, BTreeMap<RemoteModel, ModelReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what the server reports about a model; logs and notifies a change.
    fn set_report(&self, model: &RemoteModel, report: ModelReport) {
        let before = self.reports().insert(model.clone(), report.clone());
        if before.as_ref() == Some(&report) {
            return;
        }
        if let Some(reason) = &report.unusable {
            tracing::warn!(endpoint = self.server.name, model = model.name, reason, "model cannot be used");
        }
        self.changes.send_replace(());
    }

    /// What the server reports about a model.
    pub(super) fn report(&self, model: &RemoteModel) -> ModelReport {
        self.reports().get(model).cloned().unwrap_or_default()
    }

    /// Records that the server does not have the model. Returns the reason, for users.
    pub(super) fn record_missing(&self, model: &RemoteModel) -> String {
        let reason = report::missing(&self.server, model);
        self.set_report(model, ModelReport { unusable: Some(reason.clone()), ..self.report(model) });
        reason
    }

    /// Context length of a model, in tokens: the configured one, else the reported one, else an assumed one.
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
            let reports_usable = self.reports().iter().all(|(model, report)| {
                report.unusable.is_none() && (report.is_answered || model.protocol == Protocol::OpenAi)
            });
            let is_usable = *self.health() == Health::Up && reports_usable;
            // A provider may lock an account after many requests with a wrong key.
            let is_refused = matches!(*self.health(), Health::RefusesKey(_));
            let intervals = if is_usable || is_refused { HEALTHY_CHECK_INTERVALS } else { 1 };
            tokio::time::sleep(timing.heartbeat() * intervals).await;
        }
    }

    /// Residency of a model behind the server.
    pub(super) fn residency(&self, model: &RemoteModel) -> Residency {
        match &*self.health() {
            Health::Unknown => Residency::Loading,
            Health::Down(reason) | Health::RefusesKey(reason) => Residency::Unusable { reason: reason.clone() },
            Health::Up => match (self.report(model), model.protocol) {
                (ModelReport { unusable: Some(reason), .. }, _) => Residency::Unusable { reason },
                // Before the server has named its version, it may be one that truncates prompts.
                (ModelReport { is_answered: false, .. }, Protocol::Ollama) => Residency::Loading,
                _ => Residency::Resident,
            },
        }
    }
}
