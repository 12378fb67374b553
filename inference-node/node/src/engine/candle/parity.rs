//! Every family against transformers, on the small models of tests/fixtures/models (see make_models.py there).
//!
//! The checks are said once, for any [`Network`]; here they meet the CPU's, and in [`super::card`] the cards'.

use std::path::{Path, PathBuf};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::kv::{BLOCK, KvPool, SequenceKv};
use crate::engine::candle::linear::kernels;
use crate::engine::candle::model::{Model, Network, Rows};
use crate::models::file::ModelFile;
use crate::models::tokenizer::Vocabulary;

pub const FAMILIES: [&str; 12] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
    "qwen3-moe",
    "phi3",
    "gemma2",
    "gemma3",
    "deepseek-distill",
    "deepseek-distill-qwen",
    "mistral-tekken",
];

/// How a model is loaded for a test, and its pool.
pub struct Way<N: Network> {
    pub load: fn(&Path) -> N,
    pub pool: fn(&N, usize) -> KvPool<N::Memory>,
}

const CPU: Way<Model> = Way {
    load: |path| {
        let file = ModelFile::read(path).unwrap();
        let architecture = Architecture::read(&file).unwrap();
        Model::load(&file, architecture, kernels()).unwrap()
    },
    pool: |model, blocks| KvPool::new(model.kv_shape(), blocks),
};

impl<N: Network> Way<N> {
    fn pool_of(&self, model: &N) -> KvPool<N::Memory> {
        (self.pool)(model, 4096 / BLOCK)
    }
}

#[derive(serde::Deserialize)]
pub struct Case {
    pub text: String,
    /// What the model's chat template makes of it, where that is more.
    pub prompt: Option<String>,
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

/// Both containers of each family.
fn files() -> impl Iterator<Item = (PathBuf, Vec<Case>)> {
    FAMILIES.into_iter().flat_map(|family| {
        let folder = folder(family);
        [folder.clone(), folder.join("model.gguf")].map(|path| {
            let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
            (path, serde_json::from_str(&expected).unwrap())
        })
    })
}

struct Sequence {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

fn begin<N: Network>(model: &N, pool: &mut KvPool<N::Memory>, case: &Case, exact: bool) -> Sequence {
    let longest = case.ids.len() + case.greedy.len();
    let long = model.original().is_some_and(|original| longest as u64 > original);
    Sequence { tokens: case.ids.clone(), kv: pool.begin(&case.ids, long, exact) }
}

/// One pass over up to `chunk` tokens of each; the scores of those that reached their end, by sequence.
fn pass<N: Network>(
    model: &N,
    pool: &mut KvPool<N::Memory>,
    sequences: &mut [Sequence],
    chunk: usize,
    exact: bool,
) -> Vec<Option<Vec<f32>>> {
    let takes: Vec<usize> = sequences.iter().map(|s| (s.tokens.len() - s.kv.len()).min(chunk)).collect();
    for (sequence, take) in sequences.iter_mut().zip(&takes) {
        assert!(pool.grow(&mut sequence.kv, *take));
    }
    let ends = |s: &Sequence, take: usize| s.kv.len() + take == s.tokens.len();
    let rows: Vec<Rows<'_>> = sequences
        .iter()
        .zip(&takes)
        .map(|(s, take)| Rows {
            kv: &s.kv,
            tokens: &s.tokens[s.kv.len()..][..*take],
            scored: usize::from(ends(s, *take)),
        })
        .collect();
    let scores = model.forward(pool, &rows, exact).unwrap();
    drop(rows);
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

fn best(scores: &[f32]) -> u32 {
    scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

/// Greedy text of all cases together, prompts in chunks of `chunk`.
fn greedy<N: Network>(model: &N, pool: &mut KvPool<N::Memory>, cases: &[Case], chunk: usize) -> (Vec<Vec<u32>>, usize) {
    let mut sequences: Vec<Sequence> = cases.iter().map(|case| begin(model, pool, case, false)).collect();
    let cached = sequences.iter().map(|s| s.kv.len()).sum();
    while sequences.iter().zip(cases).any(|(s, c)| s.tokens.len() < c.ids.len() + c.greedy.len()) {
        let scored = pass(model, pool, &mut sequences, chunk, false);
        for (sequence, scores) in sequences.iter_mut().zip(scored) {
            // Those that are done go on until the last is: more company for the others.
            sequence.tokens.extend(scores.map(|scores| best(&scores)));
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
fn token_ids_are_the_references() {
    for (path, cases) in files() {
        let vocabulary = Vocabulary::read(&ModelFile::read(&path).unwrap()).unwrap();
        for case in cases {
            let prompt = case.prompt.unwrap_or(case.text);
            assert_eq!(vocabulary.encode(&prompt).unwrap(), case.ids, "{}: {prompt:?}", path.display());
            let bytes: Vec<u8> = case.ids.iter().flat_map(|id| vocabulary.bytes_of(*id)).copied().collect();
            let text = String::from_utf8(bytes).unwrap();
            // Control tokens stand for no text.
            let said = vocabulary.control().iter().fold(prompt, |said, (_, name)| said.replace(name, ""));
            // Some SentencePiece models open every text with a space.
            assert!([&said, &format!(" {said}")].contains(&&text), "{}: {text:?}", path.display());
        }
    }
}

pub fn scores_are_the_references<N: Network>(way: &Way<N>, tolerance: f32) {
    for (path, cases) in files() {
        let model = (way.load)(&path);
        for together in [1, cases.len()] {
            for cases in cases.chunks(together) {
                let mut pool = way.pool_of(&model);
                let mut sequences: Vec<Sequence> =
                    cases.iter().map(|case| begin(&model, &mut pool, case, false)).collect();
                let scored = pass(&model, &mut pool, &mut sequences, usize::MAX, false);
                for (scores, case) in scored.into_iter().zip(cases) {
                    let far = scores.unwrap().iter().zip(&case.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(
                        far < tolerance,
                        "{}, {} together: {far} off after {:?}",
                        path.display(),
                        cases.len(),
                        case.text
                    );
                }
            }
        }
    }
}

pub fn greedy_text_is_the_references<N: Network>(way: &Way<N>) {
    for (path, cases) in files() {
        let model = (way.load)(&path);
        let expected: Vec<Vec<u32>> = cases.iter().map(|c| c.greedy.clone()).collect();
        for chunk in [7, 512] {
            let mut pool = way.pool_of(&model);
            let (texts, cached) = greedy(&model, &mut pool, &cases, chunk);
            assert_eq!((texts, cached), (expected.clone(), 0), "{}", path.display());
            let (texts, cached) = greedy(&model, &mut pool, &cases, chunk);
            let prompts: usize = cases.iter().map(|c| c.ids.len() - 1).sum();
            // All but what is too short to be worth copying.
            assert!(cached + 4 * cases.len() >= prompts, "{cached} of {prompts} were known");
            assert_eq!(texts, expected, "{} with known beginnings", path.display());
        }
    }
}

/// Asked to be exact or, where its kernels are so anyway, not.
pub fn company_changes_no_bit<N: Network>(way: &Way<N>, exact: bool) {
    for (path, cases) in files() {
        let model = (way.load)(&path);
        let run = |cases: &[Case], chunk: usize| -> Vec<Vec<f32>> {
            let mut pool = way.pool_of(&model);
            let mut sequences: Vec<Sequence> = cases.iter().map(|case| begin(&model, &mut pool, case, exact)).collect();
            let mut last: Vec<Option<Vec<f32>>> = vec![None; cases.len()];
            while last.iter().any(Option::is_none) {
                for (last, scored) in last.iter_mut().zip(pass(&model, &mut pool, &mut sequences, chunk, exact)) {
                    *last = last.take().or(scored);
                }
                // Only unfinished ones have tokens left.
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
fn scores_are_the_references_alone_and_in_a_ragged_batch() {
    scores_are_the_references(&CPU, 1e-3);
}

#[test]
fn greedy_text_is_the_references_in_batches_and_chunks_and_with_known_beginnings() {
    greedy_text_is_the_references(&CPU);
}

#[test]
fn a_batch_changes_no_bit() {
    company_changes_no_bit(&CPU, false);
}
