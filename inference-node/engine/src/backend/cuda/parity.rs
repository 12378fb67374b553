//! Tests of the GPU forward pass, run on candle's CPU device: it must agree with the Python library transformers.

use candle_core::{DType, Device};

use crate::backend::cuda::{CudaModel, Stage};
use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::parity::{LoadModel, assert_batch_invariant, assert_greedy_text_matches, assert_logits_match};

/// Loads a model in one or several stages, all of them on the CPU. `cuts` are the first layers of the stages after the
/// first.
fn load_stages(path: &std::path::Path, cuts: &[usize]) -> CudaModel {
    let file = ModelFile::read(path).unwrap();
    let architecture = Architecture::read(&file).unwrap();
    let layers = architecture.shape.layers as usize;
    let ends = cuts.iter().copied().chain([layers]);
    let stages = [0].into_iter().chain(cuts.iter().copied()).zip(ends);
    let stages = stages.map(|(from, to)| Stage { device: Device::Cpu, layers: from..to }).collect();
    CudaModel::load(&file, architecture, stages).unwrap()
}

const ONE_DEVICE: LoadModel<CudaModel> =
    LoadModel { load: |path| load_stages(path, &[]), pool: |model, blocks| model.pool(blocks, DType::F32).unwrap() };

/// Loads the model in two stages, as on two devices; the first stage has one layer.
const TWO_DEVICES: LoadModel<CudaModel> = LoadModel { load: |path| load_stages(path, &[1]), ..ONE_DEVICE };

/// Loads the model with F16 keys and values, as on a GPU. Its logits are close to those of transformers, but its text
/// is not always the same.
const HALF_KV: LoadModel<CudaModel> =
    LoadModel { pool: |model, blocks| model.pool(blocks, DType::F16).unwrap(), ..ONE_DEVICE };

#[test]
fn logits_match_transformers_alone_and_in_a_ragged_batch() {
    assert_logits_match(&ONE_DEVICE, 1e-3);
    assert_logits_match(&TWO_DEVICES, 1e-3);
    assert_logits_match(&HALF_KV, 5e-2);
}

#[test]
fn greedy_text_matches_in_batches_in_chunks_and_from_the_prefix_cache() {
    assert_greedy_text_matches(&ONE_DEVICE);
    assert_greedy_text_matches(&TWO_DEVICES);
}

#[test]
fn batch_invariant_passes_change_no_bit() {
    assert_batch_invariant(&ONE_DEVICE, true);
}

#[test]
fn token_without_an_embedding_is_refused() {
    let model = load_stages(&crate::parity::folder("llama"), &[]);
    let mut pool = model.pool(4, DType::F32).unwrap();
    let mut kv = pool.begin(&[], false, false);
    assert!(pool.grow(&mut kv, 1));
    let unknown = model.shape().vocabulary as u32;
    let entry = BatchEntry { kv: &kv, tokens: &[unknown], scored: 1 };
    assert!(model.forward(&mut pool, &[entry], false).is_err());
}
