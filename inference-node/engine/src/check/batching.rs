//! Checks of the whole engine on the device, by the texts it generates: in a batch and alone, greedy and sampled, with
//! constraints, resumed, cancelled, with a small KV pool, and with offloaded keys and values.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cfq_proto::job::{ChatMessage, ChatRole, Completion, GeneratedTokens, OutputFormat, Prompt, Sampling};
use cfq_proto::model::ModelId;

use crate::backend::cuda::Gpu;
use crate::check::parity::ParityRow;
use crate::check::{CheckTarget, NotRun, shapes, with_file};
use crate::engine::{AdmitError, Engine};
use crate::generation::{Generation, GenerationError, GenerationEvent};
use crate::kv::{HostKvCache, KvOffloadFormat};
use crate::load_error::EngineLimits;
use crate::local_engine::LocalEngine;

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

/// Runs the checks. [`ParityRow::difference`] is the fraction of texts that are not as expected; it must be zero.
pub fn check(target: &CheckTarget, folder: &Path, progress: &mut dyn FnMut(&str)) -> Vec<ParityRow> {
    progress("texts");
    let rows = with_file(&shapes::engine_model(), folder, |path| rows(target, path).map_err(NotRun::Failed));
    rows.unwrap_or_else(|reason| vec![ParityRow::new("texts".to_owned(), 0.0, Err(reason.into_reason()))])
}

fn rows(target: &CheckTarget, path: &Path) -> Result<Vec<ParityRow>, String> {
    let gpu = target.gpu();
    let load = |gpu: &Gpu, kv_cache: Option<Arc<HostKvCache>>| {
        let limits = EngineLimits { memory_bytes: 2 << 30, max_sequences: PROMPTS.len() as u32 };
        let model = "path:check".parse::<ModelId>().map_err(|error| error.to_string())?;
        LocalEngine::builder(model, path)
            .limits(limits)
            .kv_cache(kv_cache)
            .load_on_gpus(std::slice::from_ref(gpu), 1)
            .map_err(|error| error.to_string())
    };
    let engine = load(&gpu, None)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(|error| error.to_string())?;
    let row = |what: &str, difference| ParityRow::new(what.to_owned(), 0.0, difference);
    let mut rows = vec![
        row("8 greedy texts, in a batch and alone", runtime.block_on(batch_invariance(&engine, &greedy(true)))),
        row("8 sampled texts, in a batch and alone", runtime.block_on(batch_invariance(&engine, &sampled()))),
        row("8 texts with and without prompt lookup", runtime.block_on(prompt_lookup(&engine))),
        row("8 texts constrained by a pattern", runtime.block_on(constrained_by_pattern(&engine))),
        row("8 texts constrained by a schema", runtime.block_on(constrained_by_schema(&engine))),
        row("8 texts constrained by a grammar", runtime.block_on(constrained_by_grammar(&engine))),
        row("8 texts resumed in the middle", runtime.block_on(resumed(&engine))),
        row("a cancelled text", runtime.block_on(cancelled(&engine))),
    ];
    let expected = runtime.block_on(texts(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
    // With the smallest pool, not all sequences fit at once.
    let min_bytes = engine.estimate().with_kv_tokens(MIN_KV_TOKENS).total();
    drop(engine);
    let small_pool = load(&Gpu { free_bytes: min_bytes, ..gpu.clone() }, None)
        .and_then(|engine| runtime.block_on(texts(&engine, &PROMPTS, &long(), &OutputFormat::Text)));
    let compare = |other: Vec<String>| wrong_fraction(expected.iter().zip(&other).map(|(a, b)| a == b));
    rows.push(row("8 texts with a small KV pool", small_pool.map(compare)));
    let kv_cache = HostKvCache::new(64 << 20, KvOffloadFormat::Exact);
    let offloaded = load(&gpu, kv_cache.clone()).and_then(|engine| {
        runtime.block_on(completions(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
        engine.unload();
        let engine = load(&gpu, kv_cache)?;
        let again = runtime.block_on(completions(&engine, &PROMPTS, &long(), &OutputFormat::Text))?;
        // Prompts shorter than a block are not offloaded.
        if again.iter().all(|completion| completion.usage.cached_tokens == 0) {
            return Err("no prompt was restored from host memory".to_owned());
        }
        Ok(compare(again.into_iter().map(|completion| completion.text).collect()))
    });
    rows.push(row("8 texts with offloaded prompts", offloaded));
    Ok(rows)
}

/// Size of the smallest KV pool, in tokens.
const MIN_KV_TOKENS: u64 = 512;
/// Wait before the admission of a sequence is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Checks that with [`Sampling::deterministic`], a text is the same in a batch and alone; returns the fraction of texts
/// that differ.
async fn batch_invariance(engine: &LocalEngine, sampling: &Sampling) -> Result<f64, String> {
    let batched = texts(engine, &PROMPTS, sampling, &OutputFormat::Text).await?;
    let mut alone = Vec::new();
    for prompt in PROMPTS {
        alone.extend(texts(engine, &[prompt], sampling, &OutputFormat::Text).await?);
    }
    Ok(wrong_fraction(batched.iter().zip(&alone).map(|(a, b)| a == b)))
}

/// Checks that with [`Sampling::deterministic`], a text is the same with and without prompt lookup; returns the
/// fraction of texts that differ.
async fn prompt_lookup(engine: &LocalEngine) -> Result<f64, String> {
    let with = texts(engine, &PROMPTS, &greedy(true), &OutputFormat::Text).await?;
    let without = texts(engine, &PROMPTS, &greedy(false), &OutputFormat::Text).await?;
    Ok(wrong_fraction(with.iter().zip(&without).map(|(a, b)| a == b)))
}

async fn constrained_by_pattern(engine: &LocalEngine) -> Result<f64, String> {
    let digits = OutputFormat::Regex { pattern: "[0-9]{12}".to_owned() };
    let texts = texts(engine, &PROMPTS, &greedy(true), &digits).await?;
    let is_valid = |text: &String| text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit());
    Ok(wrong_fraction(texts.iter().map(is_valid)))
}

async fn constrained_by_schema(engine: &LocalEngine) -> Result<f64, String> {
    let schema = serde_json::json!({
        "type": "object",
        "properties": { "verdict": { "enum": ["pass", "fail"] }, "sure": { "type": "boolean" } },
        "required": ["verdict", "sure"],
        "additionalProperties": false,
    });
    let texts = texts(engine, &PROMPTS, &long(), &OutputFormat::JsonSchema { schema }).await?;
    let is_valid = |text: &String| {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| {
            let verdict = value["verdict"].as_str().is_some_and(|word| word == "pass" || word == "fail");
            verdict && value["sure"].is_boolean() && value.as_object().is_some_and(|all| all.len() == 2)
        })
    };
    Ok(wrong_fraction(texts.iter().map(is_valid)))
}

async fn constrained_by_grammar(engine: &LocalEngine) -> Result<f64, String> {
    let lark = "start: \"(\" start \")\" | \"x\"".to_owned();
    // A text that only opens brackets is cut at the token limit. It is valid too, because the grammar allows it as a
    // beginning.
    let texts = texts(engine, &PROMPTS, &greedy(true), &OutputFormat::Grammar { lark }).await?;
    let is_valid = |text: &String| {
        let inside = text.trim_start_matches('(');
        let open = text.len() - inside.len();
        inside.is_empty()
            || inside.strip_prefix('x').is_some_and(|rest| rest.len() <= open && rest.chars().all(|c| c == ')'))
    };
    Ok(wrong_fraction(texts.iter().map(is_valid)))
}

/// Checks that a text that is resumed after half of its tokens equals the uninterrupted text. Another engine resumes a
/// text in this way after the first engine is lost.
async fn resumed(engine: &LocalEngine) -> Result<f64, String> {
    let vocabulary = engine.vocabulary().fingerprint();
    let (mut correct, mut resumed_tokens) = (Vec::new(), 0);
    for text in PROMPTS {
        let mut generation = start(engine, text, &sampled(), &OutputFormat::Text).await?;
        let mut tokens = Vec::new();
        let expected = loop {
            match generation.next().await {
                GenerationEvent::Step { tokens: new, .. } => tokens.extend(new),
                GenerationEvent::Done(result) => break result.map_err(|ended| ended.to_string())?.text,
            }
        };
        tokens.truncate(tokens.len() / 2);
        let generated = GeneratedTokens { vocabulary, tokens };
        let prompt = prompt(text, &sampled(), &OutputFormat::Text);
        let admitted = engine.admit_resumed(prompt, generated).await.map_err(|refused| refused.to_string())?;
        resumed_tokens += admitted.resumed();
        correct.push(completion(admitted.start()).await?.text == expected);
    }
    // Texts of one token cannot be resumed in the middle.
    if resumed_tokens == 0 {
        return Err("no text was long enough to be resumed".to_owned());
    }
    Ok(wrong_fraction(correct.into_iter()))
}

/// Checks that a running generation can be cancelled. The grammar requires 400 letters, so the text is not complete
/// when it is cancelled after the first event.
async fn cancelled(engine: &LocalEngine) -> Result<f64, String> {
    let letters = OutputFormat::Regex { pattern: "[a-z]{400}".to_owned() };
    let sampling = Sampling { max_tokens: 400, ..greedy(true) };
    let mut generation = start(engine, PROMPTS[0], &sampling, &letters).await?;
    generation.next().await;
    generation.cancel();
    loop {
        if let GenerationEvent::Done(result) = generation.next().await {
            return Ok(wrong_fraction([matches!(result, Err(GenerationError::Cancelled))].into_iter()));
        }
    }
}

/// Fraction of results that are wrong.
fn wrong_fraction(correct: impl ExactSizeIterator<Item = bool>) -> f64 {
    let count = correct.len();
    correct.filter(|correct| !correct).count() as f64 / count as f64
}

fn greedy(prompt_lookup: bool) -> Sampling {
    Sampling { max_tokens: 24, temperature: 0.0, deterministic: true, prompt_lookup, ..Sampling::default() }
}

/// Sampling with every option set.
fn sampled() -> Sampling {
    Sampling {
        temperature: 0.9,
        top_k: Some(40),
        top_p: Some(0.95),
        min_p: Some(0.01),
        repetition_penalty: 1.1,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        seed: 7,
        ..greedy(true)
    }
}

/// Sampling for texts so long that together they exceed the smallest KV pool ([`MIN_KV_TOKENS`]).
fn long() -> Sampling {
    Sampling { max_tokens: 96, ..greedy(true) }
}

fn prompt(text: &str, sampling: &Sampling, format: &OutputFormat) -> Prompt {
    let messages = vec![ChatMessage { role: ChatRole::User, content: text.to_owned() }];
    Prompt { messages, sampling: sampling.clone(), format: format.clone(), ..Prompt::default() }
}

async fn start(
    engine: &LocalEngine,
    text: &str,
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Generation, String> {
    // If the pool is full, retries until a running sequence has ended.
    loop {
        match engine.admit(prompt(text, sampling, format)).await {
            Ok(admitted) => return Ok(admitted.start()),
            Err(AdmitError::NotNow { .. }) => tokio::time::sleep(RETRY_INTERVAL).await,
            Err(refused) => return Err(refused.to_string()),
        }
    }
}

async fn completion(mut generation: Generation) -> Result<Completion, String> {
    loop {
        if let GenerationEvent::Done(result) = generation.next().await {
            return result.map_err(|ended| ended.to_string());
        }
    }
}

async fn completions(
    engine: &LocalEngine,
    prompts: &[&str],
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Vec<Completion>, String> {
    let mut running = Vec::new();
    for text in prompts {
        running.push(start(engine, text, sampling, format).await?);
    }
    let mut all = Vec::new();
    for generation in running {
        all.push(completion(generation).await?);
    }
    Ok(all)
}

async fn texts(
    engine: &LocalEngine,
    prompts: &[&str],
    sampling: &Sampling,
    format: &OutputFormat,
) -> Result<Vec<String>, String> {
    let all = completions(engine, prompts, sampling, format).await?;
    Ok(all.into_iter().map(|completion| completion.text).collect())
}
