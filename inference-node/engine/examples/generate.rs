//! Loads a model on the CPU and streams its answer to one message.
//!
//!     cargo run --release -p cfq-engine --example generate -- FILE.gguf "prompt"
//!
//! The text goes to stdout, times and rates to stderr.
#![allow(clippy::print_stderr, reason = "a command-line program reports to stderr")]

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use cfq_engine::{
    ChatMessage, ChatRole, Completion, Engine, EngineLimits, GenerationEvent, LocalEngine, OutputFormat, Prompt,
    Sampling,
};

const USAGE: &str = "\
usage: generate MODEL PROMPT

MODEL   a GGUF file, or a folder with config.json, tokenizer.json and safetensors files
PROMPT  the user's message";

/// Longest answer, in tokens.
const MAX_TOKENS: u32 = 512;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(Path::new(model), prompt) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &Path, prompt: &str) -> anyhow::Result<()> {
    let name = format!("path:{}", path.display()).parse()?;
    let started = Instant::now();
    // One sequence may use all memory: the KV pool's blocks are allocated at their first use.
    let limits = EngineLimits { memory_bytes: u64::MAX, max_sequences: 1 };
    let engine = LocalEngine::builder(name, path).limits(limits).load()?;
    eprintln!("loaded in {:.1} s: {}", started.elapsed().as_secs_f64(), engine.estimate());
    // The batcher has its own thread; the runtime tokenizes the prompt and waits for the text.
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let completion = runtime.block_on(answer(&engine, prompt))?;
    report(&completion);
    engine.unload();
    Ok(())
}

/// Streams the answer to stdout.
async fn answer(engine: &LocalEngine, prompt: &str) -> anyhow::Result<Completion> {
    let prompt = Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: prompt.to_owned() }],
        sampling: Sampling { max_tokens: MAX_TOKENS, ..Sampling::default() },
        format: OutputFormat::Text,
        ..Prompt::default()
    };
    // Admission reserves KV tokens; it fails if the prompt does not fit.
    let mut generation = engine.admit(prompt).await?.start();
    let mut stdout = std::io::stdout();
    loop {
        match generation.next().await {
            GenerationEvent::Step { text, .. } => {
                stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to stdout")?;
            }
            GenerationEvent::Done(result) => {
                writeln!(stdout).context("cannot write to stdout")?;
                return Ok(result?);
            }
        }
    }
}

fn report(completion: &Completion) {
    let usage = &completion.usage;
    let first = usage.first_token_ms as f64 / 1000.0;
    eprintln!("prompt: {} tokens, first token after {first:.2} s", usage.prompt_tokens);
    let decode = usage.total_ms.saturating_sub(usage.first_token_ms) as f64 / 1000.0;
    let rate = f64::from(usage.output_tokens.saturating_sub(1)) / decode.max(0.001);
    eprintln!("answer: {} tokens, {rate:.1} tokens/s after the first", usage.output_tokens);
}
