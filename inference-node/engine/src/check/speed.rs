//! Prefill and decode rates, and the upper bound that memory bandwidth sets for decoding.
//!
//! A decode step reads every weight once, and the keys and values of every sequence. These bytes divided by the
//! bandwidth of a copy are the shortest time that a step can take.

use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Result};
use schemars::JsonSchema;
use serde::Serialize;

use crate::backend::cpu::linear::kernels;
use crate::backend::cpu::model::CpuModel;
use crate::backend::cuda::{CudaModel, ELEMENT_BYTES, Stage};
use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::check::{CheckTarget, NotRun, shapes, with_file};
use crate::kv::{BlockMemory, KV_BLOCK_TOKENS, KvPool, SequenceKv};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;

/// Number of cached tokens of each decoding sequence.
const PAST_TOKENS: usize = 256;
/// Length of the prefilled prompt, in tokens.
const PROMPT_TOKENS: usize = 512;
/// Batch sizes of the decode measurements.
const BATCH_SIZES: [usize; 3] = [1, 8, 32];

/// Measured rates of one model.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct SpeedRow {
    /// The measured model.
    pub model: String,
    /// Actual size of the loaded weights in bytes (not the estimate).
    pub weight_bytes: u64,
    /// Prefill rate.
    pub prefill: PrefillRow,
    /// Decode rates, for several batch sizes.
    pub decode: Vec<DecodeRow>,
}

/// Prefill rate.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct PrefillRow {
    /// Length of the prompt, in tokens.
    pub prompt_tokens: usize,
    /// Rate of the fastest of several passes, in tokens per second.
    pub tokens_per_second: f64,
}

/// Decode rate at one batch size.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct DecodeRow {
    /// Number of sequences in the batch.
    pub sequences: usize,
    /// Rate of the fastest step, in tokens per second over all sequences.
    pub tokens_per_second: f64,
    /// Upper bound of the rate, set by the memory bandwidth.
    pub bandwidth_limit_tokens_per_second: f64,
}

/// Measures the models of [`shapes::sizes`]; `bandwidth` is the bandwidth of a copy in memory, in bytes per second.
pub fn check(
    target: &CheckTarget,
    quick: bool,
    bandwidth: f64,
    folder: &Path,
    progress: &mut dyn FnMut(&str),
    not_run: &mut dyn FnMut(String, NotRun),
) -> Vec<SpeedRow> {
    let mut rows = Vec::new();
    for (name, shape) in shapes::sizes(quick) {
        progress(&format!("speed of {name}"));
        let done = with_file(&shape, folder, |path| {
            let row = measure(name, path, target, bandwidth, if quick { 4 } else { 16 });
            row.map_err(|error| NotRun::from_pass_error(&error))
        });
        match done {
            Ok(row) => rows.push(row),
            Err(reason) => not_run(format!("speed of {name}"), reason),
        }
    }
    rows
}

fn measure(name: &str, path: &Path, target: &CheckTarget, bandwidth: f64, steps: usize) -> Result<SpeedRow> {
    let file = ModelFile::read(path).map_err(candle_core::Error::wrap)?;
    let architecture = Architecture::read(&file).map_err(candle_core::Error::wrap)?;
    // Size of the KV pool: enough for the largest batch, and for a prompt.
    let tokens = BATCH_SIZES[BATCH_SIZES.len() - 1] * (PAST_TOKENS + steps + KV_BLOCK_TOKENS);
    let blocks = tokens.div_ceil(KV_BLOCK_TOKENS).max(PROMPT_TOKENS.div_ceil(KV_BLOCK_TOKENS));
    match target {
        CheckTarget::Cpu { .. } => {
            let model = CpuModel::load(&file, architecture, kernels())?;
            let pool = KvPool::new(model.kv_shape(), blocks);
            let weight_bytes = model.stored_bytes() as u64;
            rates(name, &model, pool, BandwidthLimit { weight_bytes, element_bytes: 4, bandwidth }, steps)
        }
        CheckTarget::Gpu(gpu) => {
            let stage = Stage { device: gpu.device.clone(), layers: 0..architecture.layers.len() };
            let model = CudaModel::load(&file, architecture, vec![stage])?;
            let pool = model.pool(blocks, DType::F16)?;
            let weight_bytes = model.stored_bytes() as u64;
            rates(name, &model, pool, BandwidthLimit { weight_bytes, element_bytes: ELEMENT_BYTES, bandwidth }, steps)
        }
    }
}

/// Terms from which the upper bound of the decode rate is calculated.
struct BandwidthLimit {
    weight_bytes: u64,
    /// Size of one element of a key or value vector, in bytes.
    element_bytes: u64,
    /// Memory bandwidth, in bytes per second.
    bandwidth: f64,
}

fn rates<M: ForwardModel>(
    name: &str,
    model: &M,
    mut pool: KvPool<M::Memory>,
    limit: BandwidthLimit,
    steps: usize,
) -> Result<SpeedRow> {
    let shape = *model.shape();
    let token = |at: usize| (at as u64 * 7919 % shape.vocabulary) as u32;
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(token).collect();
    let mut prefill = f64::MAX;
    // The first pass includes one-time initialization.
    for _ in 0..3 {
        let mut kv = pool.begin(&[], false, false);
        grow(&mut pool, &mut kv, PROMPT_TOKENS)?;
        let began = Instant::now();
        model.forward(&mut pool, &[BatchEntry { kv: &kv, tokens: &prompt, scored: 1 }], false)?;
        prefill = prefill.min(began.elapsed().as_secs_f64());
        pool.discard(kv);
    }
    let mut decode = Vec::new();
    for sequences in BATCH_SIZES {
        let mut running = Vec::new();
        for sequence in 0..sequences {
            // Each sequence has different tokens, otherwise the sequences would share their blocks.
            let own: Vec<u32> = (0..PAST_TOKENS).map(|at| token(at + 1000 * sequence)).collect();
            let mut kv = pool.begin(&[], false, false);
            grow(&mut pool, &mut kv, PAST_TOKENS + steps + 1)?;
            // The contents of the cache do not affect the speed.
            pool.advance(&mut kv, &own, PAST_TOKENS);
            running.push(kv);
        }
        let mut best = f64::MAX;
        for step in 0..steps {
            let next = [token(step)];
            let batch: Vec<BatchEntry<'_>> =
                running.iter().map(|kv| BatchEntry { kv, tokens: &next, scored: 1 }).collect();
            let began = Instant::now();
            model.forward(&mut pool, &batch, false)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        running.into_iter().for_each(|kv| pool.discard(kv));
        let kv_bytes = sequences as u64 * PAST_TOKENS as u64 * shape.kv_per_token(limit.element_bytes);
        let read_bytes = limit.weight_bytes + kv_bytes;
        decode.push(DecodeRow {
            sequences,
            tokens_per_second: sequences as f64 / best,
            bandwidth_limit_tokens_per_second: sequences as f64 * limit.bandwidth / read_bytes as f64,
        });
    }
    let prefill = PrefillRow { prompt_tokens: PROMPT_TOKENS, tokens_per_second: PROMPT_TOKENS as f64 / prefill };
    Ok(SpeedRow { model: name.to_owned(), weight_bytes: limit.weight_bytes, prefill, decode })
}

fn grow<M: BlockMemory>(pool: &mut KvPool<M>, kv: &mut SequenceKv, positions: usize) -> Result<()> {
    match pool.grow(kv, positions) {
        true => Ok(()),
        false => candle_core::bail!("the KV pool is too small for {positions} positions"),
    }
}

/// Bandwidth of a single-threaded copy in host memory, in bytes per second; bytes read and bytes written both count.
pub fn host_bandwidth() -> f64 {
    let from = vec![1u8; 128 << 20];
    let mut to = vec![0u8; from.len()];
    let mut best = f64::MAX;
    for _ in 0..3 {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
        best = best.min(began.elapsed().as_secs_f64());
    }
    2.0 * from.len() as f64 / best
}
