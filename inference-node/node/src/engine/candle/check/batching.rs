//! The whole engine on the device: prompts to text through the batcher, alone and together, drawn, constrained, gone on from,
//! with little room, and after their keys and values were parked.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling, Written};
use cfq_proto::model::ModelId;

use crate::engine::candle::card::Card;
use crate::engine::candle::check::parity::ParityRow;
use crate::engine::candle::check::{Under, Undone, shapes, with_file};
use crate::engine::candle::{Arena, CandleEngine, Limits, ParkedAs};
use crate::engine::{Ended, Engine, Event, Generation, Refused};

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
    let rows = with_file(&shapes::whole(), folder, |path| rows(under, path).map_err(Undone::Failed));
    rows.unwrap_or_else(|undone| vec![ParityRow::of("the batcher".to_owned(), 0.0, Err(undone.words()))])
}

fn rows(under: &Under, path: &Path) -> Result<Vec<ParityRow>, String> {
    let card = under.card();
    let load = |card: &Card, arena: Option<Arc<Arena>>| {
        let limits = Limits { memory: 2 << 30, max_sequences: PROMPTS.len() as u32 };
        let model = "path:check".parse::<ModelId>().map_err(|error| error.to_string())?;
        CandleEngine::load_on_cards(model, path, std::slice::from_ref(card), 1, limits, Arc::default(), arena)
            .map_err(|error| error.to_string())
    };
    let engine = load(&card, None)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(|error| error.to_string())?;
    let row = |what: &str, apart| ParityRow::of(what.to_owned(), 0.0, apart);
    let mut rows = vec![
        row("8 texts together, and each alone", runtime.block_on(in_company(&engine, &asked(true)))),
        row("8 texts drawn by a seed, together and each alone", runtime.block_on(in_company(&engine, &drawn()))),
        row("8 texts with prompt lookup, and without", runtime.block_on(with_lookup(&engine))),
        row("8 texts of 12 digits, as a pattern says", runtime.block_on(by_pattern(&engine))),
        row("8 texts as a schema says", runtime.block_on(by_schema(&engine))),
        row("8 texts as a grammar says", runtime.block_on(by_grammar(&engine))),
        row("8 texts gone on from in their middle", runtime.block_on(gone_on_from(&engine))),
        row("a text that is cancelled", runtime.block_on(cancelled(&engine))),
    ];
    let plenty = runtime.block_on(texts(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
    // The least that a model is loaded with: not all of those at once.
    let least = engine.need().with_tokens(LEAST).total();
    drop(engine);
    let scarce = load(&Card { free: least, ..card.clone() }, None)
        .and_then(|engine| runtime.block_on(texts(&engine, &PROMPTS, &long(), &OutputFormat::Text)));
    let same = |other: Vec<String>| share(plenty.iter().zip(&other).map(|(a, b)| a == b));
    rows.push(row("8 texts with room for some of them", scarce.map(same)));
    let arena = Arena::new(64 << 20, ParkedAs::Exact);
    let parked = load(&card, arena.clone()).and_then(|engine| {
        runtime.block_on(completions(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
        engine.unload();
        let engine = load(&card, arena)?;
        let again = runtime.block_on(completions(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
        // Prompts shorter than a block are not parked.
        if again.iter().all(|completion| completion.usage.cached_tokens == 0) {
            return Err("nothing came back".to_owned());
        }
        Ok(same(again.into_iter().map(|completion| completion.text).collect()))
    });
    rows.push(row("8 texts after their prompts were parked in the host's memory", parked));
    Ok(rows)
}

/// Tokens of the smallest pool.
const LEAST: u64 = 512;
/// Between two looks for room.
const AGAIN: Duration = Duration::from_millis(1);

/// Asked to be deterministic, a sequence's text does not depend on its company.
async fn in_company(engine: &CandleEngine, sampling: &Sampling) -> Result<f64, String> {
    let together = texts(engine, &PROMPTS, sampling, &OutputFormat::Text).await?;
    let mut alone = Vec::new();
    for prompt in PROMPTS {
        alone.extend(texts(engine, &[prompt], sampling, &OutputFormat::Text).await?);
    }
    Ok(share(together.iter().zip(&alone).map(|(a, b)| a == b)))
}

/// Nor on what was guessed.
async fn with_lookup(engine: &CandleEngine) -> Result<f64, String> {
    let with = texts(engine, &PROMPTS, &asked(true), &OutputFormat::Text).await?;
    let without = texts(engine, &PROMPTS, &asked(false), &OutputFormat::Text).await?;
    Ok(share(with.iter().zip(&without).map(|(a, b)| a == b)))
}

async fn by_pattern(engine: &CandleEngine) -> Result<f64, String> {
    let digits = OutputFormat::Regex { pattern: "[0-9]{12}".to_owned() };
    let texts = texts(engine, &PROMPTS, &asked(true), &digits).await?;
    Ok(share(texts.iter().map(|text| text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit()))))
}

async fn by_schema(engine: &CandleEngine) -> Result<f64, String> {
    let schema = serde_json::json!({
        "type": "object",
        "properties": { "verdict": { "enum": ["pass", "fail"] }, "sure": { "type": "boolean" } },
        "required": ["verdict", "sure"],
        "additionalProperties": false,
    });
    let texts = texts(engine, &PROMPTS, &long(), &OutputFormat::JsonSchema { schema }).await?;
    let fits = |text: &String| {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| {
            let verdict = value["verdict"].as_str().is_some_and(|word| word == "pass" || word == "fail");
            verdict && value["sure"].is_boolean() && value.as_object().is_some_and(|all| all.len() == 2)
        })
    };
    Ok(share(texts.iter().map(fits)))
}

async fn by_grammar(engine: &CandleEngine) -> Result<f64, String> {
    let lark = "start: \"(\" start \")\" | \"x\"".to_owned();
    // One that opens brackets for ever is cut, and no less as the grammar says.
    let texts = texts(engine, &PROMPTS, &asked(true), &OutputFormat::Grammar { lark }).await?;
    let fits = |text: &String| {
        let inside = text.trim_start_matches('(');
        let open = text.len() - inside.len();
        inside.is_empty()
            || inside.strip_prefix('x').is_some_and(|rest| rest.len() <= open && rest.chars().all(|c| c == ')'))
    };
    Ok(share(texts.iter().map(fits)))
}

/// From what half of the tokens were, as another node would after this one was lost.
async fn gone_on_from(engine: &CandleEngine) -> Result<f64, String> {
    let vocabulary = engine.vocabulary().name();
    let (mut right, mut resumed) = (Vec::new(), 0);
    for words in PROMPTS {
        let mut whole = start(engine, words, &drawn(), &OutputFormat::Text).await?;
        let mut tokens = Vec::new();
        let text = loop {
            match whole.next().await {
                Event::Step { tokens: new, .. } => tokens.extend(new),
                Event::Done(how) => break how.map_err(|ended| ended.to_string())?.text,
            }
        };
        tokens.truncate(tokens.len() / 2);
        let written = Written { vocabulary, tokens };
        let prompt = prompt(words, &drawn(), &OutputFormat::Text);
        let admitted = engine.admit_after(prompt, written).await.map_err(|refused| refused.to_string())?;
        resumed += admitted.resumed();
        right.push(whole_text(admitted.start()).await?.text == text);
    }
    // A text of one token has no middle.
    if resumed == 0 {
        return Err("none was gone on from".to_owned());
    }
    Ok(share(right.into_iter()))
}

/// One that cannot end by itself before it is told to.
async fn cancelled(engine: &CandleEngine) -> Result<f64, String> {
    let letters = OutputFormat::Regex { pattern: "[a-z]{400}".to_owned() };
    let sampling = Sampling { max_tokens: 400, ..asked(true) };
    let mut generation = start(engine, PROMPTS[0], &sampling, &letters).await?;
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

/// Everything that shapes a draw.
fn drawn() -> Sampling {
    Sampling {
        temperature: 0.9,
        top_k: Some(40),
        top_p: Some(0.95),
        min_p: Some(0.01),
        repetition_penalty: 1.1,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        seed: 7,
        ..asked(true)
    }
}

/// All of them together are more than [`LEAST`].
fn long() -> Sampling {
    Sampling { max_tokens: 96, ..asked(true) }
}

fn prompt(words: &str, sampling: &Sampling, format: &OutputFormat) -> Prompt {
    let messages = vec![ChatMessage { role: ChatRole::User, content: words.to_owned() }];
    Prompt { messages, sampling: sampling.clone(), format: format.clone() }
}

async fn start(
    engine: &CandleEngine,
    words: &str,
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Generation, String> {
    // What finds no room now waits for some, as a job waits for its place.
    loop {
        match engine.admit(prompt(words, sampling, format)).await {
            Ok(admitted) => return Ok(admitted.start()),
            Err(Refused::NotNow { .. }) => tokio::time::sleep(AGAIN).await,
            Err(refused) => return Err(refused.to_string()),
        }
    }
}

async fn whole_text(mut generation: Generation) -> Result<Completion, String> {
    loop {
        if let Event::Done(how) = generation.next().await {
            return how.map_err(|ended| ended.to_string());
        }
    }
}

async fn completions(
    engine: &CandleEngine,
    prompts: &[&str],
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Vec<Completion>, String> {
    let mut running = Vec::new();
    for words in prompts {
        running.push(start(engine, words, sampling, format).await?);
    }
    let mut all = Vec::new();
    for generation in running {
        all.push(whole_text(generation).await?);
    }
    Ok(all)
}

async fn texts(
    engine: &CandleEngine,
    prompts: &[&str],
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Vec<String>, String> {
    let all = completions(engine, prompts, sampling, format).await?;
    Ok(all.into_iter().map(|completion| completion.text).collect())
}
