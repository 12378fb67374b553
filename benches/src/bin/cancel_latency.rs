//! Cancel latency: time from a cancel to the engine's end event, during prefill and during decode, with and without a
//! client that reads the stream of events, compared with the time of a forward pass in the same run.
//!
//!     cargo run --release -p cfq-benches --bin cancel_latency -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use cfq_benches::engine::{file_from_arguments, load, median_f64, prompt};
use cfq_engine::{Engine, Generation, GenerationError, GenerationEvent, LocalEngine};
use cfq_proto::job::{OutputFormat, Sampling};

const ROUNDS: usize = 15;
/// Maximum median of the cancel latency, in forward passes: one pass, and a margin for measurement noise.
const MAX_PASSES: f64 = 1.25;

fn main() -> anyhow::Result<()> {
    let engine = load(&file_from_arguments()?, 2)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine))
}

async fn bench(engine: &LocalEngine) -> anyhow::Result<()> {
    for decoding in [false, true] {
        for reading in [false, true] {
            let (mut waits, mut passes) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                let (wait, pass) = cancel(engine, round, decoding, reading).await?;
                waits.push(wait.as_secs_f64() * 1e3);
                passes.push(pass.as_secs_f64() * 1e3);
            }
            let longest = waits.iter().copied().fold(0.0, f64::max);
            let (wait, pass) = (median_f64(&mut waits), median_f64(&mut passes));
            println!(
                "{}, {}: cancelled after {wait:.1} ms (max {longest:.1}), that is {:.2} passes of {pass:.1} ms",
                if decoding { "decode" } else { "prefill" },
                if reading { "streaming" } else { "not streaming" },
                wait / pass
            );
            ensure!(wait <= pass * MAX_PASSES, "a cancel took longer than {MAX_PASSES} passes");
        }
    }
    Ok(())
}

/// Cancels a generation. Returns the time from the cancel to the end event, and the time of the last forward pass
/// before the cancel.
async fn cancel(
    engine: &LocalEngine,
    round: usize,
    decoding: bool,
    reading: bool,
) -> anyhow::Result<(Duration, Duration)> {
    let sampling = Sampling { max_tokens: 4000, temperature: 1.0, seed: round as u64, ..Sampling::default() };
    // The prompt begins differently in each round, so that nothing of it is in the prefix cache.
    let text = if decoding {
        "Tell me a long story about lighthouses."
    } else {
        &"All work and no play makes Jack a dull boy. ".repeat(350)
    };
    let content = format!("Round {round} {reading}. {text}");
    let mut generation = engine.admit(prompt(content, sampling, OutputFormat::Text)).await?.start();
    let mut pass = Duration::ZERO;
    let steps = if decoding { 12 } else { 2 };
    for _ in 0..steps {
        let began = Instant::now();
        step(&mut generation, decoding).await?;
        pass = began.elapsed();
    }
    if !reading {
        // No events are read here. The wait of one and a half passes ends in the middle of a forward pass, so that the
        // cancel is sent there.
        tokio::time::sleep(pass.mul_f64(1.5)).await;
    }
    let began = Instant::now();
    generation.cancel();
    loop {
        match generation.next().await {
            GenerationEvent::Step { .. } => {}
            GenerationEvent::Done(Err(GenerationError::Cancelled)) => return Ok((began.elapsed(), pass)),
            GenerationEvent::Done(how) => bail!("the sequence ended before the cancel: {how:?}"),
        }
    }
}

/// Waits for the next step event, or, while decoding, for the next one with tokens.
async fn step(generation: &mut Generation, decoding: bool) -> anyhow::Result<()> {
    loop {
        match generation.next().await {
            GenerationEvent::Step { tokens, .. } if decoding && tokens.is_empty() => {}
            GenerationEvent::Step { tokens, .. } => {
                ensure!(decoding || tokens.is_empty(), "the prefill ended before the cancel");
                return Ok(());
            }
            GenerationEvent::Done(how) => bail!("the sequence ended too early: {how:?}"),
        }
    }
}
