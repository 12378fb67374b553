//! The model loader: owns the engines of models that are files. It runs on a thread of its own, because a load cannot
//! be interrupted.
//!
//! [`plan`] decides what is loaded, evicted, kept and retried, and documents the policy; this module observes the
//! machine and executes the planner's actions. The thread wakes up on a request, on a change of an engine while models
//! wait or are being unloaded, and at the time that the planner requests.

mod estimate;
mod execute;
mod load;
pub(super) mod load_record;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use cfq_engine::cuda::{Gpu, free_of};
use cfq_engine::{CachedWeights, Engine, FileStamp, HostKvCache, LocalEngine};
use cfq_memory::{Bytes, HostMemorySplit, split_host_memory};
use cfq_proto::model::ModelId;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

use self::plan::event::LoaderEvent;
use self::plan::state::{EngineObservation, LoaderState, Observation, PlannedGpu, PlannerConfig, StartModel};
use crate::config::Config;
use crate::gpu;
use crate::models::{ModelFileLock, ModelStore};
use crate::node::error::with_causes;
use crate::node::model_registry::{LoaderCommand, ModelRegistry};

/// Loads the pending models of the registry, then serves requests until the registry is closed.
///
/// # Errors
/// If the timer of the thread cannot be created.
pub fn run(registry: &Arc<ModelRegistry>, config: &Config, commands: mpsc::Receiver<LoaderCommand>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let mut changed = registry.changes().subscribe();
    // The models never take more of a GPU than was free when it was opened. So if the machine yields to another
    // program, it must end before the GPUs are opened.
    while registry.is_yielding() && !registry.is_closed() {
        if runtime.block_on(changed.changed()).is_err() {
            break;
        }
    }
    Loader::new(registry, config, commands).serve(&runtime, changed);
    Ok(())
}

/// Granularity, in bytes, of the free GPU memory that the planner is told. Forward passes of other models change the
/// exact value continuously, and every new value would need new estimates.
const GPU_FREE_STEP_BYTES: u64 = 64 << 20;

/// A loaded model.
struct LoadedEngine {
    engine: Arc<LocalEngine>,
    /// Lock that prevents the removal of the model's file.
    file: ModelFileLock,
    pin: PinState,
}

/// Whether a model is pinned. `cfq models pin` runs in another process, so the model's record is read again after its
/// file has changed. The check of the file's size and time is cheap enough to do before every planning.
#[derive(Default)]
struct PinState {
    is_pinned: bool,
    /// Size and time of the record file when it was read; `None` if there is no such file.
    record: Option<FileStamp>,
}

impl PinState {
    fn refresh(&mut self, store: &ModelStore, model: &ModelId) {
        let record = store.record_file(model).and_then(|path| FileStamp::of(&path));
        if record == self.record {
            return;
        }
        match store.is_pinned(model) {
            Ok(is_pinned) => *self = Self { is_pinned, record },
            // The old value stays, and the record is read again at the next refresh.
            Err(error) => tracing::debug!(%model, reason = with_causes(&error), "pin record cannot be read"),
        }
    }
}

/// Cached weights of an unloaded model. They hold no lock, so the model's file may be removed.
struct CachedFile {
    weights: CachedWeights,
    stamp: Option<FileStamp>,
}

struct Loader {
    registry: Arc<ModelRegistry>,
    config: Config,
    store: ModelStore,
    commands: mpsc::Receiver<LoaderCommand>,
    state: LoaderState,
    /// Cache of the keys and values that all models have offloaded; `None` if KV offload is disabled.
    kv_cache: Option<Arc<HostKvCache>>,
    gpus: Vec<Gpu>,
    engines: BTreeMap<ModelId, LoadedEngine>,
    cached: BTreeMap<ModelId, CachedFile>,
    /// Files that a child process has read without an error.
    inspected: BTreeMap<ModelId, FileStamp>,
}

/// Why the thread woke up.
enum Wakeup {
    Command(LoaderCommand),
    Event(LoaderEvent),
    Closed,
}

impl Loader {
    fn new(registry: &Arc<ModelRegistry>, config: &Config, commands: mpsc::Receiver<LoaderCommand>) -> Self {
        let memory = gpu::available_memory().min(config.memory_limit.unwrap_or(u64::MAX));
        let HostMemorySplit { models, kv_offload: kv_cache } = split_host_memory(memory, config.kv_offload_bytes);
        tracing::info!(models = %Bytes(models), kv_offload = %Bytes(kv_cache), "host memory divided");
        let (gpus, gpu_error) = match load::open(config.device) {
            Ok(gpus) => (gpus, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let planner = PlannerConfig {
            host_bytes: models,
            weight_cache_bytes: config.weight_cache_bytes,
            max_sequences: config.max_sequences,
            device: config.device,
            gpus: gpu_error.map_or_else(|| Ok(capacities(&gpus)), Err),
            load_grace_period: config.timing.accept_timeout() * 2,
        };
        Self {
            registry: registry.clone(),
            store: config.store(),
            config: config.clone(),
            commands,
            state: LoaderState::new(planner, config.timing.accept_timeout() * 4),
            kv_cache: HostKvCache::new(kv_cache, config.kv_offload_format),
            gpus,
            engines: BTreeMap::new(),
            cached: BTreeMap::new(),
            inspected: BTreeMap::new(),
        }
    }

    fn serve(mut self, runtime: &Runtime, mut changed: watch::Receiver<()>) {
        self.load_pending();
        loop {
            match runtime.block_on(self.wait(&mut changed)) {
                Wakeup::Command(command) => self.on_command(command),
                Wakeup::Event(event) => self.process(event),
                Wakeup::Closed => return,
            }
        }
    }

    async fn wait(&mut self, changed: &mut watch::Receiver<()>) -> Wakeup {
        let deadline = self.state.next_wakeup(Instant::now()).into();
        // Changes of engines matter only while a model waits or is being unloaded.
        let watches_engines = !self.state.waiting.is_empty() || !self.state.unloading.is_empty();
        tokio::select! {
            biased;
            command = self.commands.recv() => command.map_or(Wakeup::Closed, Wakeup::Command),
            Ok(()) = changed.changed(), if watches_engines => Wakeup::Event(LoaderEvent::EnginesChanged),
            () = tokio::time::sleep_until(deadline) => Wakeup::Event(LoaderEvent::Tick),
        }
    }

    fn on_command(&mut self, command: LoaderCommand) {
        match command {
            LoaderCommand::Load(model) => self.process(LoaderEvent::LoadRequested(model)),
            LoaderCommand::Unload(model) => self.process(LoaderEvent::UnloadRequested(model)),
            LoaderCommand::LoadPending => self.load_pending(),
        }
    }

    /// Loads all pending models of the registry together.
    fn load_pending(&mut self) {
        let start = |model: ModelId| {
            let interrupted_loads = self.measured(&model).map_or(0, |measured| measured.interrupted_loads());
            StartModel { model, interrupted_loads }
        };
        let models = self.registry.pending_loads().into_iter().map(start).collect();
        self.process(LoaderEvent::LoadTogether(models));
    }

    /// Passes the event to the planner and executes the returned actions, until the planner returns none.
    fn process(&mut self, event: LoaderEvent) {
        let mut next = Some(event);
        while let Some(event) = next {
            self.state.observed = self.observe();
            let actions = plan::apply(&mut self.state, event, Instant::now());
            next = (!actions.is_empty()).then_some(LoaderEvent::Continue);
            for action in actions {
                if let Some(outcome) = self.execute(action) {
                    next = Some(outcome);
                }
            }
        }
    }

    fn observe(&mut self) -> Observation {
        for (model, loaded) in &mut self.engines {
            loaded.pin.refresh(&self.store, model);
        }
        let yielding = self.registry.is_yielding();
        let engine = |(model, loaded): (&ModelId, &LoadedEngine)| {
            let observation = EngineObservation {
                running: loaded.engine.state().running,
                unallocated_bytes: loaded.engine.unallocated_bytes(),
                pinned: loaded.pin.is_pinned,
            };
            (model.clone(), observation)
        };
        let kv_cache = self.kv_cache.as_ref();
        Observation {
            available_bytes: gpu::available_memory(),
            kv_cache_unallocated_bytes: kv_cache.map_or(0, |cache| cache.capacity().saturating_sub(cache.bytes())),
            // While the machine yields, nothing is loaded, so the GPUs are not queried.
            gpu_free_bytes: if yielding { Vec::new() } else { self.gpus.iter().map(free_in_steps).collect() },
            yielding,
            last_use: self.registry.last_uses(),
            engines: self.engines.iter().map(engine).collect(),
        }
    }

    /// Whether no sequence runs on any engine. Then only a load changes the memory of the process, so its memory can be
    /// measured.
    fn is_quiet(&self) -> bool {
        self.engines.values().all(|loaded| loaded.engine.state().running == 0)
    }
}

fn capacities(gpus: &[Gpu]) -> Vec<PlannedGpu> {
    gpus.iter().map(|gpu| PlannedGpu { index: gpu.index, free_bytes_at_open: gpu.free_bytes }).collect()
}

/// Free memory of a GPU in bytes, rounded down to [`GPU_FREE_STEP_BYTES`]; `None` if the driver does not report it.
fn free_in_steps(gpu: &Gpu) -> Option<u64> {
    free_of(&gpu.device).map(|free| free - free % GPU_FREE_STEP_BYTES)
}
