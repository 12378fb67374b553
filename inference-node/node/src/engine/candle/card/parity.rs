//! The cards' forward pass against transformers, on candle's CPU device.

use candle_core::{DType, Device};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::{CardModel, Stage};
use crate::engine::candle::model::Network;
use crate::engine::candle::parity::{
    Way, company_changes_no_bit, greedy_text_is_the_references, scores_are_the_references,
};
use crate::models::file::ModelFile;

fn on(path: &std::path::Path, cuts: &[usize]) -> CardModel {
    let file = ModelFile::read(path).unwrap();
    let architecture = Architecture::read(&file).unwrap();
    let layers = architecture.shape.layers as usize;
    let ends = cuts.iter().copied().chain([layers]);
    let stages = [0].into_iter().chain(cuts.iter().copied()).zip(ends);
    let stages = stages.map(|(from, to)| Stage { device: Device::Cpu, layers: from..to }).collect();
    CardModel::load(&file, architecture, stages).unwrap()
}

const ONE: Way<CardModel> =
    Way { load: |path| on(path, &[]), pool: |model, blocks| model.pool(blocks, DType::F32).unwrap() };

/// Two devices, the first with one layer.
const TWO: Way<CardModel> = Way { load: |path| on(path, &[1]), ..ONE };

/// Keys and values as a card holds them: near, and not always the same text.
const HALF: Way<CardModel> = Way { pool: |model, blocks| model.pool(blocks, DType::F16).unwrap(), ..ONE };

#[test]
fn scores_are_the_references_alone_and_in_a_ragged_batch() {
    scores_are_the_references(&ONE, 1e-3);
    scores_are_the_references(&TWO, 1e-3);
    scores_are_the_references(&HALF, 5e-2);
}

#[test]
fn greedy_text_is_the_references_in_batches_and_chunks_and_with_known_beginnings() {
    greedy_text_is_the_references(&ONE);
    greedy_text_is_the_references(&TWO);
}

#[test]
fn company_changes_no_bit_of_what_is_asked_to_be_exact() {
    company_changes_no_bit(&ONE, true);
}

#[test]
fn a_token_without_an_embedding_is_refused() {
    let model = on(&crate::engine::candle::parity::folder("llama"), &[]);
    let mut pool = model.pool(4, DType::F32).unwrap();
    let mut kv = pool.begin(&[], false, false);
    assert!(pool.grow(&mut kv, 1));
    let unknown = model.shape().vocabulary as u32;
    let rows = crate::engine::candle::model::Rows { kv: &kv, tokens: &[unknown], scored: 1 };
    assert!(model.forward(&mut pool, &[rows], false).is_err());
}
