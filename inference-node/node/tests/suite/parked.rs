//! Alpha and Beta in turns, with room for only one of them: what is computed again, and what comes back from the host.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cfq_inference_node::engine::Engine;
use cfq_inference_node::engine::candle::{Arena, CandleEngine, Limits, LoadError, ParkedAs, need};
use cfq_proto::job::{Completion, Prompt};

use crate::smollm::{answer, ask};

const TURNS: usize = 8;
/// Repeated words of a first prompt: more than half of a pool, and some.
const LONG: usize = 24;
const SHORT: usize = 9;

fn file(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

/// With the smallest pool there is: one conversation fits, two do not.
fn load(family: &str, roomy: bool, arena: Option<Arc<Arena>>) -> CandleEngine {
    let limits = |memory| Limits { memory, max_sequences: 4 };
    let Err(LoadError::DoesNotFit { source, .. }) = need(&file(family), limits(0)) else {
        panic!("nothing should fit into nothing");
    };
    let memory = if roomy { 1 << 30 } else { source.need.total() };
    let model = format!("path:{family}").parse().unwrap();
    CandleEngine::load_parking(model, &file(family), limits(memory), Arc::default(), arena).unwrap()
}

/// What an agent asks in its `turn`th turn: all it asked before and a little more.
fn prompt(agent: &str, words: usize, turn: usize) -> Prompt {
    let mut prompt =
        ask(&format!("{agent} reads what there is to know. {}", "do this and that, ".repeat(words + turn)));
    prompt.sampling.max_tokens = 12;
    prompt
}

fn computed(completions: &[Completion]) -> usize {
    completions.iter().map(|done| (done.usage.prompt_tokens - done.usage.cached_tokens) as usize).sum()
}

fn texts(completions: &[Completion]) -> Vec<&str> {
    completions.iter().map(|done| done.text.as_str()).collect()
}

/// Held against turns for which nothing had to be computed twice.
fn judge(roomy: &[Completion], plain: &[Completion], parked: &[Completion]) {
    let again = |completions: &[Completion]| computed(completions).saturating_sub(computed(roomy));
    let said = format!("again {} and {} beside {}", again(plain), again(parked), computed(roomy));
    assert!(again(plain) > 2 * computed(roomy), "plain eviction computes most of it again: {said}");
    assert!(again(parked) * 20 <= again(plain), "{said}");
    assert_eq!(texts(parked), texts(plain));
    assert_eq!(texts(parked), texts(roomy));
}

/// Both agents on one model.
async fn on_one_model(engine: &CandleEngine) -> Vec<Completion> {
    let mut done = Vec::new();
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            done.push(answer(engine, prompt(agent, LONG, turn)).await);
        }
    }
    done
}

#[tokio::test]
async fn turns_on_one_model_compute_nothing_twice() {
    let roomy = on_one_model(&load("qwen2", true, None)).await;
    let plain = on_one_model(&load("qwen2", false, None)).await;
    let arena = Arena::new(64 << 20, ParkedAs::F16).unwrap();
    let engine = load("qwen2", false, Some(arena.clone()));
    let parked = on_one_model(&engine).await;
    judge(&roomy, &plain, &parked);
    let tiers = engine.state().kv_tiers;
    assert!(tiers.device > 0 && tiers.parked > 0, "{tiers:?}");
    assert!(arena.bytes() > 0 && arena.bytes() <= arena.capacity());
}

/// Each agent on a model of its own, loaded for its turn and unloaded after it.
async fn on_two_models(arena: Option<Arc<Arena>>) -> Vec<Completion> {
    let mut done = Vec::new();
    for turn in 0..TURNS {
        for (agent, family) in [("Alpha", "llama"), ("Beta", "gemma3")] {
            let engine = load(family, false, arena.clone());
            done.push(answer(&engine, prompt(agent, SHORT, turn)).await);
            tokio::task::spawn_blocking(move || engine.unload()).await.unwrap();
        }
    }
    done
}

#[tokio::test]
async fn a_model_loaded_again_goes_on_with_what_it_knew() {
    let mut roomy = Vec::new();
    let (alpha, beta) = (load("llama", true, None), load("gemma3", true, None));
    for turn in 0..TURNS {
        roomy.push(answer(&alpha, prompt("Alpha", SHORT, turn)).await);
        roomy.push(answer(&beta, prompt("Beta", SHORT, turn)).await);
    }
    let plain = on_two_models(None).await;
    let parked = on_two_models(Arena::new(64 << 20, ParkedAs::F16)).await;
    judge(&roomy, &plain, &parked);
}

#[tokio::test]
async fn an_arena_that_is_too_small_costs_time_and_changes_no_text() {
    let plain = on_one_model(&load("qwen2", false, None)).await;
    let arena = Arena::new(40_000, ParkedAs::F16).unwrap();
    let small = on_one_model(&load("qwen2", false, Some(arena.clone()))).await;
    assert_eq!(texts(&small), texts(&plain));
    assert!(arena.bytes() <= 40_000);
}
