//! What a critic waits for its first token, cold and where its prompt was computed while the creator wrote; and what a call waits
//! that comes in the middle of such a warm-up.
//!
//! Reviews of files of some 1,500 tokens, of which all but the instructions at the end is known ahead. Both ways, and the calls
//! alone and beside a warm-up, take turns in the same run.
//!
//!     cargo run -p cfq-benches --bin critic_warm_up -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use cfq_benches::engine::{file_of_arguments, finish, load, middle, prompt};
use cfq_inference_node::engine::candle::CandleEngine;
use cfq_inference_node::engine::{Engine, Warmed};
use cfq_proto::ids::TaskId;
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Sampling};
use cfq_proto::messages::WarmUp;
use cfq_proto::task::Agent;

const ROUNDS: usize = 5;
const LINES: usize = 70;
const ANSWER: u32 = 8;

fn main() -> anyhow::Result<()> {
    let file = file_of_arguments()?;
    let engine = load(&file, 2)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(bench(Arc::new(engine)))
}

/// No two alike, so that nothing is cached of another.
fn work(round: usize, what: &str) -> String {
    let mut text = format!("# Round {round}, {what}\n\n");
    for n in 0..LINES {
        let _ = writeln!(text, "def f{n}(x):\n    return x * {} + {}", n * 37 % 100, n * 11 % 97);
    }
    text
}

fn sampling() -> Sampling {
    Sampling { max_tokens: ANSWER, prompt_lookup: false, ..Sampling::default() }
}

/// Milliseconds to the first token, tokens of the prompt and of those the cached ones.
async fn review(engine: &CandleEngine, work: &str) -> anyhow::Result<(f64, u32, u32)> {
    let asked = format!("{work}\n# What to do\n\nReview this work and say in one sentence what is wrong with it.\n");
    let usage = finish(engine, prompt(asked, sampling(), OutputFormat::Text)).await?.usage;
    Ok((usage.first_token_ms as f64, usage.prompt_tokens, usage.cached_tokens))
}

/// Returns milliseconds of the longest piece and of all.
async fn warm_up(engine: &CandleEngine, work: &str) -> anyhow::Result<(f64, f64)> {
    let expected = WarmUp {
        task: TaskId::fresh(),
        role: Agent::Beta,
        model: "path:bench".parse()?,
        messages: vec![ChatMessage { role: ChatRole::User, content: work.to_owned() }],
        max_tokens: ANSWER,
        deterministic: false,
    };
    let ahead = Arc::new(engine.foresee(&expected).await.context("the work does not fit")?);
    let (mut longest, mut all) = (0.0f64, 0.0);
    loop {
        let began = Instant::now();
        let warmed = engine.warm(ahead.clone()).await;
        let took = began.elapsed().as_secs_f64() * 1000.0;
        match warmed {
            Warmed::Busy => tokio::task::yield_now().await,
            Warmed::Further | Warmed::Enough => (longest, all) = (longest.max(took), all + took),
        }
        if warmed == Warmed::Enough {
            return Ok((longest, all));
        }
    }
}

/// Milliseconds to the first token of a short call, from when it was made.
async fn call(engine: &CandleEngine, round: usize, what: &str) -> anyhow::Result<f64> {
    let asked = format!("{round} {what}: name a colour, a fruit and a river of Europe, and nothing else.");
    let began = Instant::now();
    let usage = finish(engine, prompt(asked, sampling(), OutputFormat::Text)).await?.usage;
    // Its own figures begin when it is taken up; what it waits before that counts here.
    Ok(began.elapsed().as_secs_f64() * 1000.0 - (usage.total_ms - usage.first_token_ms) as f64)
}

async fn bench(engine: Arc<CandleEngine>) -> anyhow::Result<()> {
    let (mut cold, mut warm, mut longest, mut all) = (vec![], vec![], vec![], vec![]);
    let (mut alone, mut beside) = (vec![], vec![]);
    let (mut tokens, mut cached) = (0, 0);
    for round in 0..ROUNDS {
        cold.push(review(&engine, &work(round, "cold")).await?.0);
        let known = work(round, "warm");
        let (piece, pieces) = warm_up(&engine, &known).await?;
        longest.push(piece);
        all.push(pieces);
        let (first, prompt, found) = review(&engine, &known).await?;
        warm.push(first);
        (tokens, cached) = (prompt, found);

        alone.push(call(&engine, round, "alone").await?);
        let (other, known) = (engine.clone(), work(round, "aside"));
        let under_way = tokio::spawn(async move { warm_up(&other, &known).await });
        // In the middle of it: some of its pieces are there.
        tokio::time::sleep(std::time::Duration::from_secs_f64(pieces / 3000.0)).await;
        beside.push(call(&engine, round, "beside").await?);
        under_way.await??;
    }
    let (cold, warm) = (middle(&mut cold), middle(&mut warm));
    println!("a review of {tokens} tokens, {cached} of them computed ahead, medians of {ROUNDS}:");
    println!("  first token after {cold:.0} ms cold, {warm:.0} ms warm: {:.1} times as soon", cold / warm.max(1.0));
    let pieces = (middle(&mut all), middle(&mut longest));
    println!("  computed ahead in {:.0} ms, the longest piece {:.0} ms", pieces.0, pieces.1);
    let (alone, beside) = (middle(&mut alone), middle(&mut beside));
    println!("a short call: first token after {alone:.0} ms alone, {beside:.0} ms in the middle of a warm-up");
    Ok(())
}
