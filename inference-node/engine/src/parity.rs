//! Tests that the output of every model family equals that of the Python library transformers, on the small models of
//! tests/fixtures/models (see make_models.py there).
//!
//! The checks are generic over [`ForwardModel`]: the tests of this file run them on the CPU forward pass, and
//! [`crate::backend::cuda`] runs them on the GPU forward pass.

use std::path::{Path, PathBuf};

use crate::backend::cpu::linear::kernels;
use crate::backend::cpu::model::CpuModel;
use crate::backend::forward::{BatchEntry, ForwardModel};
use crate::kv::{KV_BLOCK_TOKENS, KvPool, SequenceKv};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::model::tokenizer::Vocabulary;

pub use crate::fixtures::{FAMILIES, folder};

/// Functions with which a test loads a model and creates its KV pool with a given number of blocks.
pub struct LoadModel<M: ForwardModel> {
    pub load: fn(&Path) -> M,
    pub pool: fn(&M, usize) -> KvPool<M::Memory>,
}

const CPU: LoadModel<CpuModel> = LoadModel {
    load: |path| {
        let file = ModelFile::read(path).unwrap();
        let architecture = Architecture::read(&file).unwrap();
        CpuModel::load(&file, architecture, kernels()).unwrap()
    },
    pool: |model, blocks| KvPool::new(model.kv_shape(), blocks),
};

impl<M: ForwardModel> LoadModel<M> {
    fn new_pool(&self, model: &M) -> KvPool<M::Memory> {
        (self.pool)(model, 4096 / KV_BLOCK_TOKENS)
    }
}

/// A prompt and the expected results, computed with transformers.
#[derive(serde::Deserialize)]
pub struct Case {
    pub text: String,
    /// `text` rendered in the model's chat template; `None` if `text` itself is the prompt.
    pub prompt: Option<String>,
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

/// The safetensors folder and the GGUF file of each family, with their cases.
fn files() -> impl Iterator<Item = (PathBuf, Vec<Case>)> {
    FAMILIES.into_iter().flat_map(|family| {
        let folder = folder(family);
        [folder.clone(), folder.join("model.gguf")].map(|path| {
            let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
            (path, serde_json::from_str(&expected).unwrap())
        })
    })
}

struct ParitySequence {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

fn begin<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    case: &Case,
    batch_invariant: bool,
) -> ParitySequence {
    let longest = case.ids.len() + case.greedy.len();
    let long = model.original_context().is_some_and(|original| longest as u64 > original);
    ParitySequence { tokens: case.ids.clone(), kv: pool.begin(&case.ids, long, batch_invariant) }
}

/// Runs one pass over up to `chunk` tokens of each sequence. Returns, for each sequence, its logits if all its tokens
/// are computed, else `None`.
fn pass<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    sequences: &mut [ParitySequence],
    chunk: usize,
    batch_invariant: bool,
) -> Vec<Option<Vec<f32>>> {
    let takes: Vec<usize> = sequences.iter().map(|s| (s.tokens.len() - s.kv.len()).min(chunk)).collect();
    for (sequence, take) in sequences.iter_mut().zip(&takes) {
        assert!(pool.grow(&mut sequence.kv, *take));
    }
    let ends = |s: &ParitySequence, take: usize| s.kv.len() + take == s.tokens.len();
    let batch: Vec<BatchEntry<'_>> = sequences
        .iter()
        .zip(&takes)
        .map(|(s, take)| BatchEntry {
            kv: &s.kv,
            tokens: &s.tokens[s.kv.len()..][..*take],
            scored: usize::from(ends(s, *take)),
        })
        .collect();
    let scores = model.forward(pool, &batch, batch_invariant).unwrap();
    drop(batch);
    let mut scores = scores.map_or(Vec::new(), |s| s.to_vec2::<f32>().unwrap()).into_iter();
    sequences
        .iter_mut()
        .zip(takes)
        .map(|(sequence, take)| {
            let scored = ends(sequence, take).then(|| scores.next().unwrap());
            pool.advance(&mut sequence.kv, &sequence.tokens, take);
            scored
        })
        .collect()
}

fn argmax(scores: &[f32]) -> u32 {
    scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

/// Generates greedily from all prompts in one batch, with prefill chunks of `chunk` tokens. Returns the generated
/// tokens, and the number of prompt tokens found in the prefix cache.
fn greedy<M: ForwardModel>(
    model: &M,
    pool: &mut KvPool<M::Memory>,
    cases: &[Case],
    chunk: usize,
) -> (Vec<Vec<u32>>, usize) {
    let mut sequences: Vec<ParitySequence> = cases.iter().map(|case| begin(model, pool, case, false)).collect();
    let cached = sequences.iter().map(|s| s.kv.len()).sum();
    while sequences.iter().zip(cases).any(|(s, c)| s.tokens.len() < c.ids.len() + c.greedy.len()) {
        let scored = pass(model, pool, &mut sequences, chunk, false);
        for (sequence, scores) in sequences.iter_mut().zip(scored) {
            // Finished sequences continue until the last one is done, which keeps the batch large.
            sequence.tokens.extend(scores.map(|scores| argmax(&scores)));
        }
    }
    let texts = sequences.into_iter().zip(cases).map(|(sequence, case)| {
        let text = sequence.tokens[case.ids.len()..][..case.greedy.len()].to_vec();
        pool.end(sequence.kv, &sequence.tokens);
        text
    });
    (texts.collect(), cached)
}

#[test]
fn token_ids_match_transformers() {
    for (path, cases) in files() {
        let vocabulary = Vocabulary::read(&ModelFile::read(&path).unwrap()).unwrap();
        for case in cases {
            let prompt = case.prompt.unwrap_or(case.text);
            assert_eq!(vocabulary.encode(&prompt).unwrap(), case.ids, "{}: {prompt:?}", path.display());
            let bytes: Vec<u8> = case.ids.iter().flat_map(|id| vocabulary.token_bytes(*id)).copied().collect();
            let text = String::from_utf8(bytes).unwrap();
            // Control tokens have no text.
            let plain = vocabulary.control_tokens().iter().fold(prompt, |text, (_, name)| text.replace(name, ""));
            // Some SentencePiece models begin every text with a space.
            assert!([&plain, &format!(" {plain}")].contains(&&text), "{}: {text:?}", path.display());
        }
    }
}

/// Asserts that the logits after every prompt, computed alone and in a batch of prompts of different lengths, are
/// within `tolerance` of those of transformers.
pub fn assert_logits_match<M: ForwardModel>(loader: &LoadModel<M>, tolerance: f32) {
    for (path, cases) in files() {
        let model = (loader.load)(&path);
        for batch_size in [1, cases.len()] {
            for cases in cases.chunks(batch_size) {
                let mut pool = loader.new_pool(&model);
                let mut sequences: Vec<ParitySequence> =
                    cases.iter().map(|case| begin(&model, &mut pool, case, false)).collect();
                let scored = pass(&model, &mut pool, &mut sequences, usize::MAX, false);
                for (scores, case) in scored.into_iter().zip(cases) {
                    let scores = scores.unwrap();
                    let errors = scores.iter().zip(&case.logits).map(|(a, b)| (a - b).abs());
                    let error = errors.fold(0.0, f32::max);
                    assert!(
                        error < tolerance,
                        "{}, batch of {}: error {error} after {:?}",
                        path.display(),
                        cases.len(),
                        case.text
                    );
                }
            }
        }
    }
}

/// Asserts that greedy text equals that of transformers, in one batch, for several chunk sizes, with and without a
/// prefix cache hit.
pub fn assert_greedy_text_matches<M: ForwardModel>(loader: &LoadModel<M>) {
    for (path, cases) in files() {
        let model = (loader.load)(&path);
        let expected: Vec<Vec<u32>> = cases.iter().map(|c| c.greedy.clone()).collect();
        for chunk in [7, 512] {
            let mut pool = loader.new_pool(&model);
            let (texts, cached) = greedy(&model, &mut pool, &cases, chunk);
            assert_eq!((texts, cached), (expected.clone(), 0), "{}", path.display());
            let (texts, cached) = greedy(&model, &mut pool, &cases, chunk);
            let prompts: usize = cases.iter().map(|c| c.ids.len() - 1).sum();
            // Up to four tokens per prompt may be missing: a shorter partial match is computed instead of copied.
            assert!(cached + 4 * cases.len() >= prompts, "{cached} of {prompts} were cached");
            assert_eq!(texts, expected, "{} from the prefix cache", path.display());
        }
    }
}

/// Asserts that the logits are bit-identical for every batch and chunk size. `batch_invariant`: whether to request
/// batch-invariant kernels. False for a backend whose kernels are all batch-invariant, so that there is nothing to
/// request.
pub fn assert_batch_invariant<M: ForwardModel>(loader: &LoadModel<M>, batch_invariant: bool) {
    for (path, cases) in files() {
        let model = (loader.load)(&path);
        let run = |cases: &[Case], chunk: usize| -> Vec<Vec<f32>> {
            let mut pool = loader.new_pool(&model);
            let mut sequences: Vec<ParitySequence> =
                cases.iter().map(|case| begin(&model, &mut pool, case, batch_invariant)).collect();
            let mut last: Vec<Option<Vec<f32>>> = vec![None; cases.len()];
            while last.iter().any(Option::is_none) {
                let scored = pass(&model, &mut pool, &mut sequences, chunk, batch_invariant);
                for (last, scored) in last.iter_mut().zip(scored) {
                    *last = last.take().or(scored);
                }
                // A token is appended to finished sequences, so that every sequence has a token to compute.
                sequences.iter_mut().zip(&last).filter(|(_, l)| l.is_some()).for_each(|(s, _)| s.tokens.push(3));
            }
            last.into_iter().flatten().collect()
        };
        let together = run(&cases, 512);
        for (case, together) in cases.iter().zip(together) {
            let alone = run(std::slice::from_ref(case), 11);
            assert_eq!(alone[0], together, "{}: {:?}", path.display(), case.text);
        }
    }
}

#[test]
fn logits_match_transformers_alone_and_in_a_ragged_batch() {
    assert_logits_match(&CPU, 1e-3);
}

#[test]
fn greedy_text_matches_in_batches_in_chunks_and_from_the_prefix_cache() {
    assert_greedy_text_matches(&CPU);
}

#[test]
fn batches_change_no_bit() {
    assert_batch_invariant(&CPU, false);
}
