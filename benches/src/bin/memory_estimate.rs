//! Measures the accuracy of the engine's memory estimate, on ten model shapes with random weights.
//!
//!     cargo run -p cfq-benches --bin memory_estimate
//!
//! Each shape runs in a separate process, which loads the model, calibrates the engine and runs one sequence until the
//! KV pool is full. There are two checks. Memory in use at the end (weights, tables, KV pool): the estimate from the
//! file's header is compared with the bytes that a counting allocator measures; the error is relative to the measured
//! bytes. Peaks: the measured peaks during the load and during computation must stay below the estimated ones, which
//! assume the largest possible forward pass. Exits with 1 if the 95th percentile of the error exceeds 5 percent or a
//! measured peak exceeds its estimate.
#![allow(clippy::print_stdout, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail, ensure};
use candle_core::quantized::GgmlDType as F;
use cfq_benches::random_model::RandomModel;
use cfq_engine::{Engine, EngineLimits, GenerationEvent, LocalEngine};
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt, Sampling};

struct CountingAllocator;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded to the system allocator unchanged; the counters do not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() as u64;
        PEAK.fetch_max(LIVE.fetch_add(size, Ordering::Relaxed) + size, Ordering::Relaxed);
        // SAFETY: the caller upholds the system allocator's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING_ALLOCATOR: CountingAllocator = CountingAllocator;

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
        sensitive_format: format,
        embedding: format,
        output: None,
        random_rows: 256,
    }
}

const SHAPES: [RandomModel; 10] = [
    shape(512, 2048, 8, [8, 2], F::Q4K),
    shape(1024, 2816, 12, [16, 4], F::Q4K),
    RandomModel { sensitive_format: F::Q6K, output: Some(F::Q6K), ..shape(1024, 4096, 8, [16, 4], F::Q4K) },
    RandomModel { output: Some(F::Q6K), ..shape(768, 2048, 8, [12, 12], F::Q6K) },
    shape(1024, 2816, 8, [16, 8], F::Q5K),
    shape(576, 1536, 12, [9, 3], F::Q8_0),
    RandomModel { output: Some(F::Q8_0), ..shape(768, 2048, 8, [12, 4], F::Q3K) },
    shape(640, 1728, 8, [10, 5], F::Q4_1),
    shape(512, 1408, 6, [8, 8], F::F16),
    shape(384, 1024, 6, [6, 2], F::F32),
];

/// Memory of one shape; each pair is the estimated and the measured number of bytes.
struct Measurement {
    /// Bytes in use after the sequence has ended.
    in_use: [u64; 2],
    load_peak: [u64; 2],
    compute_peak: [u64; 2],
}

impl Measurement {
    fn error(&self) -> f64 {
        let [estimated, counted] = self.in_use;
        (estimated as f64 - counted as f64) / counted as f64
    }
}

fn main() -> anyhow::Result<()> {
    if let Some(file) = std::env::args().nth(1) {
        return tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(child(Path::new(&file)));
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.gguf");
    let mut errors = Vec::new();
    let mut exceeded = false;
    println!("| shape | in use: estimated, counted (MB) | error | load peak | compute peak |");
    println!("|---|---|---|---|---|");
    for model in SHAPES {
        model.write(&file)?;
        let measured = measure(&file).with_context(|| format!("{model:?}"))?;
        let error = measured.error();
        let mb = |[estimated, counted]: [u64; 2]| format!("{:.1}, {:.1}", estimated as f64 / 1e6, counted as f64 / 1e6);
        let more = if model.sensitive_format == model.format {
            String::new()
        } else {
            format!(" and {:?}", model.sensitive_format)
        };
        let output = model.output.map_or("tied".to_owned(), |f| format!("output {f:?}"));
        println!(
            "| {:?}{more} {} x {}, {} layers, {}/{} heads, {output} | {} | {:+.2} % | {} | {} |",
            model.format,
            model.hidden,
            model.feed_forward,
            model.layers,
            model.heads,
            model.kv_heads,
            mb(measured.in_use),
            error * 100.0,
            mb(measured.load_peak),
            mb(measured.compute_peak),
        );
        let below = |[estimated, counted]: [u64; 2]| estimated < counted;
        exceeded |= below(measured.load_peak) || below(measured.compute_peak);
        errors.push(error.abs());
    }
    errors.sort_by(f64::total_cmp);
    // With ten shapes, the 95th percentile is the largest error.
    let p95 = errors[(errors.len() * 95).div_ceil(100) - 1];
    println!("\n95th percentile of the error: {:.2} %", p95 * 100.0);
    ensure!(p95 <= 0.05, "the memory estimate is off by more than 5 %");
    ensure!(!exceeded, "a peak exceeded its estimate");
    Ok(())
}

/// Runs the measurement of one model file in a child process.
fn measure(file: &Path) -> anyhow::Result<Measurement> {
    let output = Command::new(std::env::current_exe()?).arg(file).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u64> = stdout.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [a, b, c, d, e, f] = numbers[..] else {
        bail!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
    };
    Ok(Measurement { in_use: [a, b], load_peak: [c, d], compute_peak: [e, f] })
}

/// Loads the model file and fills its KV pool; prints the estimated and the measured bytes.
async fn child(file: &Path) -> anyhow::Result<()> {
    let before = LIVE.load(Ordering::Relaxed);
    let counted = |what: &AtomicU64| what.load(Ordering::Relaxed).saturating_sub(before);
    PEAK.store(before, Ordering::Relaxed);
    let limits = EngineLimits { memory_bytes: 8 << 30, max_sequences: 1 };
    let engine = LocalEngine::builder("path:random".parse()?, file).limits(limits).load()?;
    let loading = counted(&PEAK);
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let estimate = *engine.estimate();
    // The prompt fills only a part of the KV pool, since a word may be one or two tokens; decoding fills the rest.
    let content = "All work and no play makes Jack a dull boy. ".repeat(CONTEXT / 12 - 2);
    let sampling = Sampling { max_tokens: CONTEXT as u32, temperature: 1.0, seed: 1, ..Sampling::default() };
    let prompt = Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content }],
        sampling,
        format: OutputFormat::Text,
        ..Prompt::default()
    };
    let mut generation = engine.admit(prompt).await?.start();
    let usage = loop {
        if let GenerationEvent::Done(how) = generation.next().await {
            break how?.usage;
        }
    };
    drop(generation);
    let tokens = usage.prompt_tokens + usage.output_tokens;
    ensure!(u64::from(tokens) == estimate.kv_tokens, "{usage:?} did not fill {} tokens", estimate.kv_tokens);
    let peak = estimate.total() - estimate.reserve;
    println!("{} {} {peak} {loading} {peak} {}", estimate.resident(), counted(&LIVE), counted(&PEAK));
    Ok(())
}
