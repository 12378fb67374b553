//! The planner's state: plain data, owned by the loader thread.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use super::backoff::Backoff;
use super::host_estimate::HostEstimate;
use crate::gpu::DeviceChoice;
use crate::node::model_registry::model_state;
use crate::node::unusable::UnusableReason;

/// The configuration of the planner, which does not change while the node runs.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerConfig {
    /// Bytes of host memory for all models together.
    pub host_bytes: u64,
    /// Size of the weight cache, in bytes.
    pub weight_cache_bytes: u64,
    pub max_sequences: u32,
    pub device: DeviceChoice,
    /// The GPUs to use (empty for the CPU only), or the reason why the configured GPU cannot be used.
    pub gpus: Result<Vec<PlannedGpu>, UnusableReason>,
    /// Grace period: time after the load of a model during which the model is not evicted unless it has been used.
    pub load_grace_period: Duration,
}

/// Index and capacity of a GPU, as the planner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedGpu {
    /// Index of the GPU: the N of `cuda:N`.
    pub index: usize,
    /// Bytes that were free when the GPU was opened; models together use at most these.
    pub free_bytes_at_open: u64,
}

/// Memory of one model on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuBytes {
    /// Index of the GPU, see [`PlannedGpu::index`].
    pub gpu: usize,
    /// Estimated bytes in total.
    pub bytes: u64,
    /// Part of `bytes` that is allocated only during a forward pass.
    pub scratch_bytes: u64,
}

/// A model that is loaded at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartModel {
    pub model: ModelId,
    /// Number of consecutive loads of the model during which the process ended.
    pub interrupted_loads: usize,
}

/// Measurements of the machine and its engines, taken before every [`super::apply`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// Bytes of host memory that the kernel reports as available.
    pub available_bytes: u64,
    /// Bytes by which the host KV cache may still grow.
    pub kv_cache_unallocated_bytes: u64,
    /// Bytes of each GPU that the driver reports as free, in the order of [`PlannerConfig::gpus`]; `None` if it does
    /// not report them.
    pub gpu_free_bytes: Vec<Option<u64>>,
    /// Whether the machine yields to another program.
    pub yielding: bool,
    /// Time of each model's last use, as the value of a counter of all uses; models that were never used are missing.
    pub last_use: BTreeMap<ModelId, u64>,
    /// Measurements of each engine.
    pub engines: BTreeMap<ModelId, EngineObservation>,
}

/// Measurements of one engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineObservation {
    /// Number of running sequences.
    pub running: u32,
    /// Bytes of the engine's reserved host memory that are not allocated yet.
    pub unallocated_bytes: u64,
    pub pinned: bool,
}

/// Memory and history of a model that has an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResidentModel {
    /// Host memory reserved for the model, in bytes; 0 on GPUs.
    pub host_bytes: u64,
    pub gpus: Vec<GpuBytes>,
    pub loaded_at: Instant,
    /// Time of the model's last use before it was loaded, see [`Observation::last_use`]. While the registry still
    /// reports this value, the loaded model has not been used.
    pub used_before: u64,
    /// Time of the next attempt to unload, if the last one failed because another thread held the engine.
    pub unload_retry_at: Option<Instant>,
}

impl ResidentModel {
    pub fn is_on_gpu(&self) -> bool {
        !self.gpus.is_empty()
    }
}

/// Cached weights of an unloaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    pub model: ModelId,
    pub bytes: u64,
    /// Memory estimate of an engine that is started from these weights.
    pub estimate: HostEstimate,
}

/// Cached memory estimates of a waiting model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KnownEstimates {
    /// Estimate on the host, or the reason why the model cannot be used; `None` if it has not been requested yet.
    pub host: Option<Result<HostEstimate, UnusableReason>>,
    /// Whether the model is not installed. Discarded, like `gpus`, by [`LoaderState::request_replan`].
    pub not_installed: bool,
    /// Estimates on the GPUs, by the free bytes of each GPU; `Err` is the reason why the model cannot run there.
    pub gpus: BTreeMap<Vec<u64>, Result<MemoryEstimate, UnusableReason>>,
}

/// The load that the executor is performing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadInProgress {
    pub model: ModelId,
    pub host_bytes: u64,
    pub used_before: u64,
    pub origin: LoadOrigin,
}

/// Why a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOrigin {
    Requested,
    /// Loaded together with other models, at start or after a yield. `may_retry`: the model got only its share of the
    /// memory, so it may be tried again with all memory that is left.
    Start {
        may_retry: bool,
    },
}

/// Phase of one model, as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelPhase {
    Unknown,
    OnDisk,
    /// Requested, waiting, or being loaded.
    Loading,
    Resident,
    /// The model takes no more sequences and is unloaded after its last one.
    Unloading,
    Unusable,
}

/// The complete state of the planner.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderState {
    pub config: PlannerConfig,
    pub observed: Observation,
    /// Engines that take sequences.
    pub loaded: BTreeMap<ModelId, ResidentModel>,
    /// Engines that take no more sequences and will be unloaded, in the order in which the unloads were begun.
    pub unloading: Vec<(ModelId, ResidentModel)>,
    /// Phases of all models without an engine: `OnDisk`, `Loading` or `Unusable`.
    pub unloaded: BTreeMap<ModelId, ModelPhase>,
    /// Weight cache, least recently used weights first.
    pub cached: VecDeque<CachedModel>,
    /// Queue of models that wait for memory, in the order of their requests.
    pub waiting: VecDeque<ModelId>,
    /// Models that are still to be loaded together, at start or after a yield.
    pub starting: VecDeque<StartModel>,
    pub loading: Option<LoadInProgress>,
    /// Host memory of each model at its last load, in bytes.
    pub last_bytes: BTreeMap<ModelId, u64>,
    pub backoff: Backoff,
    pub(super) estimates: BTreeMap<ModelId, KnownEstimates>,
    pub(super) reported_free_bytes: Option<u64>,
    /// Whether the waiting models have to be planned again.
    pub(super) replan: bool,
    /// Models with running sequences when the waiting models were last planned.
    pub(super) planned_busy: BTreeSet<ModelId>,
    pub(super) planned_yielding: bool,
    /// Time at which the waiting models are planned again if no other event occurs before; `None` until they have been
    /// planned once.
    pub(super) next_replan_at: Option<Instant>,
}

impl LoaderState {
    /// Creates a state without models. `first_retry` is the first backoff time of a model that did not fit.
    pub fn new(config: PlannerConfig, first_retry: Duration) -> Self {
        Self {
            config,
            observed: Observation::default(),
            loaded: BTreeMap::new(),
            unloading: Vec::new(),
            unloaded: BTreeMap::new(),
            cached: VecDeque::new(),
            waiting: VecDeque::new(),
            starting: VecDeque::new(),
            loading: None,
            last_bytes: BTreeMap::new(),
            backoff: Backoff::new(first_retry),
            estimates: BTreeMap::new(),
            reported_free_bytes: None,
            replan: false,
            planned_busy: BTreeSet::new(),
            planned_yielding: false,
            next_replan_at: None,
        }
    }

    pub fn phase(&self, model: &ModelId) -> ModelPhase {
        if self.loaded.contains_key(model) {
            return ModelPhase::Resident;
        }
        if self.unloading.iter().any(|(unloading, _)| unloading == model) {
            return ModelPhase::Unloading;
        }
        self.unloaded.get(model).copied().unwrap_or(ModelPhase::Unknown)
    }

    /// The GPUs to use; empty if the configured GPU cannot be used.
    pub fn gpus(&self) -> &[PlannedGpu] {
        self.config.gpus.as_deref().unwrap_or_default()
    }

    /// The GPUs' ids, joined by commas.
    pub(super) fn gpu_ids(&self) -> String {
        self.gpus().iter().map(|gpu| format!("cuda:{}", gpu.index)).collect::<Vec<_>>().join(",")
    }

    /// All engines: those that take sequences, and those that are being unloaded.
    pub(super) fn engines(&self) -> impl Iterator<Item = (&ModelId, &ResidentModel)> {
        self.loaded.iter().chain(self.unloading.iter().map(|(model, loaded)| (model, loaded)))
    }

    fn engine(&self, model: &ModelId) -> EngineObservation {
        self.observed.engines.get(model).copied().unwrap_or_default()
    }

    pub(super) fn is_idle(&self, model: &ModelId) -> bool {
        self.engine(model).running == 0
    }

    pub(super) fn is_pinned(&self, model: &ModelId) -> bool {
        self.engine(model).pinned
    }

    pub(super) fn unallocated_bytes_of(&self, model: &ModelId) -> u64 {
        self.engine(model).unallocated_bytes
    }

    pub(super) fn last_use(&self, model: &ModelId) -> u64 {
        self.observed.last_use.get(model).copied().unwrap_or(0)
    }

    /// Whether the model is in its grace period: loaded recently and not used since.
    pub(super) fn is_in_grace_period(&self, model: &ModelId, loaded: &ResidentModel, now: Instant) -> bool {
        self.last_use(model) == loaded.used_before
            && now.saturating_duration_since(loaded.loaded_at) < self.config.load_grace_period
    }

    pub(super) fn busy_models(&self) -> BTreeSet<ModelId> {
        self.engines().map(|(model, _)| model).filter(|model| !self.is_idle(model)).cloned().collect()
    }

    /// The least recently used loaded model that is not pinned and for which `may` returns true.
    pub(super) fn least_recently_used(&self, may: impl Fn(&ModelId, &ResidentModel) -> bool) -> Option<ModelId> {
        let evictable = self.loaded.iter().filter(|(model, loaded)| may(model, loaded) && !self.is_pinned(model));
        evictable.min_by_key(|(model, _)| self.last_use(model)).map(|(model, _)| model.clone())
    }

    /// State of a model that is not loaded, computed from its memory estimate.
    pub fn state_on_disk(&self, model: &ModelId, device: &str, estimate: &MemoryEstimate) -> ModelState {
        ModelState {
            device: device.to_owned(),
            need_bytes: estimate.total(),
            context_tokens: u32::try_from(estimate.kv_tokens).unwrap_or(u32::MAX),
            kv_tokens_free: estimate.kv_tokens,
            max_sequences: self.config.max_sequences,
            ..model_state(model, Residency::Available)
        }
    }
}
