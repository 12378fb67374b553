//! Load time of a model from the weight cache, compared with its load from disk.
//!
//!     cargo run --release -p cfq-benches --bin load_time -- FILE.gguf
//!     ... -- random-q4km:/tmp/random.gguf    first creates a file of 726 million random weights in Q4_K and Q6_K
//!
//! Each round loads the model from its file (which is in the page cache by then), unloads it into the weight cache, and
//! loads it from there. A load ends when the engine accepts sequences; the load from disk includes the calibration.
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_benches::median;
use cfq_benches::random_model::file_or_random_model;
use cfq_engine::{EngineLimits, LocalEngine};
use cfq_memory::Bytes;

const ROUNDS: usize = 7;

fn main() -> anyhow::Result<()> {
    let file = file_or_random_model(std::env::args().nth(1))?;
    let limits = EngineLimits { memory_bytes: 12 << 30, max_sequences: 4 };
    let (mut disk, mut unload, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let engine = LocalEngine::builder("path:bench".parse()?, &file).limits(limits).load()?;
        disk.push(began.elapsed());
        let began = Instant::now();
        let weights = engine.into_cached_weights().context("the engine returned no weights to cache")?;
        unload.push(began.elapsed());
        bytes = weights.bytes();
        let began = Instant::now();
        let engine = weights.start(limits, Arc::default())?;
        memory.push(began.elapsed());
        drop(engine.into_cached_weights().context("the engine returned no weights to cache")?);
    }
    let seconds = |times: &mut Vec<Duration>| median(times).as_secs_f64();
    let (disk, unload, memory) = (seconds(&mut disk), seconds(&mut unload), seconds(&mut memory));
    println!("{}: weights {}, medians of {ROUNDS}", file.display(), Bytes(bytes));
    println!("load from disk          {:8.1} ms", disk * 1e3);
    println!("unload into the cache   {:8.1} ms", unload * 1e3);
    println!("load from weight cache  {:8.1} ms, {:.0} times as fast", memory * 1e3, disk / memory.max(1e-9));
    Ok(())
}
