//! Loading a model: read the header, check the memory estimate, load the weights, calibrate, start the batcher.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;

use crate::backend::candle_transformers::{CandleModel, CandleTransformersConfig};
use crate::backend::cpu::linear;
use crate::backend::cpu::model::CpuModel;
use crate::backend::cuda::{Gpu, GpuLoadError, load_on_gpus};
use crate::backend::forward::ForwardModel;
use crate::batch::admission::{EngineStats, StateChanged};
use crate::batch::batcher::StepHook;
use crate::batch::calibration::calibrate;
use crate::kv::{HostKvCache, KV_BLOCK_TOKENS, KvOffload, KvPool};
use crate::load_error::{EngineLimits, LoadError};
use crate::local_engine::{DevicePlacement, EngineParts, IntoCachedWeights, LocalEngine};
use crate::memory_estimate::MemoryPlan;
use crate::model::architecture::Architecture;
use crate::model::chat_template::ChatTemplate;
use crate::model::file::ModelFile;
use crate::model::tokenizer::Vocabulary;
use crate::prompts::{InProcess, PromptModel, PromptTokenizer};
use crate::sampling::grammar::Grammars;

/// Builder that loads one model into an engine. Create it with [`LocalEngine::builder`].
pub struct EngineBuilder {
    model: ModelId,
    path: PathBuf,
    limits: EngineLimits,
    overhead_per_mille: u64,
    changes: Arc<StateChanged>,
    kv_cache: Option<Arc<HostKvCache>>,
    before_step: Option<StepHook>,
    prompts: Option<Arc<dyn PromptTokenizer>>,
}

impl LocalEngine {
    /// Creates a builder for the model file or folder at `path`; the engine reports the model under the name `model`.
    /// By default the memory is not limited and up to 8 sequences are batched.
    pub fn builder(model: ModelId, path: &Path) -> EngineBuilder {
        EngineBuilder {
            model,
            path: path.to_owned(),
            limits: EngineLimits { memory_bytes: u64::MAX, max_sequences: 8 },
            overhead_per_mille: 0,
            changes: Arc::default(),
            kv_cache: None,
            before_step: None,
            prompts: None,
        }
    }
}

/// A model of which everything but the weights was read.
struct OpenedModel {
    started: Instant,
    file: ModelFile,
    vocabulary: Arc<Vocabulary>,
    prompts: Arc<dyn PromptTokenizer>,
}

impl OpenedModel {
    /// Reads the tokenizer of `file`, and also its chat template unless the caller provides `prompts`. Fails if the
    /// tokenizer has more tokens than the model has embeddings: `embedding_rows` is the architecture's vocabulary size.
    fn read(
        file: ModelFile,
        embedding_rows: u64,
        started: Instant,
        prompts: Option<Arc<dyn PromptTokenizer>>,
    ) -> Result<Self, LoadError> {
        let vocabulary = Arc::new(Vocabulary::read_for(&file, embedding_rows)?);
        let prompts = match prompts {
            Some(prompts) => prompts,
            None => {
                let template = Arc::new(ChatTemplate::read(&file, &vocabulary)?);
                Arc::new(InProcess::new(PromptModel::new(vocabulary.clone(), template)))
            }
        };
        Ok(Self { started, file, vocabulary, prompts })
    }
}

/// Loaded weights and an empty KV pool.
struct LoadedWeights<M: ForwardModel> {
    forward: M,
    pool: KvPool<M::Memory>,
    estimate: MemoryEstimate,
    /// Actual size of the loaded weights in bytes (not the estimate).
    weight_bytes: u64,
    /// Whether every matrix is computed in F32, see [`CpuModel::is_f32`].
    is_f32: bool,
    placement: DevicePlacement,
    /// Terms of the memory estimate, which a start from cached weights needs; `None` if this backend's weights cannot
    /// be cached.
    plan: Option<MemoryPlan>,
}

impl EngineBuilder {
    /// Sets the memory limit and the batch size.
    pub fn limits(self, limits: EngineLimits) -> Self {
        Self { limits, ..self }
    }

    /// Adds the measured overhead of earlier loads to the estimate, in per mille of the prediction.
    pub fn overhead_per_mille(self, overhead_per_mille: u64) -> Self {
        Self { overhead_per_mille, ..self }
    }

    /// Sets the notifier that fires whenever the result of [`crate::Engine::state`] changes.
    pub fn changes(self, changes: Arc<StateChanged>) -> Self {
        Self { changes, ..self }
    }

    /// Sets the host KV cache, to which keys and values are offloaded when they are evicted from the pool or the model
    /// is unloaded; `None` disables offload.
    pub fn kv_cache(self, kv_cache: Option<Arc<HostKvCache>>) -> Self {
        Self { kv_cache, ..self }
    }

    /// Calls `hook` on the batcher thread before every forward pass; for fault injection.
    pub fn before_step(self, hook: StepHook) -> Self {
        Self { before_step: Some(hook), ..self }
    }

    /// Renders and tokenizes prompts with `prompts`, for example in another process, instead of on threads of this one.
    pub fn prompts(self, prompts: Option<Arc<dyn PromptTokenizer>>) -> Self {
        Self { prompts, ..self }
    }

    /// Loads the model on the CPU and starts its batcher thread. Blocks for seconds, so it must not be called on an
    /// async thread.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(self) -> Result<LocalEngine, LoadError> {
        let started = Instant::now();
        let file = ModelFile::read(&self.path)?;
        let weights = |source| LoadError::Weights { path: self.path.clone(), source };
        let model = &self.model;
        if let Some(config) = CandleTransformersConfig::read(&file)? {
            let opened = OpenedModel::read(file, config.shape.vocabulary, started, self.prompts.clone())?;
            let plan =
                MemoryPlan::of_candle_transformers(&opened.file, &config)?.with_overhead(self.overhead_per_mille);
            let estimate = plan.fit(self.limits)?;
            tracing::info!(%model, %estimate, "loading model, which runs one sequence at a time");
            let forward = CandleModel::load(&opened.file, &config).map_err(weights)?;
            let (weight_bytes, pool) = (forward.stored_bytes() as u64, forward.pool(estimate.kv_tokens));
            let placement = DevicePlacement::cpu();
            let loaded = LoadedWeights { forward, pool, estimate, weight_bytes, is_f32: true, placement, plan: None };
            let limits = EngineLimits { max_sequences: 1, ..self.limits };
            return Self { limits, kv_cache: None, ..self }.start(opened, loaded);
        }
        let architecture = Architecture::read(&file)?;
        let opened = OpenedModel::read(file, architecture.shape.vocabulary, started, self.prompts.clone())?;
        let plan = MemoryPlan::of(&opened.file, &architecture, self.limits.max_sequences)?;
        let plan = plan.with_overhead(self.overhead_per_mille);
        let estimate = plan.fit(self.limits)?;
        tracing::info!(%model, %estimate, "loading model");
        let forward = CpuModel::load(&opened.file, architecture, linear::kernels()).map_err(weights)?;
        let weight_bytes = forward.stored_bytes() as u64;
        let pool = KvPool::new(forward.kv_shape(), estimate.kv_tokens as usize / KV_BLOCK_TOKENS);
        let (is_f32, placement) = (forward.is_f32(), DevicePlacement::cpu());
        let loaded = LoadedWeights { forward, pool, estimate, weight_bytes, is_f32, placement, plan: Some(plan) };
        self.start(opened, loaded)
    }

    /// Loads the model on GPUs, which the device map selects from `gpus`, and starts its batcher thread. The model may
    /// take 1/`sharers` of the free memory of each GPU. Free memory is the smaller of [`Gpu::free_bytes`] and what the
    /// driver reports now. [`EngineLimits::memory_bytes`] does not apply.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_on_gpus(self, gpus: &[Gpu], sharers: u64) -> Result<LocalEngine, LoadError> {
        let started = Instant::now();
        let (file, architecture) = crate::backend::cuda::read_for_gpus(&self.path)?;
        let opened = OpenedModel::read(file, architecture.shape.vocabulary, started, self.prompts.clone())?;
        let loaded = load_on_gpus(&self.model, &opened.file, architecture, gpus, sharers, self.limits)?;
        let GpuLoadError { path, gpus, estimate } = loaded.error_context;
        let explain = |source| GpuLoadError { path: path.clone(), gpus: gpus.clone(), estimate }.explain(source);
        let placement = DevicePlacement { device: gpus.clone(), allocations: loaded.allocations };
        let loaded = LoadedWeights {
            weight_bytes: loaded.forward.stored_bytes() as u64,
            forward: loaded.forward,
            pool: loaded.pool,
            estimate,
            is_f32: false,
            placement,
            plan: None,
        };
        self.start(opened, loaded).map_err(|error| match error {
            // Calibration failed. Its first pass allocates scratch memory, so GPU memory may have run out.
            LoadError::Weights { source, .. } => explain(source),
            other => other,
        })
    }

    /// Calibrates the loaded model and starts its batcher thread.
    fn start<M>(self, opened: OpenedModel, loaded: LoadedWeights<M>) -> Result<LocalEngine, LoadError>
    where
        M: ForwardModel<Memory: Send> + IntoCachedWeights + Send + 'static,
    {
        let Self { model, limits, changes, kv_cache, before_step, .. } = self;
        let OpenedModel { started, file, vocabulary, prompts } = opened;
        let LoadedWeights { forward, pool, estimate, weight_bytes, is_f32, placement, plan } = loaded;
        let load_rate = file.size() as f64 / started.elapsed().as_secs_f64();
        let stats = EngineStats::new(load_rate, changes.clone());
        let kv_offload =
            kv_cache.map(|cache| KvOffload::new(cache, &version(&model, &file, &placement.device), is_f32));
        let mut pool = pool.with_offload(kv_offload.clone());
        calibrate(&forward, &mut pool, &stats)
            .map_err(|source| LoadError::Weights { path: file.path().to_owned(), source })?;
        let snapshot = stats.snapshot();
        tracing::info!(
            %model,
            device = placement.device,
            seconds = started.elapsed().as_secs_f64(),
            prefill_rate = snapshot.prefill_rate,
            decode_rate = snapshot.decode_rate,
            "model loaded"
        );
        let parts = EngineParts {
            model,
            placement,
            plan,
            context: forward.shape().context,
            original_context: forward.original_context(),
            rewinds: M::REWINDS,
            grammars: Arc::new(Grammars::new(vocabulary.clone())),
            vocabulary,
            prompts,
            stats,
            kv_offload,
            before_step,
        };
        parts.start(forward, pool, estimate, weight_bytes, limits, changes)
    }
}

/// Identifies the content of a model's files by size and modification time, for keys of the host KV cache.
fn version(model: &ModelId, file: &ModelFile, device: &str) -> String {
    let modified = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    let inside = std::fs::read_dir(file.path()).into_iter().flatten().flatten();
    let newest = inside.filter_map(|entry| modified(&entry.path())).chain(modified(file.path())).max();
    let newest = newest.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{model} {} {} {} {device}", file.path().display(), file.size(), newest.as_nanos())
}
