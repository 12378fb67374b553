//! Time to first token of a review, with and without speculative prefill of its prompt, and of a short call that
//! arrives while a speculative prefill runs.
//!
//! The prompt of a review contains a file; the prompt has about 1,500 tokens, all known in advance except the
//! instructions at the end. Reviews with and without speculative prefill alternate in the same run, and so do short
//! calls alone and during a speculative prefill.
//!
//!     cargo run -p cfq-benches --bin speculative_prefill -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use cfq_benches::engine::{file_from_arguments, finish, load, median_f64, prompt};
use cfq_engine::{Engine, ExpectedPrompt, LocalEngine, PrefillProgress};
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Sampling};

const ROUNDS: usize = 5;
/// Number of functions in a reviewed file.
const FUNCTIONS: usize = 70;
const ANSWER_TOKENS: u32 = 8;

fn main() -> anyhow::Result<()> {
    let file = file_from_arguments()?;
    let engine = load(&file, 2)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(bench(Arc::new(engine)))
}

/// Text of a file to review. All files are different, so that none is in the prefix cache.
fn file_text(round: usize, what: &str) -> String {
    let mut text = format!("# Round {round}, {what}\n\n");
    for n in 0..FUNCTIONS {
        let _ = writeln!(text, "def f{n}(x):\n    return x * {} + {}", n * 37 % 100, n * 11 % 97);
    }
    text
}

fn sampling() -> Sampling {
    Sampling { max_tokens: ANSWER_TOKENS, prompt_lookup: false, ..Sampling::default() }
}

/// Runs a review. Returns the time to first token in ms, the number of prompt tokens, and how many of them were cached.
async fn review(engine: &LocalEngine, text: &str) -> anyhow::Result<(f64, u32, u32)> {
    let content =
        format!("{text}\n# Instructions\n\nReview this work and describe in one sentence what is wrong with it.\n");
    let usage = finish(engine, prompt(content, sampling(), OutputFormat::Text)).await?.usage;
    Ok((usage.first_token_ms as f64, usage.prompt_tokens, usage.cached_tokens))
}

/// Runs a speculative prefill to completion. Returns the time of the longest chunk and the total time, in ms.
async fn prefill(engine: &LocalEngine, text: &str) -> anyhow::Result<(f64, f64)> {
    let expected = ExpectedPrompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: text.to_owned() }],
        max_tokens: ANSWER_TOKENS,
        deterministic: false,
    };
    let prompt = Arc::new(engine.plan_prefill(&expected).await.context("no speculative prefill for the prompt")?);
    let (mut longest, mut total) = (0.0f64, 0.0);
    loop {
        let start = Instant::now();
        let progress = engine.prefill_chunk(prompt.clone()).await;
        let chunk = start.elapsed().as_secs_f64() * 1000.0;
        match progress {
            PrefillProgress::Busy => tokio::task::yield_now().await,
            PrefillProgress::More | PrefillProgress::Done => (longest, total) = (longest.max(chunk), total + chunk),
        }
        if progress == PrefillProgress::Done {
            return Ok((longest, total));
        }
    }
}

/// Runs a short call. Returns its time to first token, including the wait before admission, in ms.
async fn call(engine: &LocalEngine, round: usize, what: &str) -> anyhow::Result<f64> {
    let content = format!("{round} {what}: name a colour, a fruit and a river of Europe, and nothing else.");
    let began = Instant::now();
    let usage = finish(engine, prompt(content, sampling(), OutputFormat::Text)).await?.usage;
    // The times in `usage` start at admission, so the wait before it is added by measuring from `began`.
    Ok(began.elapsed().as_secs_f64() * 1000.0 - (usage.total_ms - usage.first_token_ms) as f64)
}

async fn bench(engine: Arc<LocalEngine>) -> anyhow::Result<()> {
    let (mut cold, mut warm, mut longest, mut all) = (vec![], vec![], vec![], vec![]);
    let (mut alone, mut concurrent) = (vec![], vec![]);
    let (mut tokens, mut cached) = (0, 0);
    for round in 0..ROUNDS {
        cold.push(review(&engine, &file_text(round, "cold")).await?.0);
        let known = file_text(round, "warm");
        let (chunk, total) = prefill(&engine, &known).await?;
        longest.push(chunk);
        all.push(total);
        let (first, prompt, found) = review(&engine, &known).await?;
        warm.push(first);
        (tokens, cached) = (prompt, found);

        alone.push(call(&engine, round, "alone").await?);
        let (other, known) = (engine.clone(), file_text(round, "concurrent"));
        let under_way = tokio::spawn(async move { prefill(&other, &known).await });
        // Waits for a third of the prefill's duration, so that the call arrives while it runs.
        tokio::time::sleep(std::time::Duration::from_secs_f64(total / 3000.0)).await;
        concurrent.push(call(&engine, round, "concurrent").await?);
        under_way.await??;
    }
    let (cold, warm) = (median_f64(&mut cold), median_f64(&mut warm));
    println!("review of {tokens} tokens, {cached} of them prefilled speculatively, medians of {ROUNDS}:");
    println!(
        "  time to first token: {cold:.0} ms without speculative prefill, {warm:.0} ms with it, ratio {:.1}",
        cold / warm.max(1.0)
    );
    let (all, longest) = (median_f64(&mut all), median_f64(&mut longest));
    println!("  speculative prefill: {all:.0} ms, longest chunk {longest:.0} ms");
    let (alone, concurrent) = (median_f64(&mut alone), median_f64(&mut concurrent));
    println!("short call, time to first token: {alone:.0} ms alone, {concurrent:.0} ms during a speculative prefill");
    Ok(())
}
