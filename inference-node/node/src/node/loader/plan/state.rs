//! The planner's state: plain data, with one owner.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use super::backoff::Backoff;
use super::host_estimate::HostEstimate;
use crate::gpu::DeviceChoice;
use crate::node::model_registry::model_state;

/// What does not change while the node runs.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerConfig {
    /// Bytes of host memory for all models together.
    pub host_bytes: u64,
    /// Maximum bytes of cached weights.
    pub weight_cache_bytes: u64,
    pub max_sequences: u32,
    pub device: DeviceChoice,
    /// The GPUs to use, none for the CPU only; or why the configured one cannot be used.
    pub gpus: Result<Vec<GpuCapacity>, String>,
    /// How long an unused model stays after its load.
    pub fresh_grace: Duration,
}

/// A GPU, as the planner knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuCapacity {
    /// The N of `cuda:N`.
    pub index: usize,
    /// Bytes that were free when it was opened.
    pub bytes: u64,
}

/// Memory of one model on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuBytes {
    /// [`GpuCapacity::index`].
    pub gpu: usize,
    /// Total, as estimated.
    pub bytes: u64,
    /// The part that passes allocate and free.
    pub later: u64,
}

/// A model to be loaded at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartModel {
    pub model: ModelId,
    /// Number of consecutive loads of it during which the process ended.
    pub killed_loads: usize,
}

/// What the machine and the engines report, read before every [`super::apply`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// Bytes of host memory that the kernel reports as available.
    pub available: u64,
    /// Bytes of the host KV cache that are not allocated yet.
    pub kv_cache_unallocated: u64,
    /// Bytes that the driver reports as free, in the order of [`PlannerConfig::gpus`]; `None` where it does not report
    /// them.
    pub gpu_free: Vec<Option<u64>>,
    /// Whether the machine yields to another program.
    pub yielding: bool,
    /// Sequence numbers of the last uses; models that were never used are missing.
    pub last_use: BTreeMap<ModelId, u64>,
    /// All engines.
    pub engines: BTreeMap<ModelId, EngineObservation>,
}

/// What one engine reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineObservation {
    /// Number of running sequences.
    pub running: u32,
    /// Bytes of its host memory that are not allocated yet.
    pub unallocated: u64,
    pub pinned: bool,
}

/// A model with an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedModel {
    /// Bytes of host memory; 0 on GPUs.
    pub host_bytes: u64,
    pub gpus: Vec<GpuBytes>,
    pub loaded_at: Instant,
    /// Its last use before it was loaded.
    pub used_before: u64,
    /// While another thread holds the engine: when the next unload is tried.
    pub unload_retry_at: Option<Instant>,
}

impl LoadedModel {
    pub fn is_on_gpu(&self) -> bool {
        !self.gpus.is_empty()
    }
}

/// Weights that are kept without an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    pub model: ModelId,
    pub bytes: u64,
    /// Estimate of an engine with them.
    pub estimate: HostEstimate,
}

/// What is known of the memory of a model that waits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KnownEstimates {
    /// `Err`: its file cannot be used.
    pub host: Option<Result<HostEstimate, String>>,
    /// It is not installed, in this round.
    pub not_installed: bool,
    /// By free bytes of each GPU, in this round; `Err`: why it does not fit.
    pub gpus: BTreeMap<Vec<u64>, Result<MemoryEstimate, String>>,
}

/// A load that the executor performs.
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
    /// With the others at start. `may_retry`: it had a share only and may take all there is.
    Start {
        may_retry: bool,
    },
}

/// Status of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelPhase {
    Unknown,
    OnDisk,
    /// Requested, waiting, or being loaded.
    Loading,
    Ready,
    /// Takes no more sequences; unloaded after its last one.
    Draining,
    Unusable,
}

/// Everything the planner knows.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderState {
    pub config: PlannerConfig,
    pub observed: Observation,
    /// Engines that take sequences.
    pub loaded: BTreeMap<ModelId, LoadedModel>,
    /// Engines that take no more sequences, in the order in which their unload began.
    pub draining: Vec<(ModelId, LoadedModel)>,
    /// All other models: `OnDisk`, `Loading` or `Unusable`.
    pub unloaded: BTreeMap<ModelId, ModelPhase>,
    /// Least recently used first.
    pub cached: VecDeque<CachedModel>,
    /// Models that wait for memory, in the order of their requests.
    pub waiting: VecDeque<ModelId>,
    /// Models that are loaded together.
    pub starting: VecDeque<StartModel>,
    pub loading: Option<LoadInProgress>,
    /// Bytes of host memory that each model took when it was loaded last.
    pub last_bytes: BTreeMap<ModelId, u64>,
    pub backoff: Backoff,
    pub(super) estimates: BTreeMap<ModelId, KnownEstimates>,
    pub(super) reported_free_bytes: Option<u64>,
    /// Whether the waiting models have to be looked at.
    pub(super) replan: bool,
    /// The models that ran sequences when the waiting models were looked at last.
    pub(super) planned_busy: BTreeSet<ModelId>,
    pub(super) planned_yielding: bool,
}

impl LoaderState {
    /// A state without models. `first_retry`: the first wait of a model that did not fit.
    pub fn new(config: PlannerConfig, first_retry: Duration) -> Self {
        Self {
            config,
            observed: Observation::default(),
            loaded: BTreeMap::new(),
            draining: Vec::new(),
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
        }
    }

    pub fn phase(&self, model: &ModelId) -> ModelPhase {
        if self.loaded.contains_key(model) {
            return ModelPhase::Ready;
        }
        if self.draining.iter().any(|(draining, _)| draining == model) {
            return ModelPhase::Draining;
        }
        self.unloaded.get(model).copied().unwrap_or(ModelPhase::Unknown)
    }

    /// The GPUs; none where the configured one cannot be used.
    pub fn gpus(&self) -> &[GpuCapacity] {
        self.config.gpus.as_deref().unwrap_or_default()
    }

    /// The GPUs' ids, joined by commas.
    pub(super) fn gpu_ids(&self) -> String {
        self.gpus().iter().map(|gpu| format!("cuda:{}", gpu.index)).collect::<Vec<_>>().join(",")
    }

    /// All engines.
    pub(super) fn engines(&self) -> impl Iterator<Item = (&ModelId, &LoadedModel)> {
        self.loaded.iter().chain(self.draining.iter().map(|(model, loaded)| (model, loaded)))
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

    pub(super) fn unallocated(&self, model: &ModelId) -> u64 {
        self.engine(model).unallocated
    }

    pub(super) fn last_use(&self, model: &ModelId) -> u64 {
        self.observed.last_use.get(model).copied().unwrap_or(0)
    }

    /// Loaded within the grace period and not used since.
    pub(super) fn is_fresh(&self, model: &ModelId, loaded: &LoadedModel, now: Instant) -> bool {
        self.last_use(model) == loaded.used_before
            && now.saturating_duration_since(loaded.loaded_at) < self.config.fresh_grace
    }

    pub(super) fn busy_models(&self) -> BTreeSet<ModelId> {
        self.engines().map(|(model, _)| model).filter(|model| !self.is_idle(model)).cloned().collect()
    }

    /// The least recently used loaded model of those that `may` be evicted and are not pinned.
    pub(super) fn least_recently_used(&self, may: impl Fn(&ModelId, &LoadedModel) -> bool) -> Option<ModelId> {
        let evictable = self.loaded.iter().filter(|(model, loaded)| may(model, loaded) && !self.is_pinned(model));
        evictable.min_by_key(|(model, _)| self.last_use(model)).map(|(model, _)| model.clone())
    }

    /// State of a model that is not loaded, by its estimate.
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
