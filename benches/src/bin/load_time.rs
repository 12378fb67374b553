//! A switch back to a model whose weights are parked in memory, beside its load from the disk.
//!
//!     cargo run --release -p cfq-benches --bin load_time -- FILE.gguf
//!     ... -- random-q4km:/tmp/random.gguf    makes a file of 726 million random weights in Q4_K and Q6_K first
//!
//! In turns within one run: loaded from the file (which the system has in its cache by then), let go with its weights kept,
//! loaded from those. Each time until the engine takes sequences; the load from the disk contains its warming up.
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_benches::median;
use cfq_benches::random_model::file_or_random;
use cfq_inference_node::engine::candle::{Bytes, CandleEngine, Limits};

const ROUNDS: usize = 7;

fn main() -> anyhow::Result<()> {
    let file = file_or_random(std::env::args().nth(1))?;
    let limits = Limits { memory: 12 << 30, max_sequences: 4 };
    let (mut disk, mut ending, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let engine = CandleEngine::load("path:bench".parse()?, &file, limits, Arc::default())?;
        disk.push(began.elapsed());
        let began = Instant::now();
        let parked = engine.park().context("the engine broke")?;
        ending.push(began.elapsed());
        bytes = parked.bytes();
        let began = Instant::now();
        let engine = parked.load(limits, Arc::default())?;
        memory.push(began.elapsed());
        drop(engine.park().context("the engine broke")?);
    }
    let seconds = |times: &mut Vec<Duration>| median(times).as_secs_f64();
    let (disk, ending, memory) = (seconds(&mut disk), seconds(&mut ending), seconds(&mut memory));
    println!("{}: {} of weights, medians of {ROUNDS}", file.display(), Bytes(bytes));
    println!("from the disk    {:8.1} ms", disk * 1e3);
    println!("let go           {:8.1} ms", ending * 1e3);
    println!("from memory      {:8.1} ms, {:.0} times as fast", memory * 1e3, disk / memory.max(1e-9));
    Ok(())
}
