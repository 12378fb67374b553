//! Whole engines over the small models of fixtures/models: the text transformers writes, whatever is beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cfq_inference_node::engine::candle::{CandleEngine, Limits, LoadError, need};
use cfq_inference_node::engine::{Admitted, Engine, Generation, Refused};
use cfq_proto::job::{Completion, FinishReason, OutputFormat, Prompt, Written};

use crate::smollm::{ask, finish};

const FAMILIES: [&str; 12] = [
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

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    greedy: Vec<u32>,
}

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

fn cases(family: &str) -> Vec<Case> {
    serde_json::from_str(&std::fs::read_to_string(folder(family).join("expected.json")).unwrap()).unwrap()
}

fn load(path: &Path, limits: Limits) -> CandleEngine {
    CandleEngine::load("path:fixture".parse().unwrap(), path, limits, Arc::default()).unwrap()
}

fn prompt(case: &Case, lookup: bool) -> Prompt {
    let mut prompt = ask(&case.text);
    prompt.sampling.max_tokens = case.greedy.len() as u32;
    prompt.sampling.prompt_lookup = lookup;
    prompt
}

async fn together(engine: &CandleEngine, prompts: impl IntoIterator<Item = Prompt>) -> Vec<Completion> {
    let mut admitted = Vec::new();
    for prompt in prompts {
        admitted.push(engine.admit(prompt).await.unwrap());
    }
    // All at once, or a quick one is done before the next begins.
    let running: Vec<Generation> = admitted.into_iter().map(Admitted::start).collect();
    let mut done = Vec::new();
    for generation in running {
        let (how, streamed) = finish(generation).await;
        let completion = how.unwrap();
        assert_eq!(completion.text, streamed);
        done.push(completion);
    }
    done
}

/// What the tokens of a case read as.
fn text(engine: &CandleEngine, case: &Case) -> String {
    let bytes: Vec<u8> = case.greedy.iter().flat_map(|id| engine.vocabulary().bytes_of(*id)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn every_family_writes_the_references_text_in_both_containers() {
    for family in FAMILIES {
        let cases = cases(family);
        for path in [folder(family), folder(family).join("model.gguf")] {
            let engine = load(&path, Limits { memory: 1 << 30, max_sequences: 16 });
            for lookup in [false, true] {
                for known in [lookup, true] {
                    let done = together(&engine, cases.iter().map(|case| prompt(case, lookup))).await;
                    for (done, case) in done.iter().zip(&cases) {
                        let said = format!("{} lookup {lookup}: {:?}", path.display(), case.text);
                        assert_eq!(done.text, text(&engine, case), "{said}");
                        assert_eq!((done.finish, done.usage.output_tokens), (FinishReason::Length, 64), "{said}");
                        assert!(!known || done.usage.prompt_tokens < 6 || done.usage.cached_tokens > 0, "{said}");
                        assert!(lookup || done.usage.guessed_tokens == 0, "{said}");
                    }
                }
            }
        }
    }
}

/// Those without a forward pass of our own.
#[tokio::test]
async fn others_run_one_sequence_at_a_time_and_write_the_references_text() {
    for family in ["starcoder2", "olmo2"] {
        let cases = cases(family);
        let engine = load(&folder(family), Limits { memory: 1 << 30, max_sequences: 16 });
        assert_eq!(engine.state().max_sequences, 1);
        for case in &cases {
            let first = engine.admit(prompt(case, true)).await.unwrap();
            assert!(matches!(engine.admit(prompt(case, true)).await, Err(Refused::NotNow { .. })), "{family}");
            let done = finish(first.start()).await.0.unwrap();
            assert_eq!(done.text, text(&engine, case), "{family}: {:?}", case.text);
            assert_eq!((done.usage.guessed_tokens, done.usage.cached_tokens), (0, 0), "nothing can be taken back");
        }
        // What another attempt wrote is gone on from.
        let (case, half) = (&cases[2], 32);
        let written = Written { vocabulary: engine.vocabulary().name(), tokens: case.greedy[..half].to_vec() };
        let admitted = engine.admit_after(prompt(case, true), written).await.unwrap();
        assert_eq!(admitted.resumed() as usize, half - 1);
        assert_eq!(finish(admitted.start()).await.0.unwrap().text, text(&engine, case));
        // A sequence that is cancelled leaves nothing behind.
        drop(engine.admit(prompt(case, true)).await.unwrap().start());
        let mut exact = prompt(case, true);
        exact.sampling.deterministic = true;
        let Err(Refused::Never { reason }) = engine.admit(exact).await else { panic!("it cannot be exact") };
        assert!(reason.contains("deterministic"), "{reason}");
        let admitted = loop {
            match engine.admit(prompt(case, true)).await {
                Ok(admitted) => break admitted,
                Err(Refused::NotNow { .. }) => tokio::task::yield_now().await,
                Err(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(finish(admitted.start()).await.0.unwrap().text, text(&engine, case));
        let predicted = need(&folder(family), Limits { memory: 1 << 30, max_sequences: 1 }).unwrap();
        assert_eq!(engine.weights(), predicted.weights);
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
            let engine = load(&path, Limits { memory: 1 << 30, max_sequences: 4 });
            for seed in 0..4 {
                let mut prompt = ask("def");
                prompt.format = OutputFormat::JsonSchema { schema: schema.clone() };
                prompt.sampling.max_tokens = 200;
                prompt.sampling.temperature = 1.0;
                prompt.sampling.seed = seed;
                let done = together(&engine, [prompt]).await.remove(0);
                let value: serde_json::Value = serde_json::from_str(&done.text)
                    .unwrap_or_else(|e| panic!("{}: {e} in {:?}", path.display(), done.text));
                assert!(value["count"].is_u64() && value["words"].is_array(), "{value}");
            }
        }
    }
}

#[tokio::test]
async fn sequences_put_aside_for_want_of_room_write_the_same() {
    let path = folder("llama");
    let Err(LoadError::DoesNotFit { source, .. }) = need(&path, Limits { memory: 0, max_sequences: 16 }) else {
        panic!("no memory is enough")
    };
    let engine = load(&path, Limits { memory: source.need.total(), max_sequences: 16 });
    assert_eq!(engine.state().kv_tokens_free, 512);
    let cases = cases("llama");
    // Many short answers: a short one is expected of the next.
    for _ in 0..16 {
        let mut short = prompt(&cases[0], true);
        short.sampling.max_tokens = 2;
        together(&engine, [short]).await;
    }
    // All but the long one: their prompts find room together, what they write does not.
    let cases = &cases[..8];
    let done = together(&engine, cases.iter().map(|case| prompt(case, true))).await;
    assert!(engine.preemptions() > 0, "8 x 64 tokens and their prompts do not fit into 512");
    for (done, case) in done.iter().zip(cases) {
        assert_eq!(done.text, text(&engine, case), "{:?}", case.text);
    }
    assert_eq!((engine.state().running, engine.state().kv_tokens_free), (0, 512));
}
