//! Execution of the planner's actions.

use std::sync::{Arc, Weak};

use cfq_engine::cuda::trim_memory_pool;
use cfq_engine::{Engine, EngineLimits, FileStamp};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState, Residency};

use super::plan::event::{LoadAction, LoadedSize, LoaderAction, LoaderEvent, PublishedStatus};
use super::plan::host_estimate::HostEstimate;
use super::plan::state::{CachedModel, GpuBytes};
use super::{CachedFile, LoadedEngine, Loader};
use crate::gpu;
use crate::node::model_registry::ModelStatus;

impl Loader {
    /// Executes one action; returns its outcome, if it has one.
    pub(super) fn execute(&mut self, action: LoaderAction) -> Option<LoaderEvent> {
        match action {
            LoaderAction::Estimate { model, request } => {
                let estimate = self.estimate(&model, request);
                Some(LoaderEvent::Estimated { model, estimate })
            }
            LoaderAction::Load(load) => Some(self.execute_load(load)),
            LoaderAction::BeginUnload { model, evicted_for } => {
                self.begin_unload(&model, evicted_for.as_ref());
                None
            }
            LoaderAction::Unload { model } => Some(self.unload(model)),
            LoaderAction::DropCachedWeights { model } => {
                self.cached.remove(&model);
                gpu::trim_heap();
                None
            }
            LoaderAction::SetStatus { model, status } => {
                self.publish(&model, status);
                None
            }
            LoaderAction::SetFreeBytes(bytes) => {
                self.registry.set_free_bytes(bytes);
                None
            }
        }
    }

    fn execute_load(&mut self, load: LoadAction) -> LoaderEvent {
        let model = load.model.clone();
        let result = self.load(&load).map(|loaded| {
            let gpus = loaded.engine.gpu_allocations().iter();
            let gpus = gpus.map(|share| GpuBytes {
                gpu: share.gpu,
                bytes: share.total_bytes,
                scratch_bytes: share.scratch_bytes,
            });
            let gpus: Vec<GpuBytes> = gpus.collect();
            let host_bytes = if gpus.is_empty() { loaded.engine.estimate().total() } else { 0 };
            self.engines.insert(model.clone(), loaded);
            LoadedSize { host_bytes, gpus }
        });
        LoaderEvent::LoadFinished { model, result }
    }

    fn begin_unload(&self, model: &ModelId, evicted_for: Option<&ModelId>) {
        let Some(LoadedEngine { engine, .. }) = self.engines.get(model) else { return };
        let running = engine.state().running;
        match evicted_for {
            Some(wanted) if running == 0 => {
                tracing::info!(%model, for_model = %wanted, "unloading idle model for another model");
            }
            Some(wanted) => {
                tracing::info!(
                    %model,
                    for_model = %wanted,
                    running,
                    "unloading model for another model once its running sequences finish"
                );
            }
            None => tracing::debug!(%model, running, "unload requested"),
        }
        let engine: Arc<dyn Engine> = engine.clone();
        let engine: Weak<dyn Engine> = Arc::downgrade(&engine);
        self.registry.set_status(model, ModelStatus::Unloading(engine));
    }

    /// Unloads an idle engine and caches its weights; the planner drops them if they exceed the weight cache.
    fn unload(&mut self, model: ModelId) -> LoaderEvent {
        let Some(LoadedEngine { engine, file, pin }) = self.engines.remove(&model) else {
            return LoaderEvent::StillShared { model };
        };
        // A sequence may be admitted at this moment. Then another thread holds the engine, and a sequence will run on
        // it.
        let engine = match engine.state().running {
            0 => Arc::try_unwrap(engine),
            _ => Err(engine),
        };
        let engine = match engine {
            Ok(engine) => engine,
            Err(engine) => {
                self.engines.insert(model.clone(), LoadedEngine { engine, file, pin });
                return LoaderEvent::StillShared { model };
            }
        };
        let state = engine.state();
        let freed = if engine.gpu_allocations().is_empty() { engine.estimate().total() } else { 0 };
        let cached = engine.into_cached_weights().and_then(|weights| {
            let described = self.describe_cached(&model, &weights)?;
            self.cached.insert(model.clone(), CachedFile { weights, stamp: FileStamp::of(&file.path) });
            Some(described)
        });
        drop(file);
        tracing::info!(%model, freed, "model unloaded");
        gpu::trim_heap();
        if self.registry.is_yielding() {
            self.gpus.iter().for_each(|gpu| trim_memory_pool(&gpu.device));
        }
        let kv_tiers = KvTiers { device: 0, ..state.kv_tiers };
        let state = Box::new(ModelState { residency: Residency::Available, kv_tiers, ..state });
        LoaderEvent::Unloaded { model, state, cached }
    }

    fn describe_cached(&self, model: &ModelId, weights: &cfq_engine::CachedWeights) -> Option<CachedModel> {
        let fit =
            |memory| weights.estimate(EngineLimits { memory_bytes: memory, max_sequences: self.config.max_sequences });
        let estimate: HostEstimate = super::estimate::host_estimate(fit).ok()?;
        Some(CachedModel { model: model.clone(), bytes: weights.bytes(), estimate })
    }

    fn publish(&self, model: &ModelId, status: PublishedStatus) {
        let status = match status {
            PublishedStatus::Loading => ModelStatus::Loading,
            PublishedStatus::Resident => match self.engines.get(model) {
                Some(loaded) => ModelStatus::Resident(loaded.engine.clone()),
                None => return,
            },
            PublishedStatus::OnDisk { state, shortage } => {
                if let Some(reason) = shortage {
                    tracing::info!(
                        %model,
                        %reason,
                        "model does not fit beside the loaded models; it is loaded when it is requested"
                    );
                }
                ModelStatus::OnDisk(state)
            }
            PublishedStatus::RetryAllowed(state) => return self.registry.offer_retry(model, state),
            PublishedStatus::Unusable(reason) => {
                match reason.is_permanent() {
                    true => tracing::error!(%model, %reason, "model cannot be used"),
                    false => tracing::warn!(%model, %reason, "model does not fit now"),
                }
                ModelStatus::Unusable(reason)
            }
        };
        self.registry.set_status(model, status);
    }
}
