//! KV offload: Alpha and Beta take turns in a pool that holds one of them; how much is computed again, and how much
//! returns from host memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cfq_engine::{Engine, EngineLimits, HostKvCache, KvOffloadFormat, LoadError, LocalEngine, estimate};
use cfq_proto::job::{Completion, Prompt};

use crate::smollm::{answer, user_prompt};

const TURNS: usize = 8;
/// Repetitions in a first prompt that takes more than half of the smallest pool.
const LONG_PROMPT: usize = 24;
/// Repetitions in a shorter first prompt.
const SHORT_PROMPT: usize = 9;

fn file(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

/// An engine with a large pool, or with the smallest one, which one conversation fits and two do not.
fn load(family: &str, large_pool: bool, cache: Option<Arc<HostKvCache>>) -> LocalEngine {
    let limits = |memory| EngineLimits { memory, max_sequences: 4 };
    let Err(LoadError::DoesNotFit { source, .. }) = estimate(&file(family), limits(0), 0) else {
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

/// Prompt tokens that were computed, not found in a cache.
fn computed(completions: &[Completion]) -> usize {
    completions.iter().map(|done| (done.usage.prompt_tokens - done.usage.cached_tokens) as usize).sum()
}

fn texts(completions: &[Completion]) -> Vec<&str> {
    completions.iter().map(|done| done.text.as_str()).collect()
}

/// Compares eviction with and without offload to the turns in a large pool, where nothing is computed twice.
fn compare(large: &[Completion], evicted: &[Completion], offloaded: &[Completion]) {
    let recomputed = |completions: &[Completion]| computed(completions).saturating_sub(computed(large));
    let (without, with) = (recomputed(evicted), recomputed(offloaded));
    let context = format!("recomputed {without} without and {with} with offload, {} computed once", computed(large));
    assert!(without > 2 * computed(large), "eviction alone recomputes most of it: {context}");
    assert!(with * 20 <= without, "{context}");
    assert_eq!(texts(offloaded), texts(evicted));
    assert_eq!(texts(offloaded), texts(large));
}

/// Both agents on one model.
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

/// Each agent on its own model, loaded for its turn and unloaded after it.
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
