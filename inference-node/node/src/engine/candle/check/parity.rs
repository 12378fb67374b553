//! The card's forward pass beside the CPU's, on the same files.

use std::path::Path;

use candle_core::{DType, Device, Result};
use serde::Serialize;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::{CardModel, Stage};
use crate::engine::candle::check::{Under, Undone, shapes, with_file};
use crate::engine::candle::kv::{KvPool, SequenceKv};
use crate::engine::candle::linear::kernels;
use crate::engine::candle::model::{Model, Network, Rows};
use crate::engine::candle::random::RandomFile;
use crate::models::file::ModelFile;

/// Blocks of the pools: more than the sequences take.
const BLOCKS: usize = 24;
/// How far apart scores may be, as the root of their mean square difference over that of the scores. In F32 only the order
/// of sums differs.
const PLAIN: f64 = 1e-4;
/// Keys and values of 11 bits, as a card holds them.
const HALF: f64 = 1e-2;
/// Both round activations to 8 bits, in blocks of their own; and some formats are held in others.
const QUANTISED: f64 = 8e-2;

#[derive(Debug, Clone, Serialize)]
pub struct ParityRow {
    pub model: String,
    /// Root of the mean square difference of the scores over that of the scores.
    pub apart: f64,
    pub allowed: f64,
    pub passed: bool,
    /// Why there is no number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

impl ParityRow {
    pub(super) fn of(model: String, allowed: f64, apart: std::result::Result<f64, String>) -> Self {
        match apart {
            Ok(apart) => Self { model, apart, allowed, passed: apart <= allowed, failure: None },
            Err(failure) => Self { model, apart: f64::MAX, allowed, passed: false, failure: Some(failure) },
        }
    }
}

/// `several`: what layers are split over.
pub fn check(under: &Under, several: &[Device], folder: &Path, tell: &mut dyn FnMut(&str)) -> Vec<ParityRow> {
    let on_card = matches!(under, Under::Card(_));
    let plain = if on_card { HALF } else { PLAIN };
    let halves = if on_card { QUANTISED } else { PLAIN };
    let one = [under.device()];
    let families = shapes::families().into_iter().map(|(name, file)| (name, file, plain, &one[..]));
    let formats = shapes::formats().into_iter().map(|(name, file)| {
        let allowed = if file.format.block_size() == 1 { halves } else { QUANTISED };
        (name, file, allowed, &one[..])
    });
    let split = shapes::split(several.len()).into_iter().map(|(name, file)| (name, file, plain, several));
    let mut rows = Vec::new();
    for (name, file, allowed, devices) in families.chain(formats).chain(split) {
        tell(&format!("parity of {name}"));
        let apart = with_file(&file, folder, |path| {
            compare(&file, path, devices).map_err(|error| Undone::Failed(error.to_string()))
        });
        rows.push(ParityRow::of(name, allowed, apart.map_err(Undone::words)));
    }
    rows
}

/// Layers in equal parts over the devices.
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
    let cpu = Model::load(&file, architecture.clone(), kernels())?;
    let want = scores(&cpu, KvPool::new(cpu.kv_shape(), BLOCKS), shape.vocabulary)?;
    let card = CardModel::load(&file, architecture, stages(shape.layers, devices))?;
    let precision = if devices.iter().all(Device::is_cpu) { DType::F32 } else { DType::F16 };
    let got = scores(&card, card.pool(BLOCKS, precision)?, shape.vocabulary)?;
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = &mut want.iter().zip(&got).map(|(a, b)| f64::from(a - b));
    let apart = (square(differences) / square(&mut want.iter().map(|v| f64::from(*v)))).sqrt();
    if want.len() != got.len() || !apart.is_finite() {
        candle_core::bail!("{} scores of which some are no numbers, where {} belong", got.len(), want.len())
    }
    Ok(apart)
}

/// One sequence of the scenario.
struct Sequence {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

/// All scores of a small day: prompts in pieces beside decoding sequences, and one that begins like an earlier one.
fn scores<N: Network>(network: &N, mut pool: KvPool<N::Memory>, vocabulary: usize) -> Result<Vec<f32>> {
    let token = |seed: usize, at: usize| ((seed * 131 + at * 29 + at * at * 7) % vocabulary) as u32;
    let text = |seed: usize, length: usize| (0..length).map(|at| token(seed, at)).collect::<Vec<u32>>();
    let mut all = Vec::new();
    let mut running: Vec<Sequence> = [text(1, 82), text(2, 17), text(3, 53)]
        .into_iter()
        .map(|tokens| Sequence { kv: pool.begin(&tokens, false, false), tokens })
        .collect();
    // How many of each one's tokens are computed in each pass.
    let passes = [[40, 5, 0], [30, 1, 33], [1, 1, 1], [1, 1, 9], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]];
    for takes in passes {
        pass(network, &mut pool, &mut running, &takes, &mut all)?;
    }
    for sequence in running {
        pool.end(sequence.kv, &sequence.tokens);
    }
    let tokens = [&text(1, 60)[..], &text(4, 12)].concat();
    let again = Sequence { kv: pool.begin(&tokens, false, false), tokens };
    if again.kv.len() < 60 {
        candle_core::bail!("{} of 60 known positions were found again", again.kv.len())
    }
    let rest = again.tokens.len() - again.kv.len();
    pass(network, &mut pool, &mut [again], &[rest], &mut all)?;
    Ok(all)
}

fn pass<N: Network>(
    network: &N,
    pool: &mut KvPool<N::Memory>,
    running: &mut [Sequence],
    takes: &[usize],
    all: &mut Vec<f32>,
) -> Result<()> {
    for (sequence, take) in running.iter_mut().zip(takes) {
        if !pool.grow(&mut sequence.kv, *take) {
            candle_core::bail!("the pool is too small")
        }
    }
    let rows = running.iter().zip(takes).filter(|(_, take)| **take > 0).map(|(sequence, take)| {
        let tokens = &sequence.tokens[sequence.kv.len()..][..*take];
        // Of long pieces the last few, of others all.
        Rows { kv: &sequence.kv, tokens, scored: tokens.len().min(3) }
    });
    let rows: Vec<Rows<'_>> = rows.collect();
    let scores = network.forward(pool, &rows, false)?;
    drop(rows);
    if let Some(scores) = scores {
        all.extend(scores.flatten_all()?.to_vec1::<f32>()?);
    }
    for (sequence, take) in running.iter_mut().zip(takes) {
        pool.advance(&mut sequence.kv, &sequence.tokens, *take);
    }
    Ok(())
}
