//! Functions shared by the engine's benchmarks: they set the number of threads, load a model file, and run a prompt to
//! completion.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use cfq_engine::{Engine, EngineLimits, GenerationEvent, LocalEngine};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};

/// Parses `FILE [--threads N]` and restarts the program with that number of threads, see [`restart_with_threads`].
pub fn file_from_arguments() -> anyhow::Result<PathBuf> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let mut threads = "2".to_owned();
    while let Some(name) = args.next() {
        match (name.as_str(), args.next()) {
            ("--threads", Some(value)) => threads = value,
            _ => bail!("unknown argument or missing value: {name}"),
        }
    }
    restart_with_threads(&threads)?;
    Ok(file)
}

/// Runs this program again as a child process whose kernels use this number of threads, and exits with the child's
/// status. Returns only in the child. The restart is needed because the kernels read the number only once, at the
/// start.
pub fn restart_with_threads(threads: &str) -> anyhow::Result<()> {
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

/// Loads the model file with a memory limit of 12 GiB.
pub fn load(file: &Path, max_sequences: u32) -> anyhow::Result<LocalEngine> {
    let limits = EngineLimits { memory_bytes: 12 << 30, max_sequences };
    Ok(LocalEngine::builder("path:bench".parse()?, file).limits(limits).load()?)
}

/// Creates a prompt of one user message.
pub fn prompt(content: String, sampling: Sampling, format: OutputFormat) -> Prompt {
    Prompt { messages: vec![ChatMessage { role: ChatRole::User, content }], sampling, format, ..Prompt::default() }
}

/// Runs the prompt to completion.
pub async fn finish(engine: &LocalEngine, prompt: Prompt) -> anyhow::Result<Completion> {
    let mut generation = engine.admit(prompt).await?.start();
    loop {
        if let GenerationEvent::Done(how) = generation.next().await {
            return Ok(how?);
        }
    }
}

/// Median of the values; NaN if there are none.
pub fn median_f64(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
