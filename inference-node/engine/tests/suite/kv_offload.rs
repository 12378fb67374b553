//! Tests of KV offload. Two agents, Alpha and Beta, take turns in a KV pool that holds the conversation of only one of
//! them. The tests measure how many prompt tokens are computed again and how many are restored from host memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cfq_engine::{Engine, EngineLimits, HostKvCache, KvOffloadFormat, LoadError, LocalEngine, estimate_memory};
use cfq_proto::job::{Completion, Prompt};

use crate::smollm::{answer, user_prompt};

const TURNS: usize = 8;
/// Number of times that a phrase is repeated in a long prompt of the first turn, which takes more than half of the
/// smallest pool.
const LONG_PROMPT: usize = 24;
/// Number of times that a phrase is repeated in a short prompt of the first turn.
const SHORT_PROMPT: usize = 9;

fn file(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

/// Loads an engine with a large KV pool, or with the smallest possible one, into which one conversation fits but not
/// two.
fn load(family: &str, large_pool: bool, cache: Option<Arc<HostKvCache>>) -> LocalEngine {
    let limits = |memory| EngineLimits { memory_bytes: memory, max_sequences: 4 };
    let Err(LoadError::DoesNotFit { source, .. }) = estimate_memory(&file(family), limits(0), 0) else {
        panic!("it fits into no memory");
    };
    let memory = if large_pool { 1 << 30 } else { source.estimate.total() };
    let model = format!("path:{family}").parse().unwrap();
    LocalEngine::builder(model, &file(family)).limits(limits(memory)).kv_cache(cache).load().unwrap()
}

/// The prompt of an agent's `turn`th turn: its previous prompt and a few more words.
fn prompt(agent: &str, repetitions: usize, turn: usize) -> Prompt {
    let mut prompt = user_prompt(&format!(
        "{agent} reads what there is to know. {}",
        "do this and that, ".repeat(repetitions + turn)
    ));
    prompt.sampling.max_tokens = 12;
    prompt
}

/// Number of prompt tokens that were computed, not found in a cache.
fn computed(completions: &[Completion]) -> usize {
    completions.iter().map(|done| (done.usage.prompt_tokens - done.usage.cached_tokens) as usize).sum()
}

fn texts(completions: &[Completion]) -> Vec<&str> {
    completions.iter().map(|done| done.text.as_str()).collect()
}

/// Compares the turns in a small pool, with and without offload, with the same turns in a large pool, where no token is
/// computed twice.
fn compare(large: &[Completion], evicted: &[Completion], offloaded: &[Completion]) {
    let recomputed = |completions: &[Completion]| computed(completions).saturating_sub(computed(large));
    let (without, with) = (recomputed(evicted), recomputed(offloaded));
    let context = format!(
        "prompt tokens recomputed: {without} without offload, {with} with offload; computed in the large pool: {}",
        computed(large)
    );
    assert!(without > 2 * computed(large), "eviction alone recomputes most of it: {context}");
    assert!(with * 20 <= without, "{context}");
    assert_eq!(texts(offloaded), texts(evicted));
    assert_eq!(texts(offloaded), texts(large));
}

/// Runs the turns of both agents on one model.
async fn on_one_model(engine: &LocalEngine) -> Vec<Completion> {
    let mut done = Vec::new();
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            done.push(answer(engine, prompt(agent, LONG_PROMPT, turn)).await);
        }
    }
    done
}

#[tokio::test]
async fn turns_on_one_model_recompute_almost_nothing() {
    let large = on_one_model(&load("qwen2", true, None)).await;
    let evicted = on_one_model(&load("qwen2", false, None)).await;
    let cache = HostKvCache::new(64 << 20, KvOffloadFormat::F16).unwrap();
    let engine = load("qwen2", false, Some(cache.clone()));
    let offloaded = on_one_model(&engine).await;
    compare(&large, &evicted, &offloaded);
    let tiers = engine.state().kv_tiers;
    assert!(tiers.device > 0 && tiers.offloaded > 0, "{tiers:?}");
    assert!(cache.bytes() > 0 && cache.bytes() <= cache.capacity());
}

/// Runs the turns of each agent on its own model, which is loaded for each turn and unloaded after it.
async fn on_two_models(cache: Option<Arc<HostKvCache>>) -> Vec<Completion> {
    let mut done = Vec::new();
    for turn in 0..TURNS {
        for (agent, family) in [("Alpha", "llama"), ("Beta", "gemma3")] {
            let engine = load(family, false, cache.clone());
            done.push(answer(&engine, prompt(agent, SHORT_PROMPT, turn)).await);
            tokio::task::spawn_blocking(move || engine.unload()).await.unwrap();
        }
    }
    done
}

#[tokio::test]
async fn reloaded_model_finds_its_offloaded_keys_and_values() {
    let mut large = Vec::new();
    let (alpha, beta) = (load("llama", true, None), load("gemma3", true, None));
    for turn in 0..TURNS {
        large.push(answer(&alpha, prompt("Alpha", SHORT_PROMPT, turn)).await);
        large.push(answer(&beta, prompt("Beta", SHORT_PROMPT, turn)).await);
    }
    let evicted = on_two_models(None).await;
    let offloaded = on_two_models(HostKvCache::new(64 << 20, KvOffloadFormat::F16)).await;
    compare(&large, &evicted, &offloaded);
}

#[tokio::test]
async fn host_kv_cache_that_is_too_small_changes_no_text() {
    let evicted = on_one_model(&load("qwen2", false, None)).await;
    let cache = HostKvCache::new(40_000, KvOffloadFormat::F16).unwrap();
    let offloaded = on_one_model(&load("qwen2", false, Some(cache.clone()))).await;
    assert_eq!(texts(&offloaded), texts(&evicted));
    assert!(cache.bytes() <= 40_000);
}
