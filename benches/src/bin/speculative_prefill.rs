//! Time to first token of a critic, with and without speculative prefill of its prompt, and of a short call that
//! arrives during a speculative prefill.
//!
//! The reviews are of files of about 1,500 tokens, of which all but the instructions at the end are known in advance.
//! Reviews with and without speculative prefill, and calls alone and during one, alternate in the same run.
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
/// Functions in a reviewed file.
const FUNCTIONS: usize = 70;
const ANSWER_TOKENS: u32 = 8;

fn main() -> anyhow::Result<()> {
    let file = file_from_arguments()?;
    let engine = load(&file, 2)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(bench(Arc::new(engine)))
}

/// A file to review. All are different, so that none is in the prefix cache.
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

/// Time to first token, in ms; tokens of the prompt; cached tokens among them.
async fn review(engine: &LocalEngine, text: &str) -> anyhow::Result<(f64, u32, u32)> {
    let content =
        format!("{text}\n# Instructions\n\nReview this work and describe in one sentence what is wrong with it.\n");
    let usage = finish(engine, prompt(content, sampling(), OutputFormat::Text)).await?.usage;
    Ok((usage.first_token_ms as f64, usage.prompt_tokens, usage.cached_tokens))
}

/// Runs a speculative prefill to its end. Returns the times of the longest chunk and of all, in ms.
async fn prefill(engine: &LocalEngine, text: &str) -> anyhow::Result<(f64, f64)> {
    let expected = ExpectedPrompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: text.to_owned() }],
        max_tokens: ANSWER_TOKENS,
        deterministic: false,
    };
    let prompt = Arc::new(engine.plan_prefill(&expected).await.context("the prompt does not fit")?);
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

/// Time from a short call to its first token, in ms.
async fn call(engine: &LocalEngine, round: usize, what: &str) -> anyhow::Result<f64> {
    let content = format!("{round} {what}: name a colour, a fruit and a river of Europe, and nothing else.");
    let began = Instant::now();
    let usage = finish(engine, prompt(content, sampling(), OutputFormat::Text)).await?.usage;
    // The usage's times start at admission; the wait before it counts here too.
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
        // In the middle of the prefill, after a third of its time.
        tokio::time::sleep(std::time::Duration::from_secs_f64(total / 3000.0)).await;
        concurrent.push(call(&engine, round, "concurrent").await?);
        under_way.await??;
    }
    let (cold, warm) = (median_f64(&mut cold), median_f64(&mut warm));
    println!("review of {tokens} tokens, {cached} of them prefilled speculatively, medians of {ROUNDS}:");
    println!(
        "  time to first token: {cold:.0} ms without, {warm:.0} ms with prefill, ratio {:.1}",
        cold / warm.max(1.0)
    );
    let (all, longest) = (median_f64(&mut all), median_f64(&mut longest));
    println!("  speculative prefill: {all:.0} ms, longest chunk {longest:.0} ms");
    let (alone, concurrent) = (median_f64(&mut alone), median_f64(&mut concurrent));
    println!("short call, time to first token: {alone:.0} ms alone, {concurrent:.0} ms during a speculative prefill");
    Ok(())
}
