//! The whole engine on the device: prompts to text through the batcher, alone and together.

use std::path::Path;
use std::sync::Arc;

use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt, Sampling};
use cfq_proto::model::ModelId;

use crate::engine::candle::check::parity::ParityRow;
use crate::engine::candle::check::{Under, shapes, with_file};
use crate::engine::candle::{CandleEngine, Limits};
use crate::engine::{Engine, Event, Generation};

const PROMPTS: [&str; 8] = [
    "fn main() {",
    "x",
    "The quick brown fox jumps over the lazy dog, again and again and again and again.",
    "import json",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "for line in lines:\n    print(line)\n    print(line)\n    print(line)\n    print(line)\n",
    "a b c",
    "{\"key\": [1, 2,",
];

/// Asked to be deterministic, a sequence's text does not depend on its company. `apart` is the share of texts that do.
pub fn check(under: &Under, folder: &Path, tell: &mut dyn FnMut(&str)) -> ParityRow {
    tell("the batcher");
    let shape = shapes::whole();
    let differing = with_file(&shape, folder, |path| {
        let limits = Limits { memory: 2 << 30, max_sequences: PROMPTS.len() as u32 };
        let model = "path:check".parse::<ModelId>().map_err(|error| error.to_string())?;
        let engine = CandleEngine::load_on_cards(model, path, &[under.card()], 1, limits, Arc::default(), None)
            .map_err(|error| error.to_string())?;
        let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
        let together = runtime.block_on(texts(&engine, &PROMPTS))?;
        let mut alone = Vec::new();
        for prompt in PROMPTS {
            alone.extend(runtime.block_on(texts(&engine, &[prompt]))?);
        }
        let differing = together.iter().zip(&alone).filter(|(a, b)| a != b).count();
        Ok(differing as f64 / PROMPTS.len() as f64)
    });
    ParityRow::of("8 texts together, and each alone".to_owned(), 0.0, differing)
}

async fn texts(engine: &CandleEngine, prompts: &[&str]) -> Result<Vec<String>, String> {
    let mut admitted = Vec::new();
    for prompt in prompts {
        let sampling = Sampling { max_tokens: 24, temperature: 0.0, deterministic: true, ..Sampling::default() };
        let messages = vec![ChatMessage { role: ChatRole::User, content: (*prompt).to_owned() }];
        let prompt = Prompt { messages, sampling, format: OutputFormat::Text };
        admitted.push(engine.admit(prompt).await.map_err(|refused| refused.to_string())?);
    }
    let running: Vec<Generation> = admitted.into_iter().map(|admitted| admitted.start()).collect();
    let mut texts = Vec::new();
    for mut generation in running {
        loop {
            if let Event::Done(how) = generation.next().await {
                texts.push(how.map_err(|ended| ended.to_string())?.text);
                break;
            }
        }
    }
    Ok(texts)
}
