//! Every family against transformers, on the small models of tests/fixtures/models (see make_models.py there).

use std::path::PathBuf;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::kv::{BLOCK, KvPool, SequenceKv};
use crate::engine::candle::linear::kernels;
use crate::engine::candle::model::{Model, Rows};
use crate::models::file::ModelFile;
use crate::models::tokenizer::Vocabulary;

pub const FAMILIES: [&str; 9] =
    ["llama", "mistral", "qwen2", "qwen2-yarn", "qwen3", "qwen3-moe", "phi3", "gemma2", "gemma3"];

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

/// Both containers of each family.
fn files() -> impl Iterator<Item = (PathBuf, Vec<Case>)> {
    FAMILIES.into_iter().flat_map(|family| {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        [folder.clone(), folder.join("model.gguf")].map(|path| {
            let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
            (path, serde_json::from_str(&expected).unwrap())
        })
    })
}

fn load(path: &std::path::Path) -> Model {
    let file = ModelFile::read(path).unwrap();
    let architecture = Architecture::read(&file).unwrap();
    Model::load(&file, architecture, kernels()).unwrap()
}

fn pool(model: &Model) -> KvPool {
    KvPool::new(model.kv_shape(), 4096 / BLOCK)
}

struct Sequence {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

fn begin(model: &Model, pool: &mut KvPool, case: &Case) -> Sequence {
    let longest = case.ids.len() + case.greedy.len();
    let long = model.architecture().long.as_ref().is_some_and(|long| longest > long.original);
    Sequence { tokens: case.ids.clone(), kv: pool.begin(&case.ids, long, false) }
}

/// One pass over up to `chunk` tokens of each; the scores of those that reached their end, by sequence.
fn pass(model: &Model, pool: &mut KvPool, sequences: &mut [Sequence], chunk: usize) -> Vec<Option<Vec<f32>>> {
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
    let scores = model.forward(pool, &rows, false).unwrap();
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
fn greedy(model: &Model, pool: &mut KvPool, cases: &[Case], chunk: usize) -> (Vec<Vec<u32>>, usize) {
    let mut sequences: Vec<Sequence> = cases.iter().map(|case| begin(model, pool, case)).collect();
    let cached = sequences.iter().map(|s| s.kv.len()).sum();
    while sequences.iter().zip(cases).any(|(s, c)| s.tokens.len() < c.ids.len() + c.greedy.len()) {
        let scored = pass(model, pool, &mut sequences, chunk);
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
            assert_eq!(vocabulary.encode(&case.text).unwrap(), case.ids, "{}: {:?}", path.display(), case.text);
            let bytes: Vec<u8> = case.ids.iter().flat_map(|id| vocabulary.bytes_of(*id)).copied().collect();
            let text = String::from_utf8(bytes).unwrap();
            // Some SentencePiece models open every text with a space.
            assert!([&case.text, &format!(" {}", case.text)].contains(&&text), "{}: {text:?}", path.display());
        }
    }
}

#[test]
fn scores_are_the_references_alone_and_in_a_ragged_batch() {
    for (path, cases) in files() {
        let model = load(&path);
        for together in [1, cases.len()] {
            for cases in cases.chunks(together) {
                let mut pool = pool(&model);
                let mut sequences: Vec<Sequence> = cases.iter().map(|case| begin(&model, &mut pool, case)).collect();
                let scored = pass(&model, &mut pool, &mut sequences, usize::MAX);
                for (scores, case) in scored.into_iter().zip(cases) {
                    let far = scores.unwrap().iter().zip(&case.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(
                        far < 1e-3,
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

#[test]
fn greedy_text_is_the_references_in_batches_and_chunks_and_with_known_beginnings() {
    for (path, cases) in files() {
        let model = load(&path);
        let expected: Vec<Vec<u32>> = cases.iter().map(|c| c.greedy.clone()).collect();
        for chunk in [7, 512] {
            let mut pool = pool(&model);
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

#[test]
fn a_batch_changes_no_bit() {
    for (path, cases) in files() {
        let model = load(&path);
        let run = |cases: &[Case], chunk: usize| -> Vec<Vec<f32>> {
            let mut pool = pool(&model);
            let mut sequences: Vec<Sequence> = cases.iter().map(|case| begin(&model, &mut pool, case)).collect();
            let mut last: Vec<Option<Vec<f32>>> = vec![None; cases.len()];
            while last.iter().any(Option::is_none) {
                for (last, scored) in last.iter_mut().zip(pass(&model, &mut pool, &mut sequences, chunk)) {
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
