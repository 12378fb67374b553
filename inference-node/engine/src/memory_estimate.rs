//! Memory estimate of a model on the CPU. Only the header of its file is read, not the weights.

use std::path::{Path, PathBuf};

use cfq_memory::{EstimateTerms, MemoryEstimate, ModelShape, WeightSum, fit_kv_pool};

use crate::backend::candle_transformers::CandleTransformersConfig;
use crate::backend::cpu::linear;
use crate::backend::cpu::simd::LANES;
use crate::backend::forward::{MAX_DRAFT_ROWS, MAX_PREFILL_ROWS};
use crate::kv::{KV_BLOCK_TOKENS, MIN_POOL_TOKENS};
use crate::load_error::{EngineLimits, LoadError};
use crate::model::architecture::Architecture;
use crate::model::file::{ModelFile, TensorMeta};
use crate::model::gguf::HeaderError;
use crate::model::memory_terms::{activation_shape, vector_bytes};
use crate::model::tensors::TensorRole;
use crate::model::tokenizer::vocabulary_size;

/// Bytes of one element of a key or value vector: the KV pool on the CPU is F32.
const KV_ELEMENT_BYTES: u64 = 4;
/// Reserve for everything in the process that the estimate does not itemize, in bytes: the async runtime, message
/// buffers, the chat template, the tables of constrained decoding, and the attention scores of each thread.
const HOST_RESERVE_BYTES: u64 = 256 << 20;

/// Estimates the memory of a model on the CPU from its header. `overhead_per_mille` is the measured overhead of earlier
/// loads, in per mille of the prediction.
///
/// # Errors
/// [`LoadError::DoesNotFit`] if the model does not fit within `limits`, or the file's header error.
pub fn estimate_memory(
    path: &Path,
    limits: EngineLimits,
    overhead_per_mille: u64,
) -> Result<MemoryEstimate, LoadError> {
    let file = ModelFile::read(path)?;
    let plan = match CandleTransformersConfig::read(&file)? {
        Some(model) => MemoryPlan::of_candle_transformers(&file, &model)?,
        None => MemoryPlan::of(&file, &Architecture::read(&file)?, limits.max_sequences)?,
    };
    plan.with_overhead(overhead_per_mille).fit(limits)
}

/// Size of a model and its memory estimate with a KV pool for one sequence of maximum length.
#[derive(Debug, Clone, Copy)]
pub struct ModelSummary {
    /// File size, in bytes.
    pub file_bytes: u64,
    /// Longest sequence, in tokens.
    pub context: u64,
    /// Memory estimate on the CPU.
    pub cpu: MemoryEstimate,
    /// Whether the model runs on the CPU only, one sequence at a time.
    pub single_sequence: bool,
}

/// Reads a model's summary from its header. The estimate of scratch memory assumes `max_sequences` sequences in a
/// batch.
///
/// # Errors
/// The file's header error, or [`LoadError::DoesNotFit`] if a term of the estimate overflows.
pub fn summarize_model(path: &Path, max_sequences: u32) -> Result<ModelSummary, LoadError> {
    let file = ModelFile::read(path)?;
    let limits = EngineLimits { memory_bytes: u64::MAX, max_sequences: 1 };
    if let Some(model) = CandleTransformersConfig::read(&file)? {
        let cpu = MemoryPlan::of_candle_transformers(&file, &model)?.fit(limits)?;
        return Ok(ModelSummary { file_bytes: file.size(), context: model.shape.context, cpu, single_sequence: true });
    }
    let architecture = Architecture::read(&file)?;
    let cpu = MemoryPlan::of(&file, &architecture, max_sequences)?.fit(limits)?;
    Ok(ModelSummary { file_bytes: file.size(), context: architecture.shape.context, cpu, single_sequence: false })
}

/// The terms of a model's memory estimate that do not depend on the memory available.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    path: PathBuf,
    /// Longest sequence, in tokens.
    context: u64,
    terms: EstimateTerms,
    /// Whether the model runs one sequence at a time.
    single_sequence: bool,
}

impl MemoryPlan {
    /// The terms for a model that runs on the engine's own forward pass.
    ///
    /// # Errors
    /// The file's header error.
    pub fn of(file: &ModelFile, architecture: &Architecture, max_sequences: u32) -> Result<Self, HeaderError> {
        Ok(Self {
            path: file.path().to_owned(),
            context: architecture.shape.context,
            terms: terms(file, architecture, max_sequences)?,
            single_sequence: false,
        })
    }

    /// The terms for a model that runs on candle-transformers, in F32.
    ///
    /// # Errors
    /// The file's header error.
    pub fn of_candle_transformers(file: &ModelFile, model: &CandleTransformersConfig) -> Result<Self, HeaderError> {
        let bytes = |tensor: TensorMeta| tensor.dims.iter().fold(4u64, |product, dim| product.saturating_mul(*dim));
        let tensors = file.tensor_names().into_iter().filter_map(|name| file.tensor(name)).map(bytes);
        // During the conversion to F32 the largest tensor is in memory twice.
        let (stored, transient) =
            tensors.fold((0u64, 0), |(sum, largest), bytes| (sum.saturating_add(bytes), bytes.max(largest)));
        let terms = EstimateTerms {
            weights: WeightSum { stored, transient },
            overhead_per_mille: 0,
            tables: vocabulary_size(file)?.bytes().saturating_add(model.rope_table_bytes()),
            kv_per_token: model.shape.kv_per_token(KV_ELEMENT_BYTES),
            activations: model.activation_bytes(MAX_PREFILL_ROWS as u64),
            reserve: HOST_RESERVE_BYTES,
        };
        Ok(Self { path: file.path().to_owned(), context: model.shape.context, terms, single_sequence: true })
    }

    /// Estimated bytes of norms, biases and the tokenizer's tables.
    pub fn tables(&self) -> u64 {
        self.terms.tables
    }

    /// Adds the measured overhead of earlier loads, in per mille of the prediction.
    pub fn with_overhead(mut self, per_mille: u64) -> Self {
        self.terms.overhead_per_mille = per_mille;
        self
    }

    /// Memory estimate with the largest KV pool that fits the limits: at most the context length for each sequence.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] if not even the smallest useful pool fits.
    pub fn fit(&self, limits: EngineLimits) -> Result<MemoryEstimate, LoadError> {
        let sequences = if self.single_sequence { 1 } else { u64::from(limits.max_sequences.max(1)) };
        let max_tokens = self.context.saturating_mul(sequences).min(1 << 40);
        // Rounded up to whole blocks, because the pool allocates whole blocks: otherwise it would hold fewer tokens
        // than the estimate says.
        let whole_blocks = |tokens: u64| tokens.next_multiple_of(KV_BLOCK_TOKENS as u64);
        let range = whole_blocks(MIN_POOL_TOKENS.min(self.context))..=whole_blocks(max_tokens);
        fit_kv_pool(self.terms, range, limits.memory_bytes)
            .map_err(|source| LoadError::DoesNotFit { path: self.path.clone(), source })
    }
}

fn terms(file: &ModelFile, architecture: &Architecture, sequences: u32) -> Result<EstimateTerms, HeaderError> {
    let weights = weight_sum(file, architecture)
        .ok_or_else(|| file.unsupported("its matrices have sizes that no kernel supports"))?;
    let shape = &architecture.shape;
    // Key and value vectors are padded to a multiple of the SIMD width.
    let padded = ModelShape { head_dim: shape.head_dim.next_multiple_of(LANES as u64), ..*shape };
    let sequences = u64::from(sequences.max(1));
    let (rows, scored) = (MAX_PREFILL_ROWS as u64 + sequences, sequences + MAX_DRAFT_ROWS as u64);
    Ok(EstimateTerms {
        weights,
        overhead_per_mille: 0,
        tables: vector_bytes(file).saturating_add(vocabulary_size(file)?.bytes()),
        kv_per_token: padded.kv_per_token(KV_ELEMENT_BYTES),
        activations: activation_shape(architecture).activations(rows, scored),
        reserve: HOST_RESERVE_BYTES,
    })
}

/// Bytes of all weight matrices in the layouts of the CPU kernels; `None` if a matrix has a size that no kernel
/// supports.
fn weight_sum(file: &ModelFile, architecture: &Architecture) -> Option<WeightSum> {
    let kernels = linear::kernels();
    let mut sum = WeightSum::default();
    let matrices = architecture.layer_matrices();
    let layers = (0..architecture.shape.layers).flat_map(|layer| matrices.iter().map(move |role| (*role, layer)));
    let output = (!architecture.tied).then_some((TensorRole::Output, 0));
    for (role, layer) in layers.chain([(TensorRole::Embedding, 0)]).chain(output) {
        sum.add(&linear::plan(&architecture.tensor_meta(file, role, layer)?, kernels)?)?;
    }
    Some(sum)
}
