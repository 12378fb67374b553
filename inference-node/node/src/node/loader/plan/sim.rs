//! A simulated machine that executes the planner's commands without engines, and checks each command.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;

use super::apply;
use super::event::{
    Command, Estimate, EstimateRequest, Event, LoadCommand, LoadFailure, LoadTarget, LoadedSize, Status,
};
use super::host_estimate::HostEstimate;
use super::state::{
    CachedModel, EngineObservation, GpuBytes, GpuCapacity, LoadOrigin, LoadedModel, LoaderState, ModelPhase,
    Observation, PlannerConfig,
};
use crate::gpu::DeviceChoice;
use crate::node::model_registry::model_state;

/// Maximum number of commands for one event. A planner that issues more is assumed to loop.
const MAX_COMMANDS: usize = 1000;
pub const FRESH_GRACE: Duration = Duration::from_secs(5);
pub const FIRST_RETRY: Duration = Duration::from_secs(10);

/// One model of the simulated machine.
#[derive(Debug, Clone)]
pub struct SimModel {
    /// Bytes of its weights.
    pub weights: u64,
    pub min_kv_tokens: u64,
    pub max_kv_tokens: u64,
    /// Bytes it takes of one GPU; `None` if it runs on the CPU only.
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
    /// Host memory of other programs.
    pub other_bytes: u64,
    /// Number of next unloads that find the engine held by another thread.
    pub shared_unloads: u32,
    pub statuses: BTreeMap<ModelId, Status>,
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
        let gpus = gpus.iter().enumerate().map(|(index, bytes)| GpuCapacity { index, bytes: *bytes }).collect();
        let config = PlannerConfig {
            host_bytes,
            weight_cache_bytes,
            max_sequences: 4,
            device: DeviceChoice::Auto,
            gpus: Ok(gpus),
            fresh_grace: FRESH_GRACE,
        };
        Self {
            state: LoaderState::new(config, FIRST_RETRY),
            now: Instant::now(),
            models: models.into_iter().enumerate().map(|(index, model)| (model_id(index), model)).collect(),
            pinned: BTreeSet::new(),
            yielding: false,
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

    /// Applies the event, executes all commands and returns them.
    pub fn process(&mut self, event: Event) -> Vec<Command> {
        let mut all = Vec::new();
        let mut next = Some(event);
        while let Some(event) = next {
            self.state.observed = self.observe();
            let waiting: Vec<ModelId> = self.state.waiting.iter().cloned().collect();
            let commands = apply(&mut self.state, event, self.now);
            next = (!commands.is_empty()).then_some(Event::Continue);
            let with_outcome = commands.iter().position(Command::has_outcome);
            assert!(with_outcome.is_none_or(|at| at + 1 == commands.len()), "not the last one: {commands:?}");
            for command in &commands {
                if let Some(outcome) = self.execute(command, &waiting) {
                    next = Some(outcome);
                }
                self.check_capacity();
            }
            all.extend(commands);
            assert!(all.len() < MAX_COMMANDS, "the planner does not come to an end: {:?}", &all[MAX_COMMANDS - 20..]);
        }
        self.check_planning_again_changes_nothing();
        all
    }

    /// Requests the model as the registry does.
    pub fn request(&mut self, model: &ModelId) -> Vec<Command> {
        match self.state.phase(model) {
            ModelPhase::Ready | ModelPhase::Loading => Vec::new(),
            ModelPhase::Unknown | ModelPhase::OnDisk | ModelPhase::Draining | ModelPhase::Unusable => {
                self.process(Event::LoadRequested(model.clone()))
            }
        }
    }

    /// Starts a sequence on a model, if the model takes sequences now.
    pub fn start_sequence(&mut self, model: &ModelId) {
        if self.yielding || self.state.phase(model) != ModelPhase::Ready {
            return;
        }
        self.uses += 1;
        self.last_use.insert(model.clone(), self.uses);
        if let Some(engine) = self.engines.get_mut(model) {
            engine.running += 1;
        }
        self.process(Event::EnginesChanged);
    }

    pub fn end_sequences(&mut self, model: &ModelId) {
        if let Some(engine) = self.engines.get_mut(model) {
            engine.running = 0;
        }
        self.process(Event::EnginesChanged);
    }

    pub fn advance(&mut self, time: Duration) {
        self.now += time;
        self.process(Event::Tick);
    }

    /// Calls the planner at the times that it requests, until `time` has passed.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.state.next_wakeup(self.now).max(self.now + Duration::from_millis(1));
            self.process(Event::Tick);
        }
    }

    fn observe(&self) -> Observation {
        let engine = |(model, engine): (&ModelId, &SimEngine)| {
            let unallocated = engine.host_bytes / 4;
            let pinned = self.pinned.contains(model);
            (model.clone(), EngineObservation { running: engine.running, unallocated, pinned })
        };
        let allocated: u64 = self.engines.values().map(|engine| engine.host_bytes - engine.host_bytes / 4).sum();
        let taken = self.other_bytes + allocated + self.cached.values().sum::<u64>();
        Observation {
            available: self.machine_bytes.saturating_sub(taken),
            kv_cache_unallocated: 0,
            gpu_free: vec![None; self.state.gpus().len()],
            yielding: self.yielding,
            last_use: self.last_use.clone(),
            engines: self.engines.iter().map(engine).collect(),
        }
    }

    fn execute(&mut self, command: &Command, waiting: &[ModelId]) -> Option<Event> {
        match command {
            Command::Estimate { model, request } => {
                let estimate = self.estimate(model, request);
                Some(Event::Estimated { model: model.clone(), estimate })
            }
            Command::Load(load) => Some(self.load(load, waiting)),
            Command::BeginUnload { model, evicted_for } => {
                if let Some(wanted) = evicted_for {
                    self.check_eviction(model, wanted);
                }
                None
            }
            Command::Unload { model } => Some(self.unload(model)),
            Command::DropCachedWeights { model } => {
                assert!(self.cached.remove(model).is_some(), "{model} has no cached weights");
                None
            }
            Command::SetStatus { model, status } => {
                if let Status::Unusable { permanent: false, .. } = status {
                    self.check_refusal(model);
                }
                self.statuses.insert(model.clone(), status.clone());
                None
            }
            Command::SetFreeBytes(_) => None,
        }
    }

    fn estimate(&mut self, model: &ModelId, request: &EstimateRequest) -> Estimate {
        let sim = self.models.get_mut(model).unwrap();
        match request {
            EstimateRequest::Host { may_fetch: false } if !sim.is_installed => return Estimate::NotInstalled,
            EstimateRequest::Host { .. } | EstimateRequest::Gpus { .. } => sim.is_installed = true,
        }
        match request {
            EstimateRequest::Host { .. } if !sim.is_readable => {
                Estimate::HostUnreadable { reason: "corrupt".to_owned() }
            }
            EstimateRequest::Host { .. } => Estimate::Host(sim.estimate()),
            EstimateRequest::Gpus { free } => {
                let fit = gpu_for(sim, free).map(|_| sim.estimate().smallest).ok_or("no GPU fits".to_owned());
                Estimate::Gpus { free: free.clone(), fit }
            }
        }
    }

    fn load(&mut self, load: &LoadCommand, waiting: &[ModelId]) -> Event {
        assert!(!self.yielding, "{load:?} during a yield");
        let model = load.model.clone();
        let sim = &self.models[&model];
        assert!(load.host_bytes <= self.unpromised(), "{load:?} exceeds the host");
        self.cached.remove(&model);
        let on_gpu = match &load.target {
            LoadTarget::Gpus { free, .. } => gpu_for(sim, free),
            LoadTarget::Host => None,
        };
        let result = match (on_gpu, sim.estimate().fit(load.host_bytes)) {
            _ if !sim.is_readable => Err(LoadFailure::Permanent { reason: "corrupt".to_owned() }),
            (Some(share), _) => Ok(LoadedSize { host_bytes: 0, gpus: vec![share] }),
            (None, Ok(estimate)) => Ok(LoadedSize { host_bytes: estimate.total(), gpus: Vec::new() }),
            (None, Err(error)) => Err(LoadFailure::OutOfMemory {
                reason: "full".to_owned(),
                host: Some(Box::new(error.estimate)),
                gpus: None,
            }),
        };
        if let Ok(size) = &result {
            // Models that are loaded together at start are not in the queue of waiting models.
            let is_requested = self.state.loading.as_ref().is_some_and(|load| load.origin == LoadOrigin::Requested);
            let waiting = if is_requested { waiting } else { &[] };
            let before = waiting.iter().take_while(|waiting| **waiting != model);
            self.check_backfill(size.host_bytes, &before.cloned().collect::<Vec<_>>());
            self.engines.insert(model.clone(), SimEngine { host_bytes: size.host_bytes, running: 0 });
        }
        Event::LoadFinished { model, result }
    }

    fn unload(&mut self, model: &ModelId) -> Event {
        assert_eq!(self.engines[model].running, 0, "{model} runs sequences");
        if self.shared_unloads > 0 {
            self.shared_unloads -= 1;
            return Event::StillShared { model: model.clone() };
        }
        let engine = self.engines.remove(model).unwrap();
        let sim = &self.models[model];
        let cached = (engine.host_bytes > 0).then(|| {
            self.cached.insert(model.clone(), sim.weights);
            CachedModel { model: model.clone(), bytes: sim.weights, estimate: sim.estimate() }
        });
        let state = Box::new(model_state(model, Residency::Available));
        Event::Unloaded { model: model.clone(), state, cached }
    }

    fn unpromised(&self) -> u64 {
        let taken: u64 = self.engines.values().map(|engine| engine.host_bytes).sum();
        self.state.config.host_bytes.checked_sub(taken).unwrap_or_else(|| panic!("the host is exceeded by {taken}"))
    }

    fn check_capacity(&self) {
        self.unpromised();
        for gpu in self.state.gpus() {
            let engines = self.state.engines().map(|(_, loaded)| loaded);
            let shares = engines.flat_map(|loaded| &loaded.gpus).filter(|share| share.gpu == gpu.index);
            let taken: u64 = shares.map(|share| share.bytes).sum();
            assert!(taken <= gpu.bytes, "GPU {} has {} bytes and {taken} are taken", gpu.index, gpu.bytes);
        }
        // The weights of an unloaded model may exceed the cache until the planner drops them.
        let largest = self.models.values().map(|model| model.weights).max().unwrap_or(0);
        assert!(self.cached.values().sum::<u64>() <= self.state.config.weight_cache_bytes + largest);
    }

    /// Asserts that the victim is not pinned, and that the wanted model fits beside the pinned models.
    fn check_eviction(&self, victim: &ModelId, wanted: &ModelId) {
        assert!(!self.pinned.contains(victim), "{victim} is pinned");
        let (_, evicted) = self.state.draining.iter().find(|(model, _)| model == victim).unwrap();
        let sim = &self.models[wanted];
        let pinned = || self.state.loaded.iter().filter(|(model, _)| self.pinned.contains(*model));
        if evicted.gpus.is_empty() {
            let stays: u64 = pinned().map(|(_, loaded)| loaded.host_bytes).sum();
            let smallest = sim.estimate().smallest_bytes();
            assert!(smallest + stays <= self.state.config.host_bytes, "{victim} is evicted for nothing");
        } else {
            let free = self.state.gpus().iter().map(|gpu| {
                let shares = pinned().flat_map(|(_, loaded)| &loaded.gpus).filter(|share| share.gpu == gpu.index);
                gpu.bytes - shares.map(|share| share.bytes).sum::<u64>()
            });
            assert!(gpu_for(sim, &free.collect::<Vec<_>>()).is_some(), "{victim} is evicted for nothing");
        }
    }

    /// Asserts that a model is refused only if it would not fit even after all permitted evictions.
    fn check_refusal(&self, model: &ModelId) {
        if !self.state.gpus().is_empty() {
            return;
        }
        let is_pinned = |model: &ModelId| self.pinned.contains(model) && self.state.loaded.contains_key(model);
        let bytes = |pinned: bool| {
            let engines = self.state.engines().filter(|(model, _)| is_pinned(model) == pinned);
            engines.map(|(_, loaded)| loaded.host_bytes).sum::<u64>()
        };
        let observed = self.observe();
        let unallocated: u64 = observed.engines.values().map(|engine| engine.unallocated).sum();
        let freed = bytes(false) + self.cached.values().sum::<u64>();
        let there = (observed.available + freed).saturating_sub(unallocated);
        let at_most = there.min(self.state.config.host_bytes - bytes(true));
        let smallest = self.models[model].estimate().smallest_bytes();
        assert!(smallest > at_most, "{model} needs {smallest} and is refused, {at_most} could be had");
    }

    /// Asserts that a load of `taken` bytes leaves enough memory for the models `before` it in the queue.
    fn check_backfill(&self, taken: u64, before: &[ModelId]) {
        // `before` is the queue before the planner was called. A model of it that was loaded together with others meanwhile
        // waits no more.
        let before: Vec<&ModelId> =
            before.iter().filter(|model| self.state.phase(model) != ModelPhase::Ready).collect();
        // A waiting model that is still being unloaded is skipped, so the model behind it may be the first.
        if before.is_empty() || !self.state.gpus().is_empty() {
            return;
        }
        let is_coming = |(model, loaded): &(&ModelId, &LoadedModel)| {
            let is_fresh = self.now - loaded.loaded_at < FRESH_GRACE
                && self.last_use.get(*model).copied().unwrap_or(0) == loaded.used_before;
            !self.pinned.contains(*model) && self.engines[*model].running == 0 && is_fresh
        };
        let fresh = self.state.loaded.iter().filter(is_coming).map(|(_, loaded)| loaded);
        let draining = self.state.draining.iter().map(|(_, loaded)| loaded);
        let coming: u64 = fresh.chain(draining).map(|loaded| loaded.host_bytes).sum();
        let reserved = before.iter().map(|model| {
            let smallest = self.models[*model].estimate().smallest_bytes();
            let smallest = if self.models[*model].is_readable { smallest } else { 0 };
            self.state.last_bytes.get(*model).copied().unwrap_or(0).max(smallest)
        });
        let reserved: u64 = reserved.sum();
        assert!(reserved + taken <= self.unpromised() + coming, "{before:?} need {reserved}, {taken} are taken");
    }

    fn check_planning_again_changes_nothing(&self) {
        for event in [Event::Continue, Event::EnginesChanged] {
            let mut again = self.state.clone();
            again.observed = self.observe();
            let before = again.clone();
            assert_eq!(apply(&mut again, event, self.now), []);
            assert!(again == before, "{again:?}\nafter {before:?}");
        }
    }
}

/// Allocation of the model on the GPU with the most free memory; `None` if it does not fit.
fn gpu_for(model: &SimModel, free: &[u64]) -> Option<GpuBytes> {
    let (gpu, free) = free.iter().copied().enumerate().max_by_key(|(_, free)| *free)?;
    let bytes = model.gpu_bytes.filter(|bytes| *bytes <= free)?;
    Some(GpuBytes { gpu, bytes, later: 0 })
}
