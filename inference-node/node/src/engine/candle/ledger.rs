//! What a model's file means for the memory ledger, before a byte of its weights is read.

use std::path::{Path, PathBuf};

use cfq_memory::{Need, Parts, Shape, WeightSum, fit};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::batcher::{CHUNK_MOST, GUESSED_ROWS};
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::others::Other;
use crate::engine::candle::{Limits, LoadError, linear};
use crate::engine::lanes::LANES;
use crate::models::file::{ModelFile, TensorFacts};
use crate::models::header::HeaderError;
use crate::models::tokenizer::vocabulary_size;

/// Bytes of one key or value: the pool is F32 on the CPU.
const KV_ELEMENT: u64 = 4;
/// Left for the rest of the process: its runtime, message buffers, chat template, the tables of constrained decoding, and
/// what each thread holds of the scores of attention.
const RESERVE: u64 = 256 << 20;
/// A pool smaller than this is no use: a prompt with one file and its answer.
pub const LEAST_TOKENS: u64 = 2048;

/// What a model would need, from its header alone.
pub fn need(path: &Path, limits: Limits) -> Result<Need, LoadError> {
    need_corrected(path, limits, 0)
}

/// The same where earlier loads took so many thousandths more than that.
pub fn need_corrected(path: &Path, limits: Limits, thousandths: u64) -> Result<Need, LoadError> {
    let file = ModelFile::read(path)?;
    let sum = match Other::of(&file)? {
        Some(other) => Sum::of_other(&file, &other)?,
        None => Sum::of(&file, &Architecture::read(&file)?, limits.max_sequences)?,
    };
    sum.corrected(thousandths).fit(limits)
}

/// The sum of a model on the CPU, with room for one sequence of its longest length.
#[derive(Debug, Clone, Copy)]
pub struct Estimate {
    /// Bytes of the file.
    pub file: u64,
    /// Longest sequence, in tokens.
    pub context: u64,
    /// In this process, on the CPU.
    pub cpu: Need,
    /// It runs on no card, and one sequence at a time.
    pub alone: bool,
}

/// `max_sequences` as a node would load it with: they share the scratch memory.
pub fn estimate(path: &Path, max_sequences: u32) -> Result<Estimate, LoadError> {
    let file = ModelFile::read(path)?;
    let most = Limits { memory: u64::MAX, max_sequences: 1 };
    if let Some(other) = Other::of(&file)? {
        let cpu = Sum::of_other(&file, &other)?.fit(most)?;
        return Ok(Estimate { file: file.size(), context: other.shape.context, cpu, alone: true });
    }
    let architecture = Architecture::read(&file)?;
    let cpu = Sum::of(&file, &architecture, max_sequences)?.fit(most)?;
    Ok(Estimate { file: file.size(), context: architecture.shape.context, cpu, alone: false })
}

/// What a model's need is made of, but for how much there is.
#[derive(Debug, Clone)]
pub struct Sum {
    pub path: PathBuf,
    pub context: u64,
    parts: Parts,
    /// One sequence at a time.
    alone: bool,
}

impl Sum {
    pub fn of(file: &ModelFile, architecture: &Architecture, max_sequences: u32) -> Result<Self, HeaderError> {
        Ok(Self {
            path: file.path().to_owned(),
            context: architecture.shape.context,
            parts: parts(file, architecture, max_sequences)?,
            alone: false,
        })
    }

    /// Of a family that runs in candle-transformers, in F32.
    pub fn of_other(file: &ModelFile, other: &Other) -> Result<Self, HeaderError> {
        let bytes = |facts: TensorFacts| facts.dims.iter().fold(4u64, |all, dim| all.saturating_mul(*dim));
        let tensors = file.tensor_names().into_iter().filter_map(|name| file.tensor(name)).map(bytes);
        let (stored, transient) = tensors.fold((0u64, 0), |(all, most), one| (all.saturating_add(one), one.max(most)));
        let parts = Parts {
            weights: WeightSum { stored, transient },
            correction: 0,
            tables: vocabulary_size(file)?.bytes().saturating_add(other.rotations()),
            kv_per_token: other.shape.kv_per_token(KV_ELEMENT),
            activations: other.activations(CHUNK_MOST as u64),
            reserve: RESERVE,
        };
        Ok(Self { path: file.path().to_owned(), context: other.shape.context, parts, alone: true })
    }

    /// Bytes of norms, biases and the tokenizer's tables.
    pub fn tables(&self) -> u64 {
        self.parts.tables
    }

    pub fn corrected(mut self, thousandths: u64) -> Self {
        self.parts.correction = thousandths;
        self
    }

    pub fn fit(&self, limits: Limits) -> Result<Need, LoadError> {
        let sequences = if self.alone { 1 } else { u64::from(limits.max_sequences.max(1)) };
        let most = self.context.saturating_mul(sequences).min(1 << 40);
        // In whole blocks, or the smallest pool would hold less than it says.
        let whole = |tokens: u64| tokens.next_multiple_of(BLOCK as u64);
        fit(self.parts, whole(LEAST_TOKENS.min(self.context))..=whole(most), limits.memory)
            .map_err(|source| LoadError::DoesNotFit { path: self.path.clone(), source })
    }
}

fn parts(file: &ModelFile, architecture: &Architecture, sequences: u32) -> Result<Parts, HeaderError> {
    let weights = architecture
        .weights(file, linear::kernels())
        .ok_or_else(|| file.unsupported("its matrices have sizes no kernel takes"))?;
    let shape = &architecture.shape;
    // Vectors are padded to whole lanes.
    let padded = Shape { head_dim: shape.head_dim.next_multiple_of(LANES as u64), ..*shape };
    let sequences = u64::from(sequences.max(1));
    let (rows, scored) = (CHUNK_MOST as u64 + sequences, sequences + GUESSED_ROWS as u64);
    Ok(Parts {
        weights,
        correction: 0,
        tables: vectors(file).saturating_add(vocabulary_size(file)?.bytes()),
        kv_per_token: padded.kv_per_token(KV_ELEMENT),
        activations: computed(architecture).activations(rows, scored),
        reserve: RESERVE,
    })
}

/// The shape by which activations are counted.
pub fn computed(architecture: &Architecture) -> Shape {
    let shape = &architecture.shape;
    // An expert's rows are gathered before it and spread after it.
    let feed_forward = match architecture.experts {
        Some(_) => shape.feed_forward.saturating_add(shape.hidden),
        None => shape.feed_forward,
    };
    Shape { feed_forward, ..*shape }
}

/// Bytes of everything that is no matrix: norms and biases, held as F32.
pub fn vectors(file: &ModelFile) -> u64 {
    let facts = file.tensor_names().into_iter().filter_map(|name| file.tensor(name));
    let lengths = facts.filter_map(|facts| match facts.dims[..] {
        [length] => Some(length),
        _ => None,
    });
    lengths.fold(0, |all: u64, length| all.saturating_add(length.saturating_mul(4)))
}
