//! Loads one model: from cached weights, onto GPUs, or from the disk to the host.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cfq_engine::cuda::{Gpu, GpuAllocation, free_of};
use cfq_engine::{EngineLimits, FileStamp, LoadError, LocalEngine, PromptTokenizer, StepHook};
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use super::load_record::LoadRecord;
use super::plan::event::{LoadAction, LoadFailure, LoadTarget};
use super::{CachedFile, LoadedEngine, Loader, PinState};
use crate::gpu::{self, DeviceChoice, open_gpus};
use crate::models::{MeasuredLoad, ModelError, ModelFileLock, PullOptions, PullProgress};
use crate::node::error::with_causes;
use crate::node::unusable::{MemoryShortage, UnusableReason};

impl Loader {
    /// Loads a model. A panic during the load makes only this model unusable.
    pub(super) fn load(&mut self, load: &LoadAction) -> Result<LoadedEngine, LoadFailure> {
        let started = Instant::now();
        let (model, limits) = (&load.model, self.limits(load.host_bytes));
        let cached = self.cached.remove(model);
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| {
            if let LoadTarget::Gpus { free, sharers } = &load.target
                && let Some(loaded) = self.load_on_gpus(model, limits, free, *sharers)?
            {
                return Ok(loaded);
            }
            if let Some(CachedFile { weights, stamp }) = cached
                && let Ok(Some(file)) = self.store.lock_present(model)
                && stamp.is_some()
                && stamp == FileStamp::of(&file.path)
            {
                let engine = weights.start(limits, self.registry.changes().clone());
                let engine = engine.map_err(|error| self.failure(model, &error))?;
                tracing::info!(%model, seconds = started.elapsed().as_secs_f64(), "model loaded from the weight cache");
                return Ok((engine, file));
            }
            let file = self.fetch(model).map_err(LoadFailure::Permanent)?;
            let engine = self.load_on_host(model, &file, limits)?;
            Ok((engine, file))
        }));
        let (engine, file) = attempt
            .unwrap_or_else(|_| Err(LoadFailure::Permanent(UnusableReason::LoadPanicked { model: model.clone() })))?;
        Ok(LoadedEngine { engine: Arc::new(engine), file, pin: PinState::default() })
    }

    /// Loads the model onto the GPUs, as one of `sharers` models that share the `free` bytes of each GPU. `None` if the
    /// model has to run on the CPU.
    fn load_on_gpus(
        &self,
        model: &ModelId,
        limits: EngineLimits,
        free: &[u64],
        sharers: u64,
    ) -> Result<Option<(LocalEngine, ModelFileLock)>, LoadFailure> {
        if self.gpus.is_empty() {
            return Ok(None);
        }
        let file = self.fetch(model).map_err(LoadFailure::Permanent)?;
        let gpus = self.gpus_with(model, free);
        let prompts = self.start_sandbox(model, &file.path).map_err(LoadFailure::Permanent)?;
        let load = |sharers| {
            LocalEngine::builder(model.clone(), &file.path)
                .limits(limits)
                .changes(self.registry.changes().clone())
                .kv_cache(self.kv_cache.clone())
                .before_step(failpoint_hook())
                .prompts(prompts.clone())
                .load_on_gpus(&gpus, sharers)
        };
        let loaded = {
            let mut record = LoadRecord::begin(&self.store, model);
            let before = self.driver_free(&gpus);
            let loaded = match load(sharers) {
                Err(LoadError::DoesNotFitGpus { .. }) if sharers > 1 => load(1),
                loaded => loaded,
            };
            if let Ok(engine) = &loaded {
                record.took = measured_on_gpus(engine.gpu_allocations(), &gpus, &before, &self.driver_free(&gpus));
            }
            loaded
        };
        match loaded {
            Ok(engine) => Ok(Some((engine, file))),
            Err(
                error @ (LoadError::DoesNotFitGpus { .. }
                | LoadError::CpuOnly { .. }
                | LoadError::GpuMemoryExhausted { .. }),
            ) if self.config.device == DeviceChoice::Auto => {
                tracing::warn!(%model, reason = with_causes(&error), "model cannot run on a GPU, it runs on the CPU");
                Ok(None)
            }
            Err(error) => Err(self.failure(model, &error)),
        }
    }

    /// Free bytes of each GPU as the driver reports them, by [`Gpu::index`]. Empty while sequences run on another
    /// model, because their forward passes allocate and free memory, or if no driver reports the free memory.
    fn driver_free(&self, gpus: &[Gpu]) -> BTreeMap<usize, u64> {
        if !self.is_quiet() {
            return BTreeMap::new();
        }
        let free = |gpu: &Gpu| Some((gpu.index, gpu.device.synchronize().ok().and_then(|()| free_of(&gpu.device))?));
        gpus.iter().filter_map(free).collect()
    }

    /// Loads the model from the disk to the host. The model's memory is measured if no sequence runs, since then
    /// nothing else changes the memory of the process.
    fn load_on_host(
        &self,
        model: &ModelId,
        file: &ModelFileLock,
        limits: EngineLimits,
    ) -> Result<LocalEngine, LoadFailure> {
        let overhead = self.host_overhead(model);
        let prompts = self.start_sandbox(model, &file.path).map_err(LoadFailure::Permanent)?;
        let mut record = LoadRecord::begin(&self.store, model);
        let before = gpu::anonymous_memory().filter(|_| self.is_quiet());
        let engine = LocalEngine::builder(model.clone(), &file.path)
            .limits(limits)
            .overhead_per_mille(overhead)
            .changes(self.registry.changes().clone())
            .kv_cache(self.kv_cache.clone())
            .before_step(failpoint_hook())
            .prompts(prompts)
            .load();
        let took = match (before, gpu::anonymous_memory().filter(|_| self.is_quiet()), &engine) {
            (Some(before), Some(after), Ok(engine)) => {
                Some(MeasuredLoad { predicted: engine.predicted_bytes(), measured: after.saturating_sub(before) })
            }
            _ => None,
        };
        record.took = took.map(|took| ("cpu".to_owned(), took)).into_iter().collect();
        engine.map_err(|error| self.failure(model, &error))
    }

    /// Starts the child process that prepares the model's prompts, and waits until it has read the file; `None` if the
    /// node prepares them itself.
    fn start_sandbox(&self, model: &ModelId, path: &Path) -> Result<Option<Arc<dyn PromptTokenizer>>, UnusableReason> {
        let Some(sandbox) = &self.config.sandbox else { return Ok(None) };
        let started = Instant::now();
        let (prompts, facts) =
            sandbox.start(model, path).map_err(|error| UnusableReason::of_sandbox(model, path, &error))?;
        let ms = started.elapsed().as_millis();
        tracing::info!(
            %model,
            ms,
            architecture = facts.architecture,
            context = facts.context,
            tokens = facts.tokens,
            system_messages = facts.system_messages,
            several_turns = facts.several_turns,
            "model file read in a child process, which prepares the prompts"
        );
        Ok(Some(Arc::new(prompts)))
    }

    /// Converts a load error into the failure that the planner receives. If memory was short, the failure contains the
    /// estimate of the memory needed.
    fn failure(&self, model: &ModelId, error: &LoadError) -> LoadFailure {
        let host = match error {
            LoadError::DoesNotFit { source, .. } => Some(source.estimate),
            LoadError::DoesNotFitGpus { .. } | LoadError::GpuMemoryExhausted { .. } => None,
            LoadError::Header(_) | LoadError::Weights { .. } | LoadError::CpuOnly { .. } | LoadError::Thread(_) => {
                return LoadFailure::Permanent(unusable_reason(model, error));
            }
        };
        let (host, gpus) = (host.map(Box::new), self.estimate_alone_on_gpus(model).map(Box::new));
        LoadFailure::OutOfMemory { shortage: MemoryShortage::new(with_causes(error)), host, gpus }
    }

    /// Fetches the model if it is not installed, and locks its file. The header is read here only if there is no
    /// sandbox for it.
    ///
    /// # Errors
    /// [`UnusableReason::FetchFailed`], or that of [`UnusableReason::of_header`] if the file is not a supported model.
    pub(super) fn fetch(&self, model: &ModelId) -> Result<ModelFileLock, UnusableReason> {
        let mut logged = 0;
        let mut report = |progress: PullProgress| match progress {
            PullProgress::Transferred { done, total } if done >= logged + total / 10 => {
                logged = done;
                tracing::info!(%model, done = %Bytes(done), total = %Bytes(total), "fetching model");
            }
            PullProgress::Started { bytes, have, .. } => {
                let (total, have) = (Bytes(bytes), Bytes(have));
                tracing::info!(%model, %total, %have, "model is not installed: fetching it");
            }
            PullProgress::Retrying { reason, wait } => {
                tracing::warn!(%model, reason, wait = wait.as_secs_f64(), "fetch failed and is retried");
            }
            PullProgress::Waiting => {
                tracing::info!(%model, "waiting for another process that fetches into the same folder");
            }
            PullProgress::Transferred { .. } | PullProgress::Evicted { .. } => {}
        };
        let options = PullOptions { skip_header: self.config.sandbox.is_some(), ..PullOptions::default() };
        self.config.store().pull(model, options, &mut report).map_err(|error| {
            let detail = with_causes(&error);
            match error {
                ModelError::Header(header) => UnusableReason::of_header(model, &header, detail),
                _ => UnusableReason::FetchFailed { model: model.clone(), detail },
            }
        })
    }
}

/// Opens the GPUs of the `device` setting; none for the CPU.
///
/// # Errors
/// [`UnusableReason::DeviceUnusable`] if the setting names a GPU that cannot be used; then all models are unusable.
/// With `auto`, the reason is only logged.
pub(super) fn open(device: DeviceChoice) -> Result<Vec<Gpu>, UnusableReason> {
    match (device, open_gpus(device)) {
        (DeviceChoice::Cpu, _) => Ok(Vec::new()),
        (_, Ok(gpus)) => Ok(gpus),
        (DeviceChoice::Cuda(_), Err(error)) => {
            Err(UnusableReason::DeviceUnusable { device, detail: with_causes(&error) })
        }
        (DeviceChoice::Auto, Err(error)) => {
            tracing::info!(reason = with_causes(&error), "no GPU can be used, models run on the CPU");
            Ok(Vec::new())
        }
    }
}

/// Converts an error of the engine into the reason why `model` cannot be used.
pub(super) fn unusable_reason(model: &ModelId, error: &LoadError) -> UnusableReason {
    let detail = with_causes(error);
    match error {
        LoadError::Header(header) => UnusableReason::of_header(model, header, detail),
        LoadError::Weights { .. } => UnusableReason::Unreadable { model: model.clone(), detail },
        LoadError::CpuOnly { .. } => UnusableReason::CpuOnly { detail },
        LoadError::Thread(_) => UnusableReason::EngineNotStarted { detail },
        LoadError::DoesNotFit { .. } | LoadError::DoesNotFitGpus { .. } | LoadError::GpuMemoryExhausted { .. } => {
            UnusableReason::TooLarge(MemoryShortage::new(detail))
        }
    }
}

/// Memory that a load used on each GPU whose free memory was read both before and after it.
fn measured_on_gpus(
    allocations: &[GpuAllocation],
    gpus: &[Gpu],
    before: &BTreeMap<usize, u64>,
    after: &BTreeMap<usize, u64>,
) -> Vec<(String, MeasuredLoad)> {
    let measured = |allocation: &GpuAllocation| {
        let bytes = before.get(&allocation.gpu)?.saturating_sub(*after.get(&allocation.gpu)?);
        let gpu = gpus.iter().find(|gpu| gpu.index == allocation.gpu)?;
        Some((measurement_key(gpu), MeasuredLoad::of_gpu_weights(allocation, bytes)))
    };
    allocations.iter().filter_map(measured).collect()
}

/// Key under which measurements of a GPU are stored.
pub(super) fn measurement_key(gpu: &Gpu) -> String {
    gpu::measurement_key(&gpu.id(), gpu.uuid.as_deref())
}

/// Creates the hook that triggers a failpoint before every forward pass.
fn failpoint_hook() -> StepHook {
    Arc::new(|| cfq_link::failpoint::panics("node.computing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_is_measured_if_it_was_read_before_and_after() {
        let allocation =
            |gpu| GpuAllocation { gpu, total_bytes: 1000, scratch_bytes: 300, weight_bytes: 400, overhead_bytes: 0 };
        let free = |of: &[(usize, u64)]| of.iter().copied().collect::<BTreeMap<_, _>>();
        let gpu = |index, uuid: Option<&str>| Gpu {
            index,
            name: "a GPU".to_owned(),
            uuid: uuid.map(str::to_owned),
            device: candle_core::Device::Cpu,
            free_bytes: 5000,
            bandwidth: 1.0,
            overhead_per_mille: 0,
        };
        let gpus = [gpu(2, Some("GPU-c")), gpu(1, Some("GPU-b")), gpu(0, Some("GPU-a"))];
        let allocations = [allocation(0), allocation(1), allocation(2)];
        let took = measured_on_gpus(&allocations, &gpus, &free(&[(0, 5000), (1, 5000)]), &free(&[(0, 4200), (2, 10)]));
        assert_eq!(took, [("GPU-a".to_owned(), MeasuredLoad { predicted: 400, measured: 500 })]);
        let nameless = measured_on_gpus(&allocations, &[gpu(0, None)], &free(&[(0, 5000)]), &free(&[(0, 4200)]));
        assert_eq!(nameless, [("cuda:0".to_owned(), MeasuredLoad { predicted: 400, measured: 500 })]);
        assert_eq!(measured_on_gpus(&[], &gpus, &free(&[(0, 5000)]), &free(&[(0, 1)])), []);
    }
}
