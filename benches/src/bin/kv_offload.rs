//! Effect of KV offload. The prompts of two agents alternate, and the device's KV pool has capacity for only one agent.
//! Measures the prompt tokens that are recomputed when evicted KV blocks are dropped, and when they are offloaded to
//! host memory, in each offload format.
//!
//! The device's pool has the minimum size, and the host KV cache fits both prompts. The baseline is a pool that fits
//! both, so that no token is computed twice.
//!
//!     cargo run --release -p cfq-benches --bin kv_offload -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_engine::{
    Engine, EngineLimits, GenerationEvent, HostKvCache, KvOffloadFormat, LoadError, LocalEngine, estimate_memory,
};
use cfq_memory::Bytes;
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};

const TURNS: usize = 6;
/// Number of lines in an agent's first prompt.
const FIRST_LINES: usize = 62;
/// Number of lines that each turn adds to an agent's prompt.
const LINES_PER_TURN: usize = 2;
const ANSWER_TOKENS: u32 = 48;
const HOST_CACHE_BYTES: u64 = 1 << 30;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let mut threads = "2".to_owned();
    while let Some(name) = args.next() {
        match name.as_str() {
            "--threads" => threads = args.next().context("--threads requires a value")?,
            other => bail!("unknown argument {other}"),
        }
    }
    if std::env::var_os("CFQ_BENCH_CHILD").is_none() {
        // The kernels read their number of threads only when the process starts, so it is set for a child process.
        let status = Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .env("CFQ_BENCH_CHILD", "1")
            .env("CANDLE_NUM_THREADS", &threads)
            .env("RAYON_NUM_THREADS", &threads)
            .status()?;
        std::process::exit(status.code().unwrap_or(1));
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&file))
}

/// Results of all turns of one configuration.
#[derive(Default)]
struct Run {
    texts: Vec<String>,
    /// Number of prompt tokens that were computed, because they were in no cache.
    computed: u32,
    /// Times to first token of the turns after the first, in ms.
    first_token_ms: Vec<f64>,
    /// Bytes of offloaded KV blocks in the host KV cache at the end.
    offloaded_bytes: u64,
}

impl Run {
    fn record(&mut self, turn: usize, done: Completion) {
        self.computed += done.usage.prompt_tokens - done.usage.cached_tokens;
        if turn > 0 {
            self.first_token_ms.push(done.usage.first_token_ms as f64);
        }
        self.texts.push(done.text);
    }
}

async fn bench(file: &Path) -> anyhow::Result<()> {
    println!("one model for both agents:");
    let baseline = one_model(file, 12 << 30, None).await?;
    let memory = min_memory(file)?;
    let plain = one_model(file, memory, None).await?;
    report("pool for both", &baseline, &baseline, None);
    report("plain eviction", &plain, &baseline, None);
    for how in [KvOffloadFormat::Exact, KvOffloadFormat::F16, KvOffloadFormat::Q8] {
        let run = one_model(file, memory, HostKvCache::new(HOST_CACHE_BYTES, how)).await?;
        report(&format!("offload as {how:?}").to_lowercase(), &run, &baseline, Some(&plain));
    }
    println!("two models, each loaded for its turn and unloaded after it:");
    let plain = two_models(file, memory, None).await?;
    report("plain eviction", &plain, &baseline, None);
    let run = two_models(file, memory, HostKvCache::new(HOST_CACHE_BYTES, KvOffloadFormat::Exact)).await?;
    report("offload as exact", &run, &baseline, Some(&plain));
    Ok(())
}

fn report(name: &str, run: &Run, baseline: &Run, plain: Option<&Run>) {
    let again = |run: &Run| f64::from(run.computed) - f64::from(baseline.computed);
    let share = plain.map_or_else(String::new, |plain| {
        format!(" ({:.1} % of those with plain eviction)", again(run) / again(plain) * 100.0)
    });
    let same = run.texts.iter().zip(&baseline.texts).filter(|(a, b)| a == b).count();
    let mut first_token_ms = run.first_token_ms.clone();
    first_token_ms.sort_by(f64::total_cmp);
    println!(
        "  {name}: {} prompt tokens computed, {} of them again{share}; first token after {:.0} ms; {} offloaded; \
         {same} of {} texts identical",
        run.computed,
        again(run),
        first_token_ms.get(first_token_ms.len() / 2).copied().unwrap_or(f64::NAN),
        Bytes(run.offloaded_bytes),
        run.texts.len()
    );
}

/// Total memory of the model with the smallest possible KV pool, in bytes.
fn min_memory(file: &Path) -> anyhow::Result<u64> {
    match estimate_memory(file, EngineLimits { memory_bytes: 0, max_sequences: 2 }, 0) {
        Err(LoadError::DoesNotFit { source, .. }) => Ok(source.estimate.total()),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("the memory estimate of the model is zero bytes"),
    }
}

fn load(file: &Path, model: &str, memory: u64, host_cache: Option<Arc<HostKvCache>>) -> anyhow::Result<LocalEngine> {
    let limits = EngineLimits { memory_bytes: memory, max_sequences: 2 };
    Ok(LocalEngine::builder(model.parse()?, file).limits(limits).kv_cache(host_cache).load()?)
}

async fn one_model(file: &Path, memory: u64, host_cache: Option<Arc<HostKvCache>>) -> anyhow::Result<Run> {
    let engine = load(file, "path:both", memory, host_cache.clone())?;
    let mut run = Run::default();
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            run.record(turn, answer(&engine, agent, turn).await?);
        }
    }
    run.offloaded_bytes = host_cache.map_or(0, |host_cache| host_cache.bytes());
    Ok(run)
}

async fn two_models(file: &Path, memory: u64, host_cache: Option<Arc<HostKvCache>>) -> anyhow::Result<Run> {
    let mut run = Run::default();
    let mut unloading = 0.0;
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            let engine = load(file, &format!("path:{agent}"), memory, host_cache.clone())?;
            run.record(turn, answer(&engine, agent, turn).await?);
            let began = Instant::now();
            engine.unload();
            unloading += began.elapsed().as_secs_f64();
        }
    }
    println!("  {:.0} ms per unload", unloading * 1000.0 / (2 * TURNS) as f64);
    run.offloaded_bytes = host_cache.map_or(0, |host_cache| host_cache.bytes());
    Ok(run)
}

async fn answer(engine: &LocalEngine, agent: &str, turn: usize) -> anyhow::Result<Completion> {
    let mut content = format!("You are {agent}. What {agent} knows:\n");
    for n in 0..FIRST_LINES + turn * LINES_PER_TURN {
        let _ = writeln!(content, "- {agent} counted {} things of kind {n} in room {}", n * 37 % 1000, n * 11 % 97);
    }
    let sampling = Sampling { max_tokens: ANSWER_TOKENS, ..Sampling::default() };
    let messages = vec![ChatMessage { role: ChatRole::User, content }];
    let mut generation =
        engine.admit(Prompt { messages, sampling, format: OutputFormat::Text, ..Prompt::default() }).await?.start();
    loop {
        if let GenerationEvent::Done(how) = generation.next().await {
            return Ok(how?);
        }
    }
}
