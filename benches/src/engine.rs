//! What the benchmarks of the engine share: threads set before anything runs, the engine over one file, a prompt to its end.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};
use cfq_inference_node::engine::candle::{CandleEngine, Limits};
use cfq_inference_node::engine::{Engine, Event};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};

/// `FILE [--threads N]`; begins again with those threads, see [`with_threads`].
pub fn file_of_arguments() -> anyhow::Result<PathBuf> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let mut threads = "2".to_owned();
    while let Some(name) = args.next() {
        match (name.as_str(), args.next()) {
            ("--threads", Some(value)) => threads = value,
            _ => bail!("unknown argument, or without a value: {name}"),
        }
    }
    with_threads(&threads)?;
    Ok(file)
}

/// Starts this program again with so many threads for its kernels, which read the number once, before anything else runs,
/// and ends with its status. Returns in the child.
pub fn with_threads(threads: &str) -> anyhow::Result<()> {
    if std::env::var_os("CFQ_BENCH_CHILD").is_some() {
        return Ok(());
    }
    let status = Command::new(std::env::current_exe()?)
        .args(std::env::args().skip(1))
        .env("CFQ_BENCH_CHILD", "1")
        .env("CANDLE_NUM_THREADS", threads)
        .env("RAYON_NUM_THREADS", threads)
        .status()?;
    std::process::exit(status.code().unwrap_or(1));
}

pub fn load(file: &Path, max_sequences: u32) -> anyhow::Result<CandleEngine> {
    let limits = Limits { memory: 12 << 30, max_sequences };
    Ok(CandleEngine::load("path:bench".parse()?, file, limits, Arc::default())?)
}

pub fn prompt(content: String, sampling: Sampling, format: OutputFormat) -> Prompt {
    Prompt { messages: vec![ChatMessage { role: ChatRole::User, content }], sampling, format }
}

pub async fn finish(engine: &CandleEngine, prompt: Prompt) -> anyhow::Result<Completion> {
    let mut generation = engine.admit(prompt).await?.start();
    loop {
        if let Event::Done(how) = generation.next().await {
            return Ok(how?);
        }
    }
}

/// The middle of some figures.
pub fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
