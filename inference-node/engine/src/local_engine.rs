//! The engine that runs one model in this process: it prepares and admits prompts, and its batcher thread runs them.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use cfq_memory::MemoryEstimate;
use cfq_proto::job::{GeneratedTokens, JobFailure, Prompt};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState, Residency};
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::backend::candle_transformers::CandleModel;
use crate::backend::cpu::model::CpuModel;
use crate::backend::cuda::{CudaModel, GpuAllocation};
use crate::backend::forward::ForwardModel;
use crate::batch::admission::{Admission, EngineStats, StateChanged};
use crate::batch::batcher::{Batcher, EngineCommand, StepHook};
use crate::batch::calibration;
use crate::batch::preparations::Preparations;
use crate::batch::prepare::{self, PreparedPrompt, check_vocabulary, prepare, stable_prefix};
use crate::batch::resume::{ResumeConflict, ResumeError};
use crate::batch::sequence::SequenceRequest;
use crate::batch::speculative_prefill::{ChunkSlot, PrefillChunk, PrefillProgress, SpeculativePrompt};
use crate::engine::{AdmitError, Admitted, Engine, ExpectedPrompt};
use crate::engine_failure::EngineFailure;
use crate::generation::Generation;
use crate::kv::{KV_BLOCK_TOKENS, KvOffload, KvPool};
use crate::load_error::{EngineLimits, LoadError};
use crate::memory_estimate::MemoryPlan;
use crate::model::tokenizer::Vocabulary;
use crate::prompts::PromptTokenizer;
use crate::sampling::grammar::Grammars;

/// Prompt length, in tokens, for which [`ModelState::prefill_rate`] reports the prefill rate.
const REPORTED_PROMPT_TOKENS: f64 = 1000.0;

/// The device or devices a model computes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlacement {
    /// `cpu`, or the GPUs' ids joined by commas.
    pub device: String,
    /// Memory allocated on each GPU; empty on the CPU.
    pub allocations: Vec<GpuAllocation>,
}

impl DevicePlacement {
    /// Placement on the CPU.
    pub fn cpu() -> Self {
        Self { device: "cpu".to_owned(), allocations: Vec::new() }
    }
}

/// Conversion of a backend's model into weights that the weight cache can keep in host memory after the engine has
/// stopped.
pub trait IntoCachedWeights {
    /// The CPU model, or `None` if this backend's weights cannot be cached.
    fn into_cached(self) -> Option<CpuModel>;
}

impl IntoCachedWeights for CpuModel {
    fn into_cached(self) -> Option<CpuModel> {
        Some(self)
    }
}

impl IntoCachedWeights for CudaModel {
    fn into_cached(self) -> Option<CpuModel> {
        None
    }
}

impl IntoCachedWeights for CandleModel {
    fn into_cached(self) -> Option<CpuModel> {
        None
    }
}

/// Everything that an engine consists of except its weights and its KV pool. The weight cache keeps these parts to
/// start the engine again.
pub struct EngineParts {
    pub model: ModelId,
    pub placement: DevicePlacement,
    /// Terms of the memory estimate, which a start from cached weights needs; `None` if this backend's weights cannot
    /// be cached.
    pub plan: Option<MemoryPlan>,
    /// Longest sequence, in tokens.
    pub context: u64,
    /// Longest sequence that uses the short-context RoPE frequencies, in tokens; `None` if the model has only one set
    /// of frequencies.
    pub original_context: Option<u64>,
    /// See [`ForwardModel::REWINDS`].
    pub rewinds: bool,
    pub vocabulary: Arc<Vocabulary>,
    pub prompts: Arc<dyn PromptTokenizer>,
    pub grammars: Arc<Grammars>,
    pub stats: Arc<EngineStats>,
    pub kv_offload: Option<KvOffload>,
    pub before_step: Option<StepHook>,
}

impl EngineParts {
    /// Starts the batcher thread of a loaded model. `weight_bytes` is the actual size of its weights in memory.
    ///
    /// # Errors
    /// [`LoadError::Thread`] only.
    pub fn start<M>(
        self,
        model: M,
        pool: KvPool<M::Memory>,
        estimate: MemoryEstimate,
        weight_bytes: u64,
        limits: EngineLimits,
        changes: Arc<StateChanged>,
    ) -> Result<LocalEngine, LoadError>
    where
        M: ForwardModel<Memory: Send> + IntoCachedWeights + Send + 'static,
    {
        let tokens = estimate.kv_tokens / KV_BLOCK_TOKENS as u64 * KV_BLOCK_TOKENS as u64;
        let admission = Admission::new(tokens, limits.max_sequences as usize, changes);
        // The channel never fills: each queued sequence holds one of the `max_sequences` slots, and speculative prefill
        // queues at most one chunk.
        let (commands, receiver) = sync_channel(admission.max_sequences() + 1);
        let (vocabulary, stats) = (self.vocabulary.clone(), self.stats.clone());
        let batcher = Batcher::new(model, pool, vocabulary, receiver, admission.clone(), stats, EngineStats::pass_cost)
            .with_step_hook(self.before_step.clone());
        let thread = std::thread::Builder::new()
            .name("batcher".to_owned())
            .spawn(move || batcher.run().and_then(M::into_cached))
            .map_err(LoadError::Thread)?;
        let chunk_slot = ChunkSlot::default();
        let preparations = Preparations::default();
        Ok(LocalEngine { parts: self, estimate, weight_bytes, admission, commands, chunk_slot, preparations, thread })
    }
}

/// An engine that runs one loaded model in this process.
pub struct LocalEngine {
    parts: EngineParts,
    estimate: MemoryEstimate,
    /// Actual size of the weights in memory, in bytes (not the estimate).
    weight_bytes: u64,
    admission: Arc<Admission>,
    commands: SyncSender<EngineCommand>,
    chunk_slot: ChunkSlot,
    preparations: Preparations,
    /// The batcher thread. It exits once `commands` is dropped and the last sequence has ended, and returns the
    /// weights, or `None` if they cannot be cached.
    thread: JoinHandle<Option<CpuModel>>,
}

impl std::fmt::Debug for LocalEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEngine").field("model", &self.parts.model).finish_non_exhaustive()
    }
}

impl LocalEngine {
    /// Waits until the running sequences have finished, offloads the cached keys and values, and frees the memory.
    /// Blocks.
    pub fn unload(self) {
        drop(self.shut_down());
    }

    /// Stops the engine after its last sequence. Returns its parts, and its weights if they can be cached.
    pub(crate) fn shut_down(self) -> (EngineParts, Option<CpuModel>) {
        let Self { parts, commands, thread, .. } = self;
        drop(commands);
        (parts, thread.join().ok().flatten())
    }

    /// `cpu`, or the GPUs' ids joined by commas.
    pub fn device(&self) -> &str {
        &self.parts.placement.device
    }

    /// Memory allocated on each GPU; empty on the CPU.
    pub fn gpu_allocations(&self) -> &[GpuAllocation] {
        &self.parts.placement.allocations
    }

    /// Bytes of host memory that are included in [`Self::estimate`] and not allocated yet. Zero on GPUs.
    pub fn unallocated_bytes(&self) -> u64 {
        if !self.gpu_allocations().is_empty() {
            return 0;
        }
        // A block's memory is allocated at its first use and kept. Scratch memory is allocated and freed by each pass,
        // so all of it counts.
        let touched = self.estimate.kv_per_token.saturating_mul(self.parts.stats.snapshot().kv_tokens);
        let pool = self.estimate.kv_bytes().saturating_sub(touched);
        pool.saturating_add(self.estimate.scratch).saturating_add(self.estimate.reserve)
    }

    /// Memory estimate with which the model was loaded.
    pub fn estimate(&self) -> &MemoryEstimate {
        &self.estimate
    }

    /// Predicted memory right after the load and its calibration, in bytes: weights, tables and the KV blocks that
    /// calibration uses.
    pub fn predicted_bytes(&self) -> u64 {
        let calibrated = (calibration::PROMPT_TOKENS.next_multiple_of(KV_BLOCK_TOKENS) + KV_BLOCK_TOKENS) as u64;
        self.estimate.weights
            + self.estimate.tables
            + self.estimate.kv_per_token * calibrated.min(self.estimate.kv_tokens)
    }

    /// Actual size of the weights in memory, in bytes; [`MemoryEstimate::weights`] is the prediction.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Number of preemptions for lack of KV blocks since the load. A preempted sequence resumes later.
    pub fn preemptions(&self) -> u64 {
        self.parts.stats.snapshot().preemptions
    }

    /// The tokenizer's vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.parts.vocabulary
    }

    async fn prepare(&self, mut prompt: Prompt, generated: GeneratedTokens) -> Result<PreparedPrompt, AdmitError> {
        let EngineParts { prompts, vocabulary, grammars, .. } = &self.parts;
        if let Some(reason) = prompts.failure() {
            return Err(AdmitError::Never { reason });
        }
        let bytes = prompt.messages.iter().map(|m| m.content.len()).sum();
        let tokens = prompts.tokenize(prepare::request(&mut prompt)).await;
        if prompts.failure().is_some() {
            self.admission.notify();
        }
        let tokens = tokens.map_err(AdmitError::Failed)?;
        check_vocabulary(&tokens, vocabulary).map_err(AdmitError::Failed)?;
        self.parts.stats.record_tokenized(tokens.prompt.len(), bytes);
        let (vocabulary, grammars) = (vocabulary.clone(), grammars.clone());
        let prepared = self.preparations.run(move |_| prepare(&vocabulary, &grammars, prompt, tokens, &generated));
        prepared.await.and_then(|prepared| prepared).map_err(AdmitError::Failed)
    }

    async fn admit_prepared(&self, prompt: Prompt, generated: GeneratedTokens) -> Result<Admitted, AdmitError> {
        let PreparedPrompt { init, lookup, sampling } = self.prepare(prompt, generated).await?;
        if sampling.deterministic && !self.parts.rewinds {
            let reason = format!("{} runs in candle-transformers, which has no deterministic output", self.parts.model);
            return Err(AdmitError::Never { reason });
        }
        let (prompt, resumed) = (init.prompt_len as u64, init.resumed_tokens() as u64);
        let count = prompt + resumed;
        if count + 1 > self.parts.context {
            return Err(AdmitError::Failed(JobFailure::TooLong { need: count + 1, have: self.parts.context }));
        }
        let capacity = self.admission.capacity();
        if count + 1 > capacity && prompt < capacity {
            // The prompt fits but not the prompt with its delivered tokens: they were generated with a larger KV pool.
            let error = ResumeError::Conflict { tokens: resumed as usize, conflict: ResumeConflict::PoolTooSmall };
            return Err(AdmitError::Failed(JobFailure::Engine { reason: error.to_string() }));
        }
        if count + 1 > capacity {
            let estimate = &self.estimate;
            let reason = format!("the prompt has {count} tokens, but the KV pool holds only {capacity}: {estimate}");
            return Err(AdmitError::Never { reason });
        }
        if self.parts.stats.snapshot().failure.is_some() {
            return Err(AdmitError::NotNow { need: Some(count + 1), have: 0 });
        }
        let requested = (prompt + u64::from(sampling.max_tokens.max(1))).min(self.parts.context);
        let max_len = requested.min(capacity);
        let long_context = self.parts.original_context.is_some_and(|original| requested > original);
        let expected = count + self.admission.expected_output(max_len.saturating_sub(count));
        // Sequences are allocated whole blocks.
        let expected = expected.next_multiple_of(KV_BLOCK_TOKENS as u64).min(capacity);
        let permit = self
            .admission
            .reserve(expected)
            .map_err(|full| AdmitError::NotNow { need: Some(full.requested), have: full.free })?;
        let commands = self.commands.clone();
        Ok(Admitted::new(move || {
            let (outbox, reader) = Generation::channel();
            let max_len = max_len as usize;
            let request = SequenceRequest { init, lookup, sampling, max_len, long_context, permit, outbox };
            // If the thread has exited, the request is dropped, which reports an engine failure to the reader.
            if commands.try_send(EngineCommand::Sequence(Box::new(request))).is_err() {
                tracing::warn!("cannot queue a sequence: the batcher thread has exited");
            }
            reader
        })
        .with_resumed(resumed as u32))
    }

    async fn tokenize_expected(&self, expected: ExpectedPrompt) -> Option<SpeculativePrompt> {
        if !self.parts.rewinds {
            return None;
        }
        let ExpectedPrompt { messages, max_tokens, deterministic } = expected;
        let tokens = stable_prefix(&*self.parts.prompts, &self.parts.vocabulary, messages).await?;
        let count = tokens.len() as u64;
        if count + 1 > self.parts.context.min(self.admission.capacity()) {
            return None;
        }
        let requested = (count + u64::from(max_tokens)).min(self.parts.context);
        let long_context = self.parts.original_context.is_some_and(|original| requested > original);
        Some(SpeculativePrompt { tokens, long_context, batch_invariant: deterministic })
    }

    async fn run_prefill_chunk(&self, prompt: Arc<SpeculativePrompt>) -> PrefillProgress {
        let Some(slot) = self.chunk_slot.take() else { return PrefillProgress::Busy };
        let (chunk, result) = PrefillChunk::new(prompt, slot);
        match self.commands.try_send(EngineCommand::PrefillChunk(chunk)) {
            Ok(()) => result.await.unwrap_or(PrefillProgress::Done),
            Err(_) => PrefillProgress::Busy,
        }
    }
}

impl Engine for LocalEngine {
    fn state(&self) -> ModelState {
        let stats = self.parts.stats.snapshot();
        let residency = match (stats.failure, self.parts.prompts.failure()) {
            (Some(failure), _) => Residency::Unusable { reason: format!("the engine stopped: {failure}") },
            (None, Some(reason)) => Residency::Unusable { reason },
            (None, None) => Residency::Resident,
        };
        ModelState {
            model: self.parts.model.clone(),
            residency,
            device: self.parts.placement.device.clone(),
            need_bytes: self.estimate.total(),
            context_tokens: u32::try_from(self.parts.context.min(self.admission.capacity())).unwrap_or(u32::MAX),
            kv_tokens_free: self.admission.free(),
            kv_tiers: KvTiers {
                device: stats.kv_tokens,
                offloaded: self.parts.kv_offload.as_ref().map_or(0, KvOffload::tokens),
            },
            running: self.admission.running() as u32,
            max_sequences: self.admission.max_sequences() as u32,
            prefill_rate: two_digits(stats.latency.prefill_rate(REPORTED_PROMPT_TOKENS).unwrap_or(stats.prefill_rate)),
            decode_rate: two_digits(stats.decode_rate),
            load_rate: two_digits(stats.load_rate),
            tokens_per_byte: two_digits(stats.tokens_per_byte),
        }
    }

    fn failure(&self) -> Option<EngineFailure> {
        self.parts.stats.snapshot().failure
    }

    fn unfinished_work(&self) -> Option<u64> {
        self.parts.stats.snapshot().unfinished_work()
    }

    fn set_failure(&self, failure: EngineFailure) {
        self.parts.stats.set_failure(failure);
    }

    fn vocabulary(&self) -> Option<i64> {
        Some(self.parts.vocabulary.fingerprint())
    }

    fn admit_resumed(&self, prompt: Prompt, generated: GeneratedTokens) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
        self.admit_prepared(prompt, generated).boxed()
    }

    fn plan_prefill(&self, expected: &ExpectedPrompt) -> BoxFuture<'_, Option<SpeculativePrompt>> {
        self.tokenize_expected(expected.clone()).boxed()
    }

    fn prefill_chunk(&self, prompt: Arc<SpeculativePrompt>) -> BoxFuture<'_, PrefillProgress> {
        self.run_prefill_chunk(prompt).boxed()
    }
}

/// Rounds to two significant digits, so that measurement noise does not change the reported state.
fn two_digits(rate: f64) -> f64 {
    if rate <= 0.0 || !rate.is_finite() {
        return 0.0;
    }
    let unit = 10f64.powi(rate.log10().floor() as i32 - 1);
    (rate / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_rounded_to_two_digits() {
        assert_eq!(two_digits(1234.0), 1200.0);
        assert_eq!(two_digits(0.0), 0.0);
        assert!((two_digits(0.2871) - 0.29).abs() < 1e-9);
    }
}
