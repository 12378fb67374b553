//! Prefill and decode rates, and how fast decoding could be if memory were all that counts.
//!
//! A decode step reads every weight once, and the keys and values of every sequence. Divided by the bandwidth of a copy that
//! is the least time it can take: the floor.

use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Result};
use serde::Serialize;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::{CardModel, ELEMENT, Stage};
use crate::engine::candle::check::{Under, Undone, shapes, with_file};
use crate::engine::candle::kv::{BLOCK, KvPool, SequenceKv};
use crate::engine::candle::linear::kernels;
use crate::engine::candle::model::{Model, Network, Rows};
use crate::models::file::ModelFile;

/// Tokens each decoding sequence has behind it.
const PAST: usize = 256;
const PROMPT: usize = 512;
const SEQUENCES: [usize; 3] = [1, 8, 32];

#[derive(Debug, Clone, Serialize)]
pub struct SpeedRow {
    pub model: String,
    /// Bytes of the weights as held.
    pub weights: u64,
    pub prefill: PrefillRow,
    pub decode: Vec<DecodeRow>,
}

#[derive(Debug, Clone, Serialize)]
pub struct PrefillRow {
    pub prompt: usize,
    pub tokens_per_second: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct DecodeRow {
    pub sequences: usize,
    /// Of all sequences together.
    pub tokens_per_second: f64,
    /// The same if a step took no longer than reading what it must.
    pub floor_tokens_per_second: f64,
}

pub fn check(
    under: &Under,
    quick: bool,
    bandwidth: f64,
    folder: &Path,
    tell: &mut dyn FnMut(&str),
    undone: &mut dyn FnMut(String, Undone),
) -> Vec<SpeedRow> {
    let mut rows = Vec::new();
    for (name, shape) in shapes::sizes(quick) {
        tell(&format!("the speed of {name}"));
        let done = with_file(&shape, folder, |path| {
            let row = measure(name, path, under, bandwidth, if quick { 4 } else { 16 });
            row.map_err(|error| Undone::of_pass(&error))
        });
        match done {
            Ok(row) => rows.push(row),
            Err(reason) => undone(format!("the speed of {name}"), reason),
        }
    }
    rows
}

fn measure(name: &str, path: &Path, under: &Under, bandwidth: f64, steps: usize) -> Result<SpeedRow> {
    let file = ModelFile::read(path).map_err(candle_core::Error::wrap)?;
    let architecture = Architecture::read(&file).map_err(candle_core::Error::wrap)?;
    // Of the largest batch, and of a prompt.
    let most = SEQUENCES[SEQUENCES.len() - 1] * (PAST + steps + BLOCK);
    let blocks = most.div_ceil(BLOCK).max(PROMPT.div_ceil(BLOCK));
    match under {
        Under::Cpu => {
            let network = Model::load(&file, architecture, kernels())?;
            let pool = KvPool::new(network.kv_shape(), blocks);
            let weights = network.stored_bytes() as u64;
            rates(name, &network, pool, Floor { weights, element: 4, bandwidth }, steps)
        }
        Under::Card(card) => {
            let stage = Stage { device: card.device.clone(), layers: 0..architecture.layers.len() };
            let network = CardModel::load(&file, architecture, vec![stage])?;
            let pool = network.pool(blocks, DType::F16)?;
            let weights = network.stored_bytes() as u64;
            rates(name, &network, pool, Floor { weights, element: ELEMENT, bandwidth }, steps)
        }
    }
}

struct Floor {
    weights: u64,
    element: u64,
    bandwidth: f64,
}

fn rates<N: Network>(
    name: &str,
    network: &N,
    mut pool: KvPool<N::Memory>,
    floor: Floor,
    steps: usize,
) -> Result<SpeedRow> {
    let shape = *network.shape();
    let token = |at: usize| (at as u64 * 7919 % shape.vocabulary) as u32;
    let prompt: Vec<u32> = (0..PROMPT).map(token).collect();
    let mut prefill = f64::MAX;
    // The first pass pays for what is made at first use.
    for _ in 0..3 {
        let mut kv = pool.begin(&[], false, false);
        grow(&mut pool, &mut kv, PROMPT)?;
        let began = Instant::now();
        network.forward(&mut pool, &[Rows { kv: &kv, tokens: &prompt, scored: 1 }], false)?;
        prefill = prefill.min(began.elapsed().as_secs_f64());
        pool.discard(kv);
    }
    let mut decode = Vec::new();
    for sequences in SEQUENCES {
        let mut running = Vec::new();
        for sequence in 0..sequences {
            // Each its own, or the pool would keep them once.
            let own: Vec<u32> = (0..PAST).map(|at| token(at + 1000 * sequence)).collect();
            let mut kv = pool.begin(&[], false, false);
            grow(&mut pool, &mut kv, PAST + steps + 1)?;
            // What is there counts for nothing but its size.
            pool.advance(&mut kv, &own, PAST);
            running.push(kv);
        }
        let mut best = f64::MAX;
        for step in 0..steps {
            let next = [token(step)];
            let rows: Vec<Rows<'_>> = running.iter().map(|kv| Rows { kv, tokens: &next, scored: 1 }).collect();
            let began = Instant::now();
            network.forward(&mut pool, &rows, false)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        running.into_iter().for_each(|kv| pool.discard(kv));
        let read = floor.weights + sequences as u64 * PAST as u64 * shape.kv_per_token(floor.element);
        decode.push(DecodeRow {
            sequences,
            tokens_per_second: sequences as f64 / best,
            floor_tokens_per_second: sequences as f64 * floor.bandwidth / read as f64,
        });
    }
    let prefill = PrefillRow { prompt: PROMPT, tokens_per_second: PROMPT as f64 / prefill };
    Ok(SpeedRow { model: name.to_owned(), weights: floor.weights, prefill, decode })
}

fn grow<M: crate::engine::candle::kv::BlockMemory>(
    pool: &mut KvPool<M>,
    kv: &mut SequenceKv,
    positions: usize,
) -> Result<()> {
    match pool.grow(kv, positions) {
        true => Ok(()),
        false => candle_core::bail!("the pool has no room for {positions} positions"),
    }
}

/// Bytes per second of a copy in this machine's memory, read and written counted, by one thread.
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
