//! Tests that the whole engine generates the same text as the Python library transformers from the tiny models of
//! fixtures/models, in any batch.

use std::collections::BTreeSet;
use std::path::Path;

use cfq_engine::{AdmitError, Admitted, Engine, EngineLimits, Generation, LoadError, LocalEngine, estimate_memory};
use cfq_proto::job::{Completion, FinishReason, GeneratedTokens, OutputFormat, Prompt};

use crate::fixtures::{self, CANDLE_TRANSFORMERS_FAMILIES, FAMILIES, folder};
use crate::smollm::{finish, user_prompt};

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    greedy: Vec<u32>,
}

fn cases(family: &str) -> Vec<Case> {
    serde_json::from_str(&std::fs::read_to_string(folder(family).join("expected.json")).unwrap()).unwrap()
}

fn load(path: &Path, limits: EngineLimits) -> LocalEngine {
    LocalEngine::builder("path:fixture".parse().unwrap(), path).limits(limits).load().unwrap()
}

fn prompt(case: &Case, lookup: bool) -> Prompt {
    let mut prompt = user_prompt(&case.text);
    prompt.sampling.max_tokens = case.greedy.len() as u32;
    prompt.sampling.prompt_lookup = lookup;
    prompt
}

/// Runs the prompts as one batch.
async fn run_together(engine: &LocalEngine, prompts: impl IntoIterator<Item = Prompt>) -> Vec<Completion> {
    let mut admitted = Vec::new();
    for prompt in prompts {
        admitted.push(engine.admit(prompt).await.unwrap());
    }
    // All are started at once, otherwise a short generation may end before the next one begins.
    let running: Vec<Generation> = admitted.into_iter().map(Admitted::start).collect();
    let mut done = Vec::new();
    for generation in running {
        let (result, streamed) = finish(generation).await;
        let completion = result.unwrap();
        assert_eq!(completion.text, streamed);
        done.push(completion);
    }
    done
}

/// Expected text of a case, decoded from its tokens.
fn expected_text(engine: &LocalEngine, case: &Case) -> String {
    let bytes: Vec<u8> = case.greedy.iter().flat_map(|id| engine.vocabulary().token_bytes(*id)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn every_fixture_model_has_its_family_listed() {
    let entries = std::fs::read_dir(fixtures::models()).unwrap();
    let on_disk: BTreeSet<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let listed = FAMILIES.iter().chain(&CANDLE_TRANSFORMERS_FAMILIES).map(|family| (*family).to_owned());
    assert_eq!(on_disk, listed.collect());
}

#[tokio::test]
async fn every_family_writes_the_reference_text_from_both_containers() {
    for family in FAMILIES {
        let cases = cases(family);
        for path in [folder(family), folder(family).join("model.gguf")] {
            let engine = load(&path, EngineLimits { memory_bytes: 1 << 30, max_sequences: 16 });
            for lookup in [false, true] {
                for known in [lookup, true] {
                    let done = run_together(&engine, cases.iter().map(|case| prompt(case, lookup))).await;
                    for (done, case) in done.iter().zip(&cases) {
                        let context = format!("{} lookup {lookup}: {:?}", path.display(), case.text);
                        assert_eq!(done.text, expected_text(&engine, case), "{context}");
                        assert_eq!((done.finish, done.usage.output_tokens), (FinishReason::Length, 64), "{context}");
                        assert!(!known || done.usage.prompt_tokens < 6 || done.usage.cached_tokens > 0, "{context}");
                        assert!(lookup || done.usage.drafted_tokens == 0, "{context}");
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn candle_transformers_families_run_one_sequence_and_write_the_reference() {
    for family in CANDLE_TRANSFORMERS_FAMILIES {
        let cases = cases(family);
        let engine = load(&folder(family), EngineLimits { memory_bytes: 1 << 30, max_sequences: 16 });
        assert_eq!(engine.state().max_sequences, 1);
        for case in &cases {
            let first = engine.admit(prompt(case, true)).await.unwrap();
            assert!(matches!(engine.admit(prompt(case, true)).await, Err(AdmitError::NotNow { .. })), "{family}");
            let done = finish(first.start()).await.0.unwrap();
            assert_eq!(done.text, expected_text(&engine, case), "{family}: {:?}", case.text);
            assert_eq!((done.usage.drafted_tokens, done.usage.cached_tokens), (0, 0), "no drafts, no prefix cache");
        }
        // Resumes after tokens that another attempt generated.
        let (case, half) = (&cases[2], 32);
        let generated =
            GeneratedTokens { vocabulary: engine.vocabulary().fingerprint(), tokens: case.greedy[..half].to_vec() };
        let admitted = engine.admit_resumed(prompt(case, true), generated).await.unwrap();
        assert_eq!(admitted.resumed() as usize, half - 1);
        assert_eq!(finish(admitted.start()).await.0.unwrap().text, expected_text(&engine, case));
        // A cancelled sequence must not affect the next one.
        drop(engine.admit(prompt(case, true)).await.unwrap().start());
        let mut deterministic = prompt(case, true);
        deterministic.sampling.deterministic = true;
        let Err(AdmitError::Never { reason }) = engine.admit(deterministic).await else { panic!("{family}: admitted") };
        assert!(reason.contains("deterministic"), "{reason}");
        let admitted = loop {
            match engine.admit(prompt(case, true)).await {
                Ok(admitted) => break admitted,
                Err(AdmitError::NotNow { .. }) => tokio::task::yield_now().await,
                Err(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(finish(admitted.start()).await.0.unwrap().text, expected_text(&engine, case));
        let predicted =
            estimate_memory(&folder(family), EngineLimits { memory_bytes: 1 << 30, max_sequences: 1 }, 0).unwrap();
        assert_eq!(engine.weight_bytes(), predicted.weights);
    }
}

#[tokio::test]
async fn constrained_output_parses_with_every_kind_of_tokenizer() {
    let schema = serde_json::json!({
        "type": "object", "additionalProperties": false, "required": ["name", "count", "words"],
        "properties": {
            "name": { "enum": ["alpha", "beta of two words"] },
            "count": { "type": "integer", "minimum": 0, "maximum": 99 },
            "words": { "type": "array", "maxItems": 2, "items": { "enum": ["a", "bc d"] } },
        },
    });
    for family in FAMILIES {
        for path in [folder(family), folder(family).join("model.gguf")] {
            let engine = load(&path, EngineLimits { memory_bytes: 1 << 30, max_sequences: 4 });
            for seed in 0..4 {
                let mut prompt = user_prompt("def");
                prompt.format = OutputFormat::JsonSchema { schema: schema.clone() };
                prompt.sampling.max_tokens = 200;
                prompt.sampling.temperature = 1.0;
                prompt.sampling.seed = seed;
                let done = run_together(&engine, [prompt]).await.remove(0);
                let value: serde_json::Value = serde_json::from_str(&done.text)
                    .unwrap_or_else(|e| panic!("{}: {e} in {:?}", path.display(), done.text));
                assert!(value["count"].is_u64() && value["words"].is_array(), "{value}");
            }
        }
    }
}

#[tokio::test]
async fn preempted_sequences_write_the_same_text() {
    let path = folder("llama");
    let Err(LoadError::DoesNotFit { source, .. }) =
        estimate_memory(&path, EngineLimits { memory_bytes: 0, max_sequences: 16 }, 0)
    else {
        panic!("it fits into no memory")
    };
    let engine = load(&path, EngineLimits { memory_bytes: source.estimate.total(), max_sequences: 16 });
    assert_eq!(engine.state().kv_tokens_free, 512);
    let cases = cases("llama");
    // Many short answers, so that the engine expects short outputs of the next sequences too.
    for _ in 0..16 {
        let mut short = prompt(&cases[0], true);
        short.sampling.max_tokens = 2;
        run_together(&engine, [short]).await;
    }
    // All cases except the long one: together, their prompts fit into the pool, but their answers do not.
    let cases = &cases[..8];
    let done = run_together(&engine, cases.iter().map(|case| prompt(case, true))).await;
    assert!(engine.preemptions() > 0, "8 x 64 tokens and their prompts do not fit into 512");
    for (done, case) in done.iter().zip(cases) {
        assert_eq!(done.text, expected_text(&engine, case), "{:?}", case.text);
    }
    assert_eq!((engine.state().running, engine.state().kv_tokens_free), (0, 512));
}
