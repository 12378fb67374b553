//! Registry of the node's models: the published status of each model, and the ledger, which lists them for the
//! scheduler.
//!
//! The registry is one table under one mutex, so that the node can report its models right after the start and also
//! during a load on the loader thread. The [`super::loader`] loads and unloads models that are files, and publishes
//! their status here. A load that fails or panics makes the model unusable, with the reason, and the node continues.

mod failures;
mod proxies;
mod requests;
pub(in crate::node) mod yielding;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cfq_engine::{Engine, StateChanged};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use tokio::sync::mpsc;

pub use self::proxies::NotUsable;
use self::proxies::Proxies;
use self::yielding::GpuClaims;
use crate::config::Config;
use crate::node::error::{LoaderFailure, ModelFault};
use crate::node::unusable::UnusableReason;

/// Status of one model.
#[derive(Clone)]
pub enum ModelStatus {
    Loading,
    Resident(Arc<dyn Engine>),
    /// The model takes no more sequences and is unloaded once its running sequences have finished.
    Unloading(Weak<dyn Engine>),
    /// The model is not loaded. The field is the model's last known or estimated state.
    OnDisk(ModelState),
    Unusable(UnusableReason),
}

/// Whether speculative prefill may run on a model, see [`ModelRegistry::idle_status`].
pub enum IdleStatus {
    /// No sequence runs on the model or on another one that shares a device with it, and no model is being loaded.
    Now(Arc<dyn Engine>),
    Later,
    /// Speculative prefill is impossible: the model is not loaded or is behind an endpoint, or the node is stopping or
    /// yields to another program.
    Never,
}

/// A request to the loader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoaderCommand {
    Load(ModelId),
    Unload(ModelId),
    /// Load all models of [`ModelRegistry::pending_loads`] together, so that they share the memory, as at start.
    LoadPending,
}

/// Maximum number of queued requests to the loader; they wait while it loads a model.
const MAX_QUEUED_COMMANDS: usize = 64;

/// The models of this node. Shared by all async tasks of the node.
pub struct ModelRegistry {
    /// The servers and programs, which answer for models that are no files.
    proxies: Proxies,
    /// The models in the configuration. Unloading a model that is not configured and is unusable removes it from the
    /// registry.
    configured: BTreeSet<ModelId>,
    state: Mutex<RegistryState>,
    changes: Arc<StateChanged>,
}

struct RegistryState {
    statuses: BTreeMap<ModelId, ModelStatus>,
    /// Number of times that a job has used a model, summed over all models.
    uses: u64,
    /// The value of `uses` at the last use of each model.
    last_use: BTreeMap<ModelId, u64>,
    /// A failure that happened for a job outside the engines, with the job's model; `None` if there was none.
    fault: Option<(ModelId, ModelFault)>,
    /// Why the loader thread exited.
    loader_failure: Option<LoaderFailure>,
    ledger: Ledger,
    gpu_claims: GpuClaims,
    /// Queue of requests to the loader; `None` once the node stops.
    commands: Option<mpsc::Sender<LoaderCommand>>,
}

impl ModelRegistry {
    /// Creates the registry with all models of the configuration: models behind servers and programs are resident, models
    /// that are files are pending loads. Also returns the receiver of requests, for the loader.
    pub fn new(config: &Config, changes: Arc<StateChanged>) -> (Arc<Self>, mpsc::Receiver<LoaderCommand>) {
        let proxies = Proxies::new(config, &changes);
        let status = |model: &ModelId| proxies.status(model).unwrap_or(ModelStatus::Loading);
        let statuses = config.models.iter().map(|model| (model.clone(), status(model))).collect();
        let (commands, receiver) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let state = RegistryState {
            statuses,
            uses: 0,
            last_use: BTreeMap::new(),
            fault: None,
            loader_failure: None,
            ledger: Ledger::default(),
            gpu_claims: GpuClaims::new(),
            commands: Some(commands),
        };
        let registry =
            Self { proxies, configured: config.models.iter().cloned().collect(), state: Mutex::new(state), changes };
        (Arc::new(registry), receiver)
    }

    fn state(&self) -> MutexGuard<'_, RegistryState> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifier that fires whenever the contents of the ledger change.
    pub fn changes(&self) -> &Arc<StateChanged> {
        &self.changes
    }

    fn notify(&self) {
        self.changes.send_replace(());
    }

    /// The servers and programs of this node.
    pub fn proxies(&self) -> &Proxies {
        &self.proxies
    }

    /// Status of a model; `None` if the node does not serve it.
    pub fn status(&self, model: &ModelId) -> Option<ModelStatus> {
        self.state().statuses.get(model).cloned()
    }

    /// Publishes the status of a model.
    pub fn set_status(&self, model: &ModelId, status: ModelStatus) {
        self.state().statuses.insert(model.clone(), status);
        self.notify();
    }

    /// Publishes that an unusable model is available again, because the wait before a retry of its load has passed. Has
    /// no effect if the model is no longer unusable, because it was requested or removed in the meantime.
    pub fn offer_retry(&self, model: &ModelId, state: ModelState) {
        if let Some(status @ ModelStatus::Unusable(_)) = self.state().statuses.get_mut(model) {
            *status = ModelStatus::OnDisk(state);
        }
        self.notify();
    }

    /// Whether speculative prefill for `model` may run now.
    pub fn idle_status(&self, model: &ModelId) -> IdleStatus {
        let state = self.state();
        if state.ledger.draining || !model.is_file() || !state.gpu_claims.is_empty() {
            return IdleStatus::Never;
        }
        let Some(ModelStatus::Resident(engine)) = state.statuses.get(model) else { return IdleStatus::Never };
        let devices = engine.state().device;
        let is_busy = |(other, status): (&ModelId, &ModelStatus)| match status {
            // Loading a file uses the CPU and the disk.
            ModelStatus::Loading => other.is_file(),
            ModelStatus::Resident(_) | ModelStatus::Unloading(_) => {
                let state = status.state(other);
                other.is_file()
                    && state.running > 0
                    && state.device.split(',').any(|id| devices.split(',').any(|device| device == id))
            }
            ModelStatus::OnDisk(_) | ModelStatus::Unusable(_) => false,
        };
        if state.statuses.iter().any(is_busy) { IdleStatus::Later } else { IdleStatus::Now(engine.clone()) }
    }

    /// Models that are files and have the status [`ModelStatus::Loading`].
    pub fn pending_loads(&self) -> Vec<ModelId> {
        let is_pending =
            |(model, status): &(&ModelId, &ModelStatus)| model.is_file() && matches!(status, ModelStatus::Loading);
        self.state().statuses.iter().filter(is_pending).map(|(model, _)| model.clone()).collect()
    }

    /// Publishes the number of bytes that a load may take without an eviction.
    pub fn set_free_bytes(&self, bytes: u64) {
        let mut state = self.state();
        if state.ledger.free_bytes != bytes {
            state.ledger.free_bytes = bytes;
            state.ledger.version += 1;
            drop(state);
            self.notify();
        }
    }

    /// Records that a job uses the model, for the order of eviction.
    pub fn record_use(&self, model: &ModelId) {
        let mut state = self.state();
        state.uses += 1;
        let now = state.uses;
        state.last_use.insert(model.clone(), now);
    }

    /// Time of each model's last use, as the value of a counter of all uses.
    pub fn last_uses(&self) -> BTreeMap<ModelId, u64> {
        self.state().last_use.clone()
    }

    /// Closes the queue of requests, so that the loader ends after the requests that are already queued.
    pub fn close(&self) {
        self.state().commands.take();
        self.notify();
    }

    /// True once [`Self::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.state().commands.is_none()
    }

    /// Marks the node as draining in the ledger: it takes no new work from now on.
    pub fn drain(&self) {
        let mut state = self.state();
        state.ledger.draining = true;
        state.ledger.version += 1;
        drop(state);
        self.notify();
    }

    /// The current ledger. Its version increases when its contents differ from those of the last ledger returned.
    pub fn ledger(&self) -> Ledger {
        self.state().refresh_ledger().clone()
    }
}

impl RegistryState {
    fn refresh_ledger(&mut self) -> &Ledger {
        let models: Vec<ModelState> = self.statuses.iter().map(|(model, status)| status.state(model)).collect();
        let claim = |(model, status): (&ModelId, &ModelStatus)| {
            Some((model.clone(), status.yields_to(model, &self.gpu_claims)?.to_string()))
        };
        let yields = self.statuses.iter().filter_map(claim).collect();
        let ledger = &mut self.ledger;
        if ledger.models != models || ledger.yields != yields {
            ledger.models = models;
            ledger.yields = yields;
            ledger.version += 1;
        }
        ledger
    }
}

impl ModelStatus {
    /// The engine of a loaded model.
    fn engine(&self) -> Option<Arc<dyn Engine>> {
        match self {
            Self::Resident(engine) => Some(engine.clone()),
            Self::Unloading(engine) => engine.upgrade(),
            Self::Loading | Self::OnDisk(_) | Self::Unusable(_) => None,
        }
    }

    fn state(&self, model: &ModelId) -> ModelState {
        match self {
            Self::Resident(engine) => engine.state(),
            Self::Unloading(engine) => match engine.upgrade() {
                // The model takes no more sequences; the running ones are still reported.
                Some(engine) => {
                    let residency = Residency::Available;
                    ModelState { residency, kv_tokens_free: 0, max_sequences: 0, ..engine.state() }
                }
                // The loader has taken the engine and frees its memory: the model is neither resident nor on disk. Like
                // a load, this takes a moment, and the next status follows without a request.
                None => model_state(model, Residency::Loading),
            },
            Self::OnDisk(state) => state.clone(),
            Self::Loading => model_state(model, Residency::Loading),
            Self::Unusable(reason) => model_state(model, Residency::Unusable { reason: reason.to_string() }),
        }
    }
}

/// State of a model of which only the residency is known.
pub fn model_state(model: &ModelId, residency: Residency) -> ModelState {
    ModelState {
        model: model.clone(),
        residency,
        device: "cpu".to_owned(),
        need_bytes: 0,
        context_tokens: 0,
        kv_tokens_free: 0,
        kv_tiers: KvTiers::default(),
        running: 0,
        max_sequences: 0,
        prefill_rate: 0.0,
        decode_rate: 0.0,
        load_rate: 0.0,
        tokens_per_byte: 0.3,
    }
}
