//! The whole engine on the device: prompts to text through the batcher, alone and together.

use std::path::Path;
use std::sync::Arc;

use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt, Sampling};
use cfq_proto::model::ModelId;

use crate::engine::candle::check::parity::ParityRow;
use crate::engine::candle::check::{Under, Undone, shapes, with_file};
use crate::engine::candle::{CandleEngine, Limits};
use crate::engine::{Ended, Engine, Event, Generation};

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

/// Each row's `apart` is the share of texts that are not as they should be, of which none may be.
pub fn check(under: &Under, folder: &Path, tell: &mut dyn FnMut(&str)) -> Vec<ParityRow> {
    tell("the batcher");
    let shape = shapes::whole();
    let rows = with_file(&shape, folder, |path| {
        let failed = |error: String| Undone::Failed(error);
        let limits = Limits { memory: 2 << 30, max_sequences: PROMPTS.len() as u32 };
        let model = "path:check".parse::<ModelId>().map_err(|error| failed(error.to_string()))?;
        let engine = CandleEngine::load_on_cards(model, path, &[under.card()], 1, limits, Arc::default(), None)
            .map_err(|error| failed(error.to_string()))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().map_err(|error| failed(error.to_string()))?;
        let row = |what: &str, apart| ParityRow::of(what.to_owned(), 0.0, apart);
        Ok(vec![
            row("8 texts together, and each alone", runtime.block_on(in_company(&engine))),
            row("8 texts with prompt lookup, and without", runtime.block_on(with_lookup(&engine))),
            row("8 texts of 12 digits, as a pattern says", runtime.block_on(constrained(&engine))),
            row("a text that is cancelled", runtime.block_on(cancelled(&engine))),
        ])
    });
    rows.unwrap_or_else(|undone| vec![ParityRow::of("the batcher".to_owned(), 0.0, Err(undone.words()))])
}

/// Asked to be deterministic, a sequence's text does not depend on its company.
async fn in_company(engine: &CandleEngine) -> Result<f64, String> {
    let together = texts(engine, &PROMPTS, &asked(true), &OutputFormat::Text).await?;
    let mut alone = Vec::new();
    for prompt in PROMPTS {
        alone.extend(texts(engine, &[prompt], &asked(true), &OutputFormat::Text).await?);
    }
    Ok(share(together.iter().zip(&alone).map(|(a, b)| a == b)))
}

/// Nor on what was guessed.
async fn with_lookup(engine: &CandleEngine) -> Result<f64, String> {
    let with = texts(engine, &PROMPTS, &asked(true), &OutputFormat::Text).await?;
    let without = texts(engine, &PROMPTS, &asked(false), &OutputFormat::Text).await?;
    Ok(share(with.iter().zip(&without).map(|(a, b)| a == b)))
}

async fn constrained(engine: &CandleEngine) -> Result<f64, String> {
    let digits = OutputFormat::Regex { pattern: "[0-9]{12}".to_owned() };
    let texts = texts(engine, &PROMPTS, &asked(true), &digits).await?;
    Ok(share(texts.iter().map(|text| text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit()))))
}

/// One that cannot end by itself before it is told to.
async fn cancelled(engine: &CandleEngine) -> Result<f64, String> {
    let long = OutputFormat::Regex { pattern: "[a-z]{400}".to_owned() };
    let sampling = Sampling { max_tokens: 400, ..asked(true) };
    let mut generation = start(engine, PROMPTS[0], &sampling, &long).await?;
    generation.next().await;
    generation.cancel();
    loop {
        if let Event::Done(how) = generation.next().await {
            return Ok(share([matches!(how, Err(Ended::Cancelled))].into_iter()));
        }
    }
}

/// Of those that are not as they should be.
fn share(right: impl ExactSizeIterator<Item = bool>) -> f64 {
    let count = right.len();
    right.filter(|right| !right).count() as f64 / count as f64
}

fn asked(prompt_lookup: bool) -> Sampling {
    Sampling { max_tokens: 24, temperature: 0.0, deterministic: true, prompt_lookup, ..Sampling::default() }
}

async fn start(
    engine: &CandleEngine,
    prompt: &str,
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Generation, String> {
    let messages = vec![ChatMessage { role: ChatRole::User, content: prompt.to_owned() }];
    let prompt = Prompt { messages, sampling: sampling.clone(), format: format.clone() };
    Ok(engine.admit(prompt).await.map_err(|refused| refused.to_string())?.start())
}

async fn texts(
    engine: &CandleEngine,
    prompts: &[&str],
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Vec<String>, String> {
    let mut running = Vec::new();
    for prompt in prompts {
        running.push(start(engine, prompt, sampling, format).await?);
    }
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
