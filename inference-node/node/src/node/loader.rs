//! The model loader: owns the engines of models that are files. It runs on a thread of its own, because a load cannot
//! be interrupted.
//!
//! [`plan`] decides what is loaded, evicted, kept and retried, and documents the policy; this module observes the
//! machine and executes the planner's commands. The thread wakes up on a request, on a change of an engine while models
//! are waiting or draining, and at the time that the planner requests.

mod estimate;
mod execute;
mod load;
mod load_record;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use cfq_engine::cuda::{Gpu, free_of};
use cfq_engine::{Bytes, CachedWeights, Engine, FileStamp, HostKvCache, LocalEngine};
use cfq_memory::{HostMemorySplit, split_host_memory};
use cfq_proto::model::ModelId;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

use self::plan::event::Event;
use self::plan::state::{EngineObservation, GpuCapacity, LoaderState, Observation, PlannerConfig, StartModel};
use crate::config::Config;
use crate::gpu;
use crate::models::{ModelFileLock, ModelStore};
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

/// Granularity of the free memory that the planner sees of a GPU. Passes of other models change the exact value all the
/// time, and every new value would need new estimates.
const GPU_FREE_STEP_BYTES: u64 = 64 << 20;

/// A loaded model.
struct LoadedEngine {
    engine: Arc<LocalEngine>,
    /// Keeps the model's file from being removed.
    file: ModelFileLock,
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
}

/// Why the thread woke up.
enum Wakeup {
    Command(LoaderCommand),
    Event(Event),
    Closed,
}

impl Loader {
    fn new(registry: &Arc<ModelRegistry>, config: &Config, commands: mpsc::Receiver<LoaderCommand>) -> Self {
        let memory = gpu::available_memory().min(config.memory_limit.unwrap_or(u64::MAX));
        let HostMemorySplit { models, kv_offload: kv_cache } = split_host_memory(memory, config.kv_offload_bytes);
        tracing::info!(models = %Bytes(models), kv_offload = %Bytes(kv_cache), "memory divided");
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
            fresh_grace: config.timing.accept() * 2,
        };
        Self {
            registry: registry.clone(),
            store: config.store(),
            config: config.clone(),
            commands,
            state: LoaderState::new(planner, config.timing.accept() * 4),
            kv_cache: HostKvCache::new(kv_cache, config.kv_offload_format),
            gpus,
            engines: BTreeMap::new(),
            cached: BTreeMap::new(),
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
        // Changes of engines matter only while a model is waiting or draining.
        let watches_engines = !self.state.waiting.is_empty() || !self.state.draining.is_empty();
        tokio::select! {
            biased;
            command = self.commands.recv() => command.map_or(Wakeup::Closed, Wakeup::Command),
            Ok(()) = changed.changed(), if watches_engines => Wakeup::Event(Event::EnginesChanged),
            () = tokio::time::sleep_until(deadline) => Wakeup::Event(Event::Tick),
        }
    }

    fn on_command(&mut self, command: LoaderCommand) {
        match command {
            LoaderCommand::Load(model) => self.process(Event::LoadRequested(model)),
            LoaderCommand::Unload(model) => self.process(Event::UnloadRequested(model)),
            LoaderCommand::LoadPending => self.load_pending(),
        }
    }

    /// Loads all pending models of the registry together.
    fn load_pending(&mut self) {
        let start = |model: ModelId| {
            let killed_loads = self.measured(&model).map_or(0, |measured| measured.interrupted_loads());
            StartModel { model, killed_loads }
        };
        let models = self.registry.pending_loads().into_iter().map(start).collect();
        self.process(Event::LoadTogether(models));
    }

    /// Passes the event to the planner and executes its commands, until it returns none.
    fn process(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            self.state.observed = self.observe();
            let commands = plan::apply(&mut self.state, event, Instant::now());
            next = (!commands.is_empty()).then_some(Event::Continue);
            for command in commands {
                if let Some(outcome) = self.execute(command) {
                    next = Some(outcome);
                }
            }
        }
    }

    fn observe(&self) -> Observation {
        let yielding = self.registry.is_yielding();
        let engine = |(model, loaded): (&ModelId, &LoadedEngine)| {
            let observation = EngineObservation {
                running: loaded.engine.state().running,
                unallocated: loaded.engine.unallocated_bytes(),
                pinned: self.store.show(model).is_ok_and(|installed| installed.pinned),
            };
            (model.clone(), observation)
        };
        let kv_cache = self.kv_cache.as_ref();
        Observation {
            available: gpu::available_memory(),
            kv_cache_unallocated: kv_cache.map_or(0, |cache| cache.capacity().saturating_sub(cache.bytes())),
            // While the machine yields, nothing is loaded, so the GPUs are not queried.
            gpu_free: if yielding { Vec::new() } else { self.gpus.iter().map(free_in_steps).collect() },
            yielding,
            last_use: self.registry.last_uses(),
            engines: self.engines.iter().map(engine).collect(),
        }
    }

    /// Whether no sequence runs on any engine. Then a load is the only thing that changes the memory of the process, so
    /// it can be measured.
    fn is_quiet(&self) -> bool {
        self.engines.values().all(|loaded| loaded.engine.state().running == 0)
    }
}

fn capacities(gpus: &[Gpu]) -> Vec<GpuCapacity> {
    gpus.iter().map(|gpu| GpuCapacity { index: gpu.index, bytes: gpu.free }).collect()
}

/// Free memory of a GPU in bytes, rounded down to [`GPU_FREE_STEP_BYTES`]; `None` if the driver does not report it.
fn free_in_steps(gpu: &Gpu) -> Option<u64> {
    free_of(&gpu.device).map(|free| free - free % GPU_FREE_STEP_BYTES)
}
