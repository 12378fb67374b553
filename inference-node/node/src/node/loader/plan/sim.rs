//! A simulated machine that executes the planner's actions without engines, and checks each action (`checks`).

mod checks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;

use super::apply;
use super::event::{
    Estimate, EstimateRequest, LoadAction, LoadFailure, LoadTarget, LoadedSize, LoaderAction, LoaderEvent,
    PublishedStatus,
};
use super::host_estimate::HostEstimate;
use super::state::{
    CachedModel, EngineObservation, GpuBytes, LoadOrigin, LoaderState, ModelPhase, Observation, PlannedGpu,
    PlannerConfig,
};
use crate::gpu::DeviceChoice;
use crate::node::model_registry::model_state;
use crate::node::unusable::{MemoryShortage, UnusableReason};

/// Maximum number of actions for one event. A planner that issues more is assumed to loop.
const MAX_ACTIONS: usize = 1000;
pub const LOAD_GRACE_PERIOD: Duration = Duration::from_secs(5);
pub const FIRST_RETRY: Duration = Duration::from_secs(10);

/// One model of the simulated machine.
#[derive(Debug, Clone)]
pub struct SimModel {
    /// Size of the weights, in bytes.
    pub weights: u64,
    pub min_kv_tokens: u64,
    pub max_kv_tokens: u64,
    /// Bytes that the model takes of one GPU; `None` if the model runs on the CPU only.
    pub gpu_bytes: Option<u64>,
    pub is_installed: bool,
    pub is_readable: bool,
}

impl SimModel {
    pub fn estimate(&self) -> HostEstimate {
        let smallest = MemoryEstimate {
            weights: self.weights,
            tables: 0,
            overhead: 0,
            kv_per_token: 1,
            kv_tokens: self.min_kv_tokens,
            scratch: 1,
            loading: 0,
            reserve: 0,
        };
        HostEstimate { path: PathBuf::from("/m.gguf"), smallest, max_kv_tokens: self.max_kv_tokens }
    }
}

struct SimEngine {
    host_bytes: u64,
    running: u32,
}

/// The simulated machine with its planner.
pub struct Sim {
    pub state: LoaderState,
    pub now: Instant,
    pub models: BTreeMap<ModelId, SimModel>,
    pub pinned: BTreeSet<ModelId>,
    pub yielding: bool,
    /// Whether a yield begins during the next load.
    pub yields_during_load: bool,
    /// Host memory of other programs.
    pub other_bytes: u64,
    /// Number of unloads, counted from the next one on, that fail because another thread holds the engine.
    pub shared_unloads: u32,
    pub statuses: BTreeMap<ModelId, PublishedStatus>,
    machine_bytes: u64,
    engines: BTreeMap<ModelId, SimEngine>,
    cached: BTreeMap<ModelId, u64>,
    uses: u64,
    last_use: BTreeMap<ModelId, u64>,
}

pub fn model_id(index: usize) -> ModelId {
    format!("path:/m{index}").parse().unwrap()
}

impl Sim {
    pub fn new(host_bytes: u64, weight_cache_bytes: u64, gpus: &[u64], models: Vec<SimModel>) -> Self {
        let gpu = |(index, bytes): (usize, &u64)| PlannedGpu { index, free_bytes_at_open: *bytes };
        let gpus = gpus.iter().enumerate().map(gpu).collect();
        let config = PlannerConfig {
            host_bytes,
            weight_cache_bytes,
            max_sequences: 4,
            device: DeviceChoice::Auto,
            gpus: Ok(gpus),
            load_grace_period: LOAD_GRACE_PERIOD,
        };
        Self {
            state: LoaderState::new(config, FIRST_RETRY),
            now: Instant::now(),
            models: models.into_iter().enumerate().map(|(index, model)| (model_id(index), model)).collect(),
            pinned: BTreeSet::new(),
            yielding: false,
            yields_during_load: false,
            other_bytes: 0,
            shared_unloads: 0,
            statuses: BTreeMap::new(),
            machine_bytes: host_bytes,
            engines: BTreeMap::new(),
            cached: BTreeMap::new(),
            uses: 0,
            last_use: BTreeMap::new(),
        }
    }

    /// Applies the event, executes all actions and returns them.
    pub fn process(&mut self, event: LoaderEvent) -> Vec<LoaderAction> {
        let mut all = Vec::new();
        let mut next = Some(event);
        while let Some(event) = next {
            self.state.observed = self.observe();
            let waiting: Vec<ModelId> = self.state.waiting.iter().cloned().collect();
            let actions = apply(&mut self.state, event, self.now);
            next = (!actions.is_empty()).then_some(LoaderEvent::Continue);
            let with_outcome = actions.iter().position(LoaderAction::has_outcome);
            assert!(with_outcome.is_none_or(|at| at + 1 == actions.len()), "not the last one: {actions:?}");
            for action in &actions {
                if let Some(outcome) = self.execute(action, &waiting) {
                    next = Some(outcome);
                }
                self.check_capacity();
            }
            all.extend(actions);
            assert!(all.len() < MAX_ACTIONS, "the planner does not terminate: {:?}", &all[MAX_ACTIONS - 20..]);
        }
        self.check_planning_again_changes_nothing();
        all
    }

    /// Requests the model as the registry does.
    pub fn request(&mut self, model: &ModelId) -> Vec<LoaderAction> {
        match self.state.phase(model) {
            ModelPhase::Resident | ModelPhase::Loading => Vec::new(),
            ModelPhase::Unknown | ModelPhase::OnDisk | ModelPhase::Unloading | ModelPhase::Unusable => {
                self.process(LoaderEvent::LoadRequested(model.clone()))
            }
        }
    }

    /// Starts a sequence on a model, if the model takes sequences now.
    pub fn start_sequence(&mut self, model: &ModelId) {
        if self.yielding || self.state.phase(model) != ModelPhase::Resident {
            return;
        }
        self.uses += 1;
        self.last_use.insert(model.clone(), self.uses);
        if let Some(engine) = self.engines.get_mut(model) {
            engine.running += 1;
        }
        self.process(LoaderEvent::EnginesChanged);
    }

    pub fn end_sequences(&mut self, model: &ModelId) {
        if let Some(engine) = self.engines.get_mut(model) {
            engine.running = 0;
        }
        self.process(LoaderEvent::EnginesChanged);
    }

    pub fn advance(&mut self, time: Duration) {
        self.now += time;
        self.process(LoaderEvent::Tick);
    }

    /// Calls the planner at the times that it requests, until `time` has passed.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.state.next_wakeup(self.now).max(self.now + Duration::from_millis(1));
            self.process(LoaderEvent::Tick);
        }
    }

    fn observe(&self) -> Observation {
        let engine = |(model, engine): (&ModelId, &SimEngine)| {
            let unallocated_bytes = engine.host_bytes / 4;
            let pinned = self.pinned.contains(model);
            (model.clone(), EngineObservation { running: engine.running, unallocated_bytes, pinned })
        };
        let allocated: u64 = self.engines.values().map(|engine| engine.host_bytes - engine.host_bytes / 4).sum();
        let taken = self.other_bytes + allocated + self.cached.values().sum::<u64>();
        Observation {
            available_bytes: self.machine_bytes.saturating_sub(taken),
            kv_cache_unallocated_bytes: 0,
            gpu_free_bytes: vec![None; self.state.gpus().len()],
            yielding: self.yielding,
            last_use: self.last_use.clone(),
            engines: self.engines.iter().map(engine).collect(),
        }
    }

    fn execute(&mut self, action: &LoaderAction, waiting: &[ModelId]) -> Option<LoaderEvent> {
        match action {
            LoaderAction::Estimate { model, request } => {
                let estimate = self.estimate(model, request);
                Some(LoaderEvent::Estimated { model: model.clone(), estimate })
            }
            LoaderAction::Load(load) => Some(self.load(load, waiting)),
            LoaderAction::BeginUnload { model, evicted_for } => {
                if let Some(wanted) = evicted_for {
                    self.check_eviction(model, wanted);
                }
                None
            }
            LoaderAction::Unload { model } => Some(self.unload(model)),
            LoaderAction::DropCachedWeights { model } => {
                assert!(self.cached.remove(model).is_some(), "{model} has no cached weights");
                None
            }
            LoaderAction::SetStatus { model, status } => {
                if let PublishedStatus::Unusable(reason) = status
                    && !reason.is_permanent()
                {
                    self.check_refusal(model);
                }
                self.statuses.insert(model.clone(), status.clone());
                None
            }
            LoaderAction::SetFreeBytes(_) => None,
        }
    }

    fn estimate(&mut self, model: &ModelId, request: &EstimateRequest) -> Estimate {
        let sim = self.models.get_mut(model).unwrap();
        match request {
            EstimateRequest::Host { may_fetch: false } if !sim.is_installed => return Estimate::NotInstalled,
            EstimateRequest::Host { .. } | EstimateRequest::Gpus { .. } => sim.is_installed = true,
        }
        match request {
            EstimateRequest::Host { .. } if !sim.is_readable => Estimate::HostUnusable { reason: unreadable() },
            EstimateRequest::Host { .. } => Estimate::Host(sim.estimate()),
            EstimateRequest::Gpus { free } => {
                let fit = gpu_for(sim, free).map(|_| sim.estimate().smallest);
                let fit = fit.ok_or_else(|| UnusableReason::TooLarge(MemoryShortage::new("no GPU fits")));
                Estimate::Gpus { free: free.clone(), fit }
            }
        }
    }

    fn load(&mut self, load: &LoadAction, waiting: &[ModelId]) -> LoaderEvent {
        assert!(!self.yielding, "{load:?} during a yield");
        let model = load.model.clone();
        let sim = &self.models[&model];
        assert!(load.host_bytes <= self.unreserved_bytes(), "{load:?} exceeds the host");
        self.cached.remove(&model);
        let on_gpu = match &load.target {
            LoadTarget::Gpus { free, .. } => gpu_for(sim, free),
            LoadTarget::Host => None,
        };
        let result = match (on_gpu, sim.estimate().fit(load.host_bytes)) {
            _ if !sim.is_readable => Err(LoadFailure::Permanent(unreadable())),
            (Some(share), _) => Ok(LoadedSize { host_bytes: 0, gpus: vec![share] }),
            (None, Ok(estimate)) => Ok(LoadedSize { host_bytes: estimate.total(), gpus: Vec::new() }),
            (None, Err(error)) => Err(LoadFailure::OutOfMemory {
                shortage: MemoryShortage::new("full"),
                host: Some(Box::new(error.estimate)),
                gpus: None,
            }),
        };
        self.yielding |= std::mem::take(&mut self.yields_during_load);
        if let Ok(size) = &result {
            // Models that are loaded together at start are not in the queue of waiting models.
            let is_requested = self.state.loading.as_ref().is_some_and(|load| load.origin == LoadOrigin::Requested);
            let waiting = if is_requested { waiting } else { &[] };
            let before = waiting.iter().take_while(|waiting| **waiting != model);
            self.check_backfill(size.host_bytes, &before.cloned().collect::<Vec<_>>());
            self.engines.insert(model.clone(), SimEngine { host_bytes: size.host_bytes, running: 0 });
        }
        LoaderEvent::LoadFinished { model, result }
    }

    fn unload(&mut self, model: &ModelId) -> LoaderEvent {
        assert_eq!(self.engines[model].running, 0, "{model} runs sequences");
        if self.shared_unloads > 0 {
            self.shared_unloads -= 1;
            return LoaderEvent::StillShared { model: model.clone() };
        }
        let engine = self.engines.remove(model).unwrap();
        let sim = &self.models[model];
        let cached = (engine.host_bytes > 0).then(|| {
            self.cached.insert(model.clone(), sim.weights);
            CachedModel { model: model.clone(), bytes: sim.weights, estimate: sim.estimate() }
        });
        let state = Box::new(model_state(model, Residency::Available));
        LoaderEvent::Unloaded { model: model.clone(), state, cached }
    }

    fn unreserved_bytes(&self) -> u64 {
        let taken: u64 = self.engines.values().map(|engine| engine.host_bytes).sum();
        self.state.config.host_bytes.checked_sub(taken).unwrap_or_else(|| panic!("the host is exceeded by {taken}"))
    }
}

/// Reason of a model whose file is not readable.
fn unreadable() -> UnusableReason {
    UnusableReason::Unreadable { model: model_id(0), detail: "corrupt".to_owned() }
}

/// Allocation of the model on the GPU with the most free memory; `None` if it does not fit.
fn gpu_for(model: &SimModel, free: &[u64]) -> Option<GpuBytes> {
    let (gpu, free) = free.iter().copied().enumerate().max_by_key(|(_, free)| *free)?;
    let bytes = model.gpu_bytes.filter(|bytes| *bytes <= free)?;
    Some(GpuBytes { gpu, bytes, scratch_bytes: 0 })
}
