//! How soon a cancelled sequence stops computing: from the cancel to the engine's word that it ended, while it prefills and while
//! it decodes, with somebody who reads along and with nobody, beside what a pass takes in the same run.
//!
//!     cargo run --release -p cfq-benches --bin cancel_latency -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use cfq_benches::engine::{file_of_arguments, load, middle, prompt};
use cfq_inference_node::engine::candle::CandleEngine;
use cfq_inference_node::engine::{Ended, Engine, Event, Generation};
use cfq_proto::job::{OutputFormat, Sampling};

const ROUNDS: usize = 15;
/// Passes, in the middle of the rounds: one, and what two measurements of it may differ by.
const MOST: f64 = 1.25;

fn main() -> anyhow::Result<()> {
    let engine = load(&file_of_arguments()?, 2)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine))
}

async fn bench(engine: &CandleEngine) -> anyhow::Result<()> {
    for decoding in [false, true] {
        for reading in [false, true] {
            let (mut waits, mut passes) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                let (wait, pass) = cancel(engine, round, decoding, reading).await?;
                waits.push(wait.as_secs_f64() * 1e3);
                passes.push(pass.as_secs_f64() * 1e3);
            }
            let longest = waits.iter().copied().fold(0.0, f64::max);
            let (wait, pass) = (middle(&mut waits), middle(&mut passes));
            println!(
                "{}, {}: {wait:.1} ms (at most {longest:.1}) after the cancel; a pass takes {pass:.1} ms, ratio {:.2}",
                if decoding { "while decoding" } else { "while prefilling" },
                if reading { "streaming" } else { "not streaming" },
                wait / pass
            );
            ensure!(wait <= pass * MOST, "it should end within one pass");
        }
    }
    Ok(())
}

/// Time from the cancel to the end, and of one pass before it.
async fn cancel(
    engine: &CandleEngine,
    round: usize,
    decoding: bool,
    reading: bool,
) -> anyhow::Result<(Duration, Duration)> {
    let sampling = Sampling { max_tokens: 4000, temperature: 1.0, seed: round as u64, ..Sampling::default() };
    // Another beginning each time, or it would be found.
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
        // Nobody takes what is written meanwhile; in the middle of a pass.
        tokio::time::sleep(pass.mul_f64(1.5)).await;
    }
    let began = Instant::now();
    generation.cancel();
    loop {
        match generation.next().await {
            Event::Step { .. } => {}
            Event::Done(Err(Ended::Cancelled)) => return Ok((began.elapsed(), pass)),
            Event::Done(how) => bail!("it ended before it was cancelled: {how:?}"),
        }
    }
}

async fn step(generation: &mut Generation, decoding: bool) -> anyhow::Result<()> {
    loop {
        match generation.next().await {
            Event::Step { tokens, .. } if decoding && tokens.is_empty() => {}
            Event::Step { tokens, .. } => {
                ensure!(decoding || tokens.is_empty(), "the prompt was prefilled before it could be cancelled");
                return Ok(());
            }
            Event::Done(how) => bail!("it ended too early: {how:?}"),
        }
    }
}
