//! Tests that drive the loader step by step, with small real models and with candle's CPU device in place of GPUs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::Device;
use cfq_engine::cuda::{Gpu, estimate_on_gpus};
use cfq_engine::{EngineLimits, HostKvCache, LoadError, estimate_memory};
use cfq_proto::messages::ModelReply;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use super::plan::backoff::Backoff;
use super::plan::event::{LoadAction, LoadFailure, LoadTarget};
use super::plan::state::{LoadInProgress, LoadOrigin, ModelPhase};
use super::*;
use crate::node::model_registry::ModelStatus;
use crate::node::unusable::{MemoryShortage, UnusableReason};

mod gpus;
mod thread;

const CUDA_0: usize = 0;

fn file(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/models").join(family)
}

fn id(family: &str) -> ModelId {
    format!("path:{}", file(family).display()).parse().unwrap()
}

fn gpu_with(free: u64) -> Gpu {
    let name = "a GPU".to_owned();
    Gpu {
        index: CUDA_0,
        name,
        uuid: None,
        device: Device::Cpu,
        free_bytes: free,
        bandwidth: 1.0,
        overhead_per_mille: 0,
    }
}

fn limits(memory: u64) -> EngineLimits {
    EngineLimits { memory_bytes: memory, max_sequences: 4 }
}

fn largest_on_host(family: &str) -> u64 {
    estimate_memory(&file(family), limits(u64::MAX), 0).unwrap().total()
}

fn smallest_at(path: &Path) -> u64 {
    match estimate_memory(path, limits(0), 0) {
        Err(LoadError::DoesNotFit { source, .. }) => source.estimate.total(),
        other => panic!("{other:?}"),
    }
}

fn smallest_on_host(family: &str) -> u64 {
    smallest_at(&file(family))
}

fn largest_on_gpu(path: &Path) -> u64 {
    estimate_on_gpus(path, &[gpu_with(u64::MAX)], limits(0)).unwrap().total()
}

/// Minimum memory of a GPU that fits the model, in bytes.
fn smallest_on_gpu(family: &str) -> u64 {
    let (mut low, mut high) = (0, largest_on_gpu(&file(family)));
    while low < high {
        let middle = low + (high - low) / 2;
        match estimate_on_gpus(&file(family), &[gpu_with(middle)], limits(0)) {
            Ok(_) => high = middle,
            Err(_) => low = middle + 1,
        }
    }
    high
}

fn families_by(size: fn(&str) -> u64) -> [&'static str; 3] {
    let mut families = ["llama", "qwen2", "gemma3"];
    families.sort_by_key(|family| size(family));
    families
}

struct TestLoader {
    loader: Loader,
    registry: Arc<ModelRegistry>,
    _folder: tempfile::TempDir,
}

/// Creates a loader with `host` bytes of host memory for models, and with one GPU of `gpu` bytes, if given.
fn loader(host: u64, gpu: Option<u64>, accept_timeout_ms: u64) -> TestLoader {
    let folder = tempfile::tempdir().unwrap();
    let mut config: Config = serde_json::from_value(serde_json::json!({
        "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(), "models": [],
        "memory_limit": host, "kv_offload_bytes": 0, "weight_cache_bytes": 0, "max_sequences": 4,
        "hub": { "endpoint": "http://127.0.0.1:1" },
    }))
    .unwrap();
    config.timing.accept_timeout_ms = accept_timeout_ms;
    let (registry, commands) = ModelRegistry::new(&config, Arc::default());
    let mut test = TestLoader { loader: Loader::new(&registry, &config, commands), registry, _folder: folder };
    test.set_gpus(gpu.map(gpu_with).into_iter().collect());
    test
}

impl TestLoader {
    fn set_gpus(&mut self, gpus: Vec<Gpu>) {
        self.loader.state.config.gpus = Ok(capacities(&gpus));
        self.loader.gpus = gpus;
    }

    /// Requests a model as a job does, and performs the work of the loader thread.
    fn request(&mut self, family: &str) -> ModelState {
        self.request_model(&id(family));
        self.state(family)
    }

    fn request_model(&mut self, model: &ModelId) {
        assert!(matches!(self.registry.load(model, || Ok(())), ModelReply::Loading { .. }));
        while let Ok(command) = self.loader.commands.try_recv() {
            self.loader.on_command(command);
        }
    }

    fn unload(&mut self, family: &str) {
        self.loader.process(LoaderEvent::UnloadRequested(id(family)));
    }

    /// Loads the model with `host_bytes` of host memory, or onto the GPU if there is one.
    fn load_with(&mut self, model: &ModelId, host_bytes: u64) {
        self.registry.set_status(model, ModelStatus::Loading);
        self.loader.state.observed = self.loader.observe();
        let target = match self.loader.gpus.is_empty() {
            true => LoadTarget::Host,
            false => LoadTarget::Gpus { free: self.loader.state.gpu_free_now(), sharers: 1 },
        };
        let (used_before, origin) = (0, LoadOrigin::Requested);
        self.loader.state.unloaded.insert(model.clone(), ModelPhase::Loading);
        self.loader.state.loading = Some(LoadInProgress { model: model.clone(), host_bytes, used_before, origin });
        let load = LoadAction { model: model.clone(), host_bytes, target };
        let outcome = self.loader.execute(plan::event::LoaderAction::Load(load)).unwrap();
        self.loader.process(outcome);
        assert!(matches!(self.registry.status(model), Some(ModelStatus::Resident(_))), "{:?}", self.registry.ledger());
    }

    /// Installs a fixture as if it had been fetched, because a user's own file cannot be pinned.
    fn install(&self, family: &str) -> ModelId {
        let model: ModelId = format!("hf:den/{family}:model.gguf").parse().unwrap();
        let (store, models) = (self.loader.config.store(), &self.loader.config.model_dir);
        // The name of the lock file gives the name of the record.
        assert!(store.lock_present(&model).unwrap().is_none());
        let folder = models.join("hf/den").join(family);
        let lock = std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.path()).next().unwrap();
        let path = format!("hf/den/{family}/model.gguf");
        let bytes = std::fs::copy(file(family).join("model.gguf"), models.join(&path)).unwrap();
        let record = serde_json::json!({
            "format": 1, "model": model, "pinned": false, "fetched_at": 1, "used_at": 1,
            "files": [{ "path": path, "bytes": bytes }],
        });
        std::fs::write(lock.with_extension("json"), record.to_string()).unwrap();
        model
    }

    fn pin(&self, model: &ModelId, pinned: bool) {
        assert_eq!(self.loader.config.store().pin(model, pinned).unwrap().pinned, pinned);
    }

    fn state(&self, family: &str) -> ModelState {
        self.registry.ledger().models.into_iter().find(|state| state.model == id(family)).unwrap()
    }

    /// Why the model is unusable.
    fn unusable_reason(&self, family: &str) -> UnusableReason {
        match self.registry.status(&id(family)) {
            Some(ModelStatus::Unusable(reason)) => reason,
            _ => panic!("{:?}", self.state(family)),
        }
    }

    fn engine(&self, family: &str) -> &LocalEngine {
        &self.loader.engines[&id(family)].engine
    }

    /// Records a use of the model, which ends its grace period.
    fn use_model(&self, family: &str) {
        self.registry.record_use(&id(family));
    }

    /// Unloads the model and loads it again on a GPU with this index and UUID. Returns its estimated bytes and its
    /// device.
    fn reloaded_on(&mut self, family: &str, index: usize, uuid: Option<&str>) -> (u64, String) {
        self.unload(family);
        self.set_gpus(vec![Gpu { index, uuid: uuid.map(str::to_owned), ..gpu_with(u64::MAX) }]);
        let state = self.request(family);
        (state.need_bytes, state.device)
    }
}

/// Asserts that an idle model is not evicted if that would be useless: one model is pinned, one is idle, and `large`
/// lacks one byte to fit beside the pinned one.
fn idle_model_stays_beside_a_pinned_one(mut test: TestLoader, [idle, large]: [&str; 2], memory: [u64; 2]) {
    test.loader.state.backoff = Backoff::new(Duration::from_secs(60));
    let pinned = test.install("llama");
    test.pin(&pinned, true);
    test.load_with(&pinned, memory[0]);
    test.load_with(&id(idle), memory[1]);
    // Every attempt has the same result.
    for _ in 0..2 {
        test.request(large);
        let reason = test.unusable_reason(large);
        assert!(matches!(&reason, UnusableReason::OutOfMemory { .. }), "{reason}");
        assert_eq!(test.state(idle).residency, Residency::Resident, "an eviction would be useless");
        assert!(matches!(test.registry.status(&pinned), Some(ModelStatus::Resident(_))));
    }
    test.pin(&pinned, false);
    assert_eq!(test.request(large).residency, Residency::Resident);
}

#[test]
fn nothing_is_evicted_for_a_model_that_does_not_fit_beside_a_pinned_one() {
    let mut families = ["qwen2", "gemma3"];
    families.sort_by_key(|family| smallest_on_host(family));
    let [idle, large] = families.map(smallest_on_host);
    let pinned = smallest_at(&file("llama").join("model.gguf"));
    assert!(idle < large, "{idle} {large}");
    idle_model_stays_beside_a_pinned_one(loader(pinned + large - 1, None, 0), families, [pinned, idle]);

    let mut families = ["qwen2", "gemma3"];
    families.sort_by_key(|family| smallest_on_gpu(family));
    let [idle, large] = families.map(smallest_on_gpu);
    let pinned = largest_on_gpu(&file("llama").join("model.gguf"));
    assert!(idle < large, "{idle} {large}");
    let test = loader(1 << 20, Some(pinned + large - 1), 0);
    idle_model_stays_beside_a_pinned_one(test, families, [0, 0]);
}

/// A missing model is fetched only when it is the first in the queue. Until then its size is unknown, so the models
/// after it in the queue wait.
#[test]
fn model_that_is_not_installed_is_not_fetched_before_its_turn() {
    let [small, fresh, large] = families_by(smallest_on_host);
    let total = largest_on_host(fresh) + smallest_on_host(large) - 1;
    let mut test = loader(total, None, 600_000);
    assert_eq!(test.request(fresh).residency, Residency::Resident);
    test.loader.state.last_bytes.insert(id(large), 0);
    assert_eq!(test.request(large).residency, Residency::Loading);
    // A fetch would fail immediately in this test and make the model unusable.
    let absent: ModelId = "hf:den/absent:model.gguf".parse().unwrap();
    test.request_model(&absent);
    assert!(matches!(test.registry.status(&absent), Some(ModelStatus::Loading)));
    // The size of the missing model is unknown, so no model behind it in the queue is loaded.
    assert_eq!(test.request(small).residency, Residency::Loading);
    assert_eq!(test.loader.state.waiting, [id(large), absent, id(small)]);
    test.loader.state.waiting.remove(1);
    test.loader.process(LoaderEvent::Tick);
    assert_eq!(test.state(small).residency, Residency::Resident);
}

/// The first model in the queue waits for the end of the grace period of a loaded model. Until then, no other model
/// gets the memory that the waiting model needs.
#[test]
fn model_that_fits_is_loaded_beside_a_waiting_one() {
    let [small, fresh, large] = families_by(smallest_on_host);
    let total = largest_on_host(fresh) + smallest_on_host(large) - 1;
    // The waiting model needs all memory, or only its minimum.
    for (wanted, fits) in [(total, false), (0, true)] {
        let mut test = loader(total, None, 600_000);
        assert_eq!(test.request(fresh).residency, Residency::Resident);
        test.loader.state.last_bytes.insert(id(large), wanted);
        assert_eq!(test.request(large).residency, Residency::Loading);
        assert_eq!(test.request(small).residency == Residency::Resident, fits, "{:?}", test.state(small));
        assert_eq!(test.state(fresh).residency, Residency::Resident, "a model in its grace period is not evicted");
        assert_eq!(test.loader.state.waiting.front(), Some(&id(large)));
    }
}

#[test]
fn only_a_model_that_could_fit_later_is_offered_again() {
    let mut test = loader(1 << 20, None, 10);
    test.request("llama");
    let reason = test.unusable_reason("llama");
    assert!(matches!(&reason, UnusableReason::TooLarge(_)), "{reason}");
    assert_eq!(test.loader.state.backoff.next_due(), None);

    // Memory that is short at present, for example as the driver reports it, is a temporary reason.
    let mut test = loader(1 << 40, None, 10);
    let model = id("qwen2");
    let need = estimate_memory(&file("qwen2"), limits(u64::MAX), 0).unwrap();
    test.registry.set_status(&model, ModelStatus::Loading);
    let origin = LoadOrigin::Requested;
    test.loader.state.loading = Some(LoadInProgress { model: model.clone(), host_bytes: 0, used_before: 0, origin });
    let (shortage, host) = (MemoryShortage::new("full"), Some(Box::new(need)));
    let failure = LoadFailure::OutOfMemory { shortage, host, gpus: None };
    let now = Instant::now();
    let finished = LoaderEvent::LoadFinished { model: model.clone(), result: Err(failure) };
    for action in plan::apply(&mut test.loader.state, finished, now) {
        test.loader.execute(action);
    }
    let reason = test.unusable_reason("qwen2");
    assert!(reason.to_string().starts_with("full. The load is retried"), "{reason}");
    let due = test.loader.state.backoff.next_due().unwrap();
    for (at, is_offered) in [(due - Duration::from_millis(1), false), (due, true)] {
        for action in plan::apply(&mut test.loader.state, LoaderEvent::Tick, at) {
            test.loader.execute(action);
        }
        assert_eq!(matches!(test.state("qwen2").residency, Residency::Available), is_offered);
    }
    assert_eq!(test.state("qwen2"), test.loader.state.state_on_disk(&model, "cpu", &need));
}

/// The kernel reports the unallocated parts of a KV pool and of the host KV cache as available, although they are
/// reserved.
#[test]
fn reserved_memory_is_not_counted_as_available() {
    let mut test = loader(1 << 40, None, 0);
    test.loader.kv_cache = HostKvCache::new(64 << 20, cfq_engine::KvOffloadFormat::F16);
    test.loader.process(LoaderEvent::Tick);
    assert_eq!(test.loader.state.unallocated_bytes(), 64 << 20);
    test.request("llama");
    let (need, unallocated) = (*test.engine("llama").estimate(), test.engine("llama").unallocated_bytes());
    assert!(unallocated >= need.reserve + need.scratch, "{unallocated} of {need}");
    assert!(unallocated + test.engine("llama").weight_bytes() <= need.total(), "{unallocated} of {need}");
    let state = &mut test.loader.state;
    let reserved = state.unallocated_bytes();
    assert_eq!(reserved, unallocated + (64 << 20));
    let mut with_available = |available, bytes: fn(&LoaderState) -> u64| {
        state.observed.available_bytes = available;
        bytes(state)
    };
    let free_now = [reserved - 1, reserved, reserved + 1000].map(|a| with_available(a, LoaderState::free_bytes_now));
    assert_eq!(free_now, [0, 0, 1000]);
    // After the eviction of the model, its memory is available in addition.
    let evicted = [reserved, reserved + 1000].map(|a| with_available(a, LoaderState::bytes_after_evictions));
    assert_eq!(evicted, [need.total(), need.total() + 1000]);
    // The ledger reports the free memory in multiples of a step, at most the unreserved memory.
    let step = 64 << 20;
    let reported = [0, reserved + step - 1, reserved + 3 * step + 1, u64::MAX];
    let reported = reported.map(|a| with_available(a, LoaderState::loadable_bytes));
    assert_eq!(reported, [0, 0, 3 * step, test.loader.state.unreserved_bytes() / step * step]);
}

#[test]
fn unconfigured_model_that_is_unusable_is_removed_by_an_unload() {
    let mut test = loader(1 << 20, None, 10);
    test.request("llama");
    assert!(matches!(test.registry.unload(&id("llama")), ModelReply::Unloaded));
    assert!(test.registry.ledger().models.is_empty());
}

#[test]
fn pin_stays_while_its_record_cannot_be_read() {
    let test = loader(1 << 40, None, 10);
    let model = test.install("llama");
    test.pin(&model, true);
    let (store, mut pin) = (test.loader.config.store(), PinState::default());
    pin.refresh(&store, &model);
    assert!(pin.is_pinned);
    let path = store.record_file(&model).unwrap();
    let record = std::fs::read(&path).unwrap();
    std::fs::write(&path, "{").unwrap();
    pin.refresh(&store, &model);
    assert!(pin.is_pinned);
    std::fs::write(&path, &record).unwrap();
    test.pin(&model, false);
    pin.refresh(&store, &model);
    assert!(!pin.is_pinned);
}
