//! The memory ledger's prediction beside the allocator's own count, over ten shapes of random weights.
//!
//!     cargo run -p cfq-benches --bin ledger
//!
//! Each shape is loaded by a process of its own, warmed up, and runs one sequence until the KV pool is full. What is then
//! held (weights, tables, the pool) was predicted from the file's header; the error is the share of the
//! count by which the prediction is off. The peaks, while loading and while computing, must stay below what was predicted
//! for them: passes are smaller than the largest there may be. Ends with 1 where either does not hold.
#![allow(clippy::print_stdout, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail, ensure};
use candle_core::quantized::GgmlDType as F;
use cfq_benches::random_model::RandomModel;
use cfq_inference_node::engine::candle::{CandleEngine, Limits};
use cfq_inference_node::engine::{Engine, Event};
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt, Sampling};

struct Counting;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is handed to the system's allocator unchanged; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() as u64;
        PEAK.fetch_max(LIVE.fetch_add(size, Ordering::Relaxed) + size, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const CONTEXT: usize = 512;

const fn shape(hidden: usize, feed_forward: usize, layers: usize, heads: [usize; 2], format: F) -> RandomModel {
    let [heads, kv_heads] = heads;
    RandomModel {
        hidden,
        feed_forward,
        layers,
        heads,
        kv_heads,
        context: CONTEXT,
        format,
        sensitive: format,
        embedding: format,
        output: None,
        drawn: 256,
    }
}

const SHAPES: [RandomModel; 10] = [
    shape(512, 2048, 8, [8, 2], F::Q4K),
    shape(1024, 2816, 12, [16, 4], F::Q4K),
    RandomModel { sensitive: F::Q6K, output: Some(F::Q6K), ..shape(1024, 4096, 8, [16, 4], F::Q4K) },
    RandomModel { output: Some(F::Q6K), ..shape(768, 2048, 8, [12, 12], F::Q6K) },
    shape(1024, 2816, 8, [16, 8], F::Q5K),
    shape(576, 1536, 12, [9, 3], F::Q8_0),
    RandomModel { output: Some(F::Q8_0), ..shape(768, 2048, 8, [12, 4], F::Q3K) },
    shape(640, 1728, 8, [10, 5], F::Q4_1),
    shape(512, 1408, 6, [8, 8], F::F16),
    shape(384, 1024, 6, [6, 2], F::F32),
];

/// Bytes: what was predicted and what was counted.
struct Figures {
    held: [u64; 2],
    loading: [u64; 2],
    working: [u64; 2],
}

impl Figures {
    fn error(&self) -> f64 {
        let [predicted, counted] = self.held;
        (predicted as f64 - counted as f64) / counted as f64
    }
}

fn main() -> anyhow::Result<()> {
    if let Some(file) = std::env::args().nth(1) {
        return tokio::runtime::Builder::new_current_thread().build()?.block_on(child(Path::new(&file)));
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.gguf");
    let mut errors = Vec::new();
    let mut low = false;
    println!("| shape | held: predicted, counted (MB) | error | peak of loading | peak of work |");
    println!("|---|---|---|---|---|");
    for model in SHAPES {
        model.write(&file)?;
        let figures = measure(&file).with_context(|| format!("{model:?}"))?;
        let error = figures.error();
        let mb = |[predicted, counted]: [u64; 2]| format!("{:.1}, {:.1}", predicted as f64 / 1e6, counted as f64 / 1e6);
        let more = if model.sensitive == model.format { String::new() } else { format!(" and {:?}", model.sensitive) };
        let output = model.output.map_or("tied".to_owned(), |f| format!("output {f:?}"));
        println!(
            "| {:?}{more} {} x {}, {} layers, {}/{} heads, {output} | {} | {:+.2} % | {} | {} |",
            model.format,
            model.hidden,
            model.feed_forward,
            model.layers,
            model.heads,
            model.kv_heads,
            mb(figures.held),
            error * 100.0,
            mb(figures.loading),
            mb(figures.working),
        );
        low |= figures.loading[0] < figures.loading[1] || figures.working[0] < figures.working[1];
        errors.push(error.abs());
    }
    errors.sort_by(f64::total_cmp);
    // Of ten, the largest.
    let p95 = errors[(errors.len() * 95).div_ceil(100) - 1];
    println!("\n95th percentile of the error: {:.2} %", p95 * 100.0);
    ensure!(p95 <= 0.05, "the ledger is off by more than 5 %");
    ensure!(!low, "a peak was higher than predicted");
    Ok(())
}

fn measure(file: &Path) -> anyhow::Result<Figures> {
    let output = Command::new(std::env::current_exe()?).arg(file).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u64> = said.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [a, b, c, d, e, f] = numbers[..] else {
        bail!("{said}{}", String::from_utf8_lossy(&output.stderr));
    };
    Ok(Figures { held: [a, b], loading: [c, d], working: [e, f] })
}

/// Loads the file and fills its pool; prints predicted and counted bytes.
async fn child(file: &Path) -> anyhow::Result<()> {
    let before = LIVE.load(Ordering::Relaxed);
    let counted = |what: &AtomicU64| what.load(Ordering::Relaxed).saturating_sub(before);
    PEAK.store(before, Ordering::Relaxed);
    let limits = Limits { memory: 8 << 30, max_sequences: 1 };
    let engine = CandleEngine::load("path:random".parse()?, file, limits, Arc::default())?;
    let loading = counted(&PEAK);
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let need = *engine.need();
    // A word is a token or two; the rest is decoded.
    let content = "All work and no play makes Jack a dull boy. ".repeat(CONTEXT / 12 - 2);
    let sampling = Sampling { max_tokens: CONTEXT as u32, temperature: 1.0, seed: 1, ..Sampling::default() };
    let prompt =
        Prompt { messages: vec![ChatMessage { role: ChatRole::User, content }], sampling, format: OutputFormat::Text };
    let mut generation = engine.admit(prompt).await?.start();
    let usage = loop {
        if let Event::Done(how) = generation.next().await {
            break how?.usage;
        }
    };
    drop(generation);
    let tokens = usage.prompt_tokens + usage.output_tokens;
    ensure!(u64::from(tokens) == need.kv_tokens, "{usage:?} did not fill {} tokens", need.kv_tokens);
    let most = need.total() - need.reserve;
    println!("{} {} {most} {loading} {most} {}", need.held(), counted(&LIVE), counted(&PEAK));
    Ok(())
}
