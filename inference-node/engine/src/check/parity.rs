//! Compares the logits of the GPU forward pass with those of the CPU forward pass, on the same model files.

use std::path::Path;

use candle_core::{DType, Device, Result};
use schemars::JsonSchema;
use serde::Serialize;

use crate::backend::cpu::linear::kernels;
use crate::backend::cpu::model::CpuModel;
use crate::backend::cuda::{CudaModel, Stage};
use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::check::{CheckTarget, NotRun, shapes, with_file};
use crate::kv::{KvPool, SequenceKv};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::model::random::RandomFile;

/// Size of the KV pools, in blocks: more than the sequences need.
const POOL_BLOCKS: usize = 24;
/// Tolerance of the logits with F32 weights, keys and values, where only the order of sums differs: RMS of the
/// difference divided by the RMS of the logits.
const F32_TOLERANCE: f64 = 1e-4;
/// Tolerance of the logits with F16 keys and values, as on a GPU.
const F16_TOLERANCE: f64 = 1e-2;
/// Tolerance of the logits with quantized matrices: CPU and GPU quantize the activations to 8 bits in different blocks,
/// and each converts the formats that its kernels do not support into another one.
const QUANTIZED_TOLERANCE: f64 = 8e-2;

/// Result of one comparison.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ParityRow {
    /// The compared model or texts.
    pub model: String,
    /// RMS of the difference of the logits divided by the RMS of the logits; for texts, the fraction that differs.
    pub difference: f64,
    /// Largest difference that passes.
    pub allowed: f64,
    /// Whether the difference is at most `allowed`.
    pub passed: bool,
    /// Reason why the comparison could not run, if `difference` was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

impl ParityRow {
    pub(super) fn new(model: String, allowed: f64, difference: std::result::Result<f64, String>) -> Self {
        match difference {
            Ok(difference) => Self { model, difference, allowed, passed: difference <= allowed, failure: None },
            Err(failure) => Self { model, difference: f64::MAX, allowed, passed: false, failure: Some(failure) },
        }
    }
}

/// Compares all families and formats on the target, and some models with their layers split over `several` devices.
pub fn check(
    target: &CheckTarget,
    several: &[Device],
    folder: &Path,
    progress: &mut dyn FnMut(&str),
) -> Vec<ParityRow> {
    let on_gpu = matches!(target, CheckTarget::Gpu(_));
    let f32_weights = if on_gpu { F16_TOLERANCE } else { F32_TOLERANCE };
    let f16_weights = if on_gpu { QUANTIZED_TOLERANCE } else { F32_TOLERANCE };
    let one = [target.device()];
    let families = shapes::families().into_iter().map(|(name, file)| (name, file, f32_weights, &one[..]));
    let formats = shapes::formats().into_iter().map(|(name, file)| {
        let allowed = if file.format.block_size() == 1 { f16_weights } else { QUANTIZED_TOLERANCE };
        (name, file, allowed, &one[..])
    });
    let split = shapes::split(several.len()).into_iter().map(|(name, file)| (name, file, f32_weights, several));
    let mut rows = Vec::new();
    for (name, file, allowed, devices) in families.chain(formats).chain(split) {
        progress(&format!("parity of {name}"));
        let difference = with_file(&file, folder, |path| {
            compare(&file, path, devices).map_err(|error| NotRun::Failed(error.to_string()))
        });
        rows.push(ParityRow::new(name, allowed, difference.map_err(NotRun::into_reason)));
    }
    rows
}

/// Stages of equal size, one per device.
fn stages(layers: usize, devices: &[Device]) -> Vec<Stage> {
    let end = |at: usize| at * layers / devices.len().max(1);
    let stage = |(at, device): (usize, &Device)| Stage { device: device.clone(), layers: end(at)..end(at + 1) };
    devices.iter().enumerate().map(stage).collect()
}

fn compare(shape: &RandomFile, path: &Path, devices: &[Device]) -> Result<f64> {
    let read = || -> Result<(ModelFile, Architecture)> {
        let file = ModelFile::read(path).map_err(candle_core::Error::wrap)?;
        let architecture = Architecture::read(&file).map_err(candle_core::Error::wrap)?;
        Ok((file, architecture))
    };
    let (file, architecture) = read()?;
    let cpu = CpuModel::load(&file, architecture.clone(), kernels())?;
    let want = scores(&cpu, KvPool::new(cpu.kv_shape(), POOL_BLOCKS), shape.vocabulary)?;
    let gpu = CudaModel::load(&file, architecture, stages(shape.layers, devices))?;
    let precision = if devices.iter().all(Device::is_cpu) { DType::F32 } else { DType::F16 };
    let got = scores(&gpu, gpu.pool(POOL_BLOCKS, precision)?, shape.vocabulary)?;
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = &mut want.iter().zip(&got).map(|(a, b)| f64::from(a - b));
    let difference = (square(differences) / square(&mut want.iter().map(|v| f64::from(*v)))).sqrt();
    if want.len() != got.len() || !difference.is_finite() {
        candle_core::bail!(
            "the GPU forward pass returned {} logits, expected {}; or some logits are not finite",
            got.len(),
            want.len()
        )
    }
    Ok(difference)
}

/// One sequence of the scenario.
struct CheckSequence {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

/// Runs a scenario and returns its logits: chunked prefill while other sequences decode, then a prompt that shares a
/// prefix with an earlier prompt.
fn scores<M: ForwardModel>(model: &M, mut pool: KvPool<M::Memory>, vocabulary: usize) -> Result<Vec<f32>> {
    let token = |seed: usize, at: usize| ((seed * 131 + at * 29 + at * at * 7) % vocabulary) as u32;
    let text = |seed: usize, length: usize| (0..length).map(|at| token(seed, at)).collect::<Vec<u32>>();
    let mut all = Vec::new();
    let mut running: Vec<CheckSequence> = [text(1, 82), text(2, 17), text(3, 53)]
        .into_iter()
        .map(|tokens| CheckSequence { kv: pool.begin(&tokens, false, false), tokens })
        .collect();
    // Number of tokens that each pass computes of each sequence.
    let passes = [[40, 5, 0], [30, 1, 33], [1, 1, 1], [1, 1, 9], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]];
    for takes in passes {
        pass(model, &mut pool, &mut running, &takes, &mut all)?;
    }
    for sequence in running {
        pool.end(sequence.kv, &sequence.tokens);
    }
    let tokens = [&text(1, 60)[..], &text(4, 12)].concat();
    let again = CheckSequence { kv: pool.begin(&tokens, false, false), tokens };
    if again.kv.len() < 60 {
        candle_core::bail!("only {} of 60 positions were found in the prefix cache", again.kv.len())
    }
    let rest = again.tokens.len() - again.kv.len();
    pass(model, &mut pool, &mut [again], &[rest], &mut all)?;
    Ok(all)
}

fn pass<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    running: &mut [CheckSequence],
    takes: &[usize],
    all: &mut Vec<f32>,
) -> Result<()> {
    for (sequence, take) in running.iter_mut().zip(takes) {
        if !pool.grow(&mut sequence.kv, *take) {
            candle_core::bail!("the KV pool is too small for this batch")
        }
    }
    let batch = running.iter().zip(takes).filter(|(_, take)| **take > 0).map(|(sequence, take)| {
        let tokens = &sequence.tokens[sequence.kv.len()..][..*take];
        // Of long chunks, only the logits of the last three tokens are computed.
        BatchEntry { kv: &sequence.kv, tokens, scored: tokens.len().min(3) }
    });
    let batch: Vec<BatchEntry<'_>> = batch.collect();
    let scores = model.forward(pool, &batch, false)?;
    drop(batch);
    if let Some(scores) = scores {
        all.extend(scores.flatten_all()?.to_vec1::<f32>()?);
    }
    for (sequence, take) in running.iter_mut().zip(takes) {
        pool.advance(&mut sequence.kv, &sequence.tokens, *take);
    }
    Ok(())
}
