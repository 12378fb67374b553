//! Speed of the engine compared with llama.cpp, with the same model file and number of threads; the two alternate in
//! one run.
//!
//!     python3 -m venv /somewhere && /somewhere/bin/pip install llama-cpp-python
//!     cargo run --release -p cfq-benches --bin engine_speed -- FILE.gguf --threads 2 --llama-cpp /somewhere/bin/python
//!     ... --at-least 1.0                     exits with 1 if a rate is below that many times llama.cpp's
//!     ... -- random-q4km:/tmp/random.gguf    first creates a file of 726 million random weights in Q4_K and Q6_K
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_benches::engine::{load, median_f64, prompt, restart_with_threads};
use cfq_benches::llama_cpp::LlamaCpp;
use cfq_benches::random_model::file_or_random_model;
use cfq_benches::require_ratio;
use cfq_engine::{Engine, GenerationEvent, LocalEngine};
use cfq_proto::job::{OutputFormat, Prompt, Sampling, Usage};

const ROUNDS: usize = 5;
const STEPS: u32 = 64;

struct Arguments {
    file: PathBuf,
    threads: String,
    python: Option<String>,
    at_least: Option<f64>,
}

fn arguments() -> anyhow::Result<Arguments> {
    let mut args = std::env::args().skip(1);
    let file = file_or_random_model(args.next())?;
    let mut parsed = Arguments { file, threads: "2".to_owned(), python: None, at_least: None };
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--threads" => parsed.threads = value,
            "--llama-cpp" => parsed.python = Some(value),
            "--at-least" => parsed.at_least = Some(value.parse().context("--at-least requires a number")?),
            other => bail!("unknown argument {other}"),
        }
    }
    Ok(parsed)
}

fn main() -> anyhow::Result<()> {
    let args = arguments()?;
    restart_with_threads(&args.threads)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(args))
}

async fn bench(args: Arguments) -> anyhow::Result<()> {
    let began = Instant::now();
    let engine = load(&args.file, 8)?;
    let (seconds, memory_use) = (began.elapsed().as_secs_f64(), memory("self"));
    println!("{}: loaded in {seconds:.2} s, {memory_use}, {} threads", args.file.display(), args.threads);
    let mut llama_cpp = args.python.as_deref().map(|p| LlamaCpp::start(p, &args.file, &args.threads)).transpose()?;
    if let Some(y) = &llama_cpp {
        let amx = if y.system.contains("AMX") { "with" } else { "without" };
        let memory_use = memory(&y.pid().to_string());
        println!("llama.cpp, built {amx} AMX: loaded in {:.2} s, {memory_use}; {}", y.load_seconds, y.system);
    }
    // Each element is the name of a measurement, and llama.cpp's request for the corresponding measurement.
    // Deterministic rates have no counterpart in llama.cpp: they are compared with the engine's other rates.
    let measures = [
        ("prefill 512", Some("prefill 512")),
        ("decode, 1 sequence", Some("decode 1 64")),
        ("decode, 8 sequences", Some("decode 8 64")),
        ("prefill 512, deterministic", None),
        ("decode, 8 sequences, deterministic", None),
    ];
    let mut ours = [const { Vec::new() }; 5];
    let mut baseline = [const { Vec::new() }; 5];
    for round in 0..ROUNDS {
        for (at, (_, ask)) in measures.iter().enumerate() {
            ours[at].push(match at {
                0 => prefill(&engine, round, false).await?,
                1 => decode(&engine, 1, false).await?,
                2 => decode(&engine, 8, false).await?,
                3 => prefill(&engine, round, true).await?,
                _ => decode(&engine, 8, true).await?,
            });
            if let (Some(llama_cpp), Some(ask)) = (&mut llama_cpp, ask) {
                baseline[at].push(llama_cpp.measure(ask)?);
            }
        }
    }
    let ours = ours.map(|mut rates| median_f64(&mut rates));
    let mut ratios = Vec::new();
    for (at, (name, _)) in measures.iter().enumerate() {
        let ours = ours[at];
        match baseline[at].is_empty() {
            true => println!("{name:35} {ours:8.1} tokens/s"),
            false => {
                let baseline = median_f64(&mut baseline[at]);
                println!("{name:35} {ours:8.1} tokens/s, llama.cpp {baseline:8.1}, ratio {:.2}", ours / baseline);
                ratios.push((*name, ours / baseline));
            }
        }
    }
    let [_, one, eight, ..] = ours;
    println!("rate of 8 sequences: {:.2} times that of 1 sequence", eight / one);
    println!(
        "deterministic: {:.2} times the normal prefill rate, {:.2} times the normal decode rate of 8 sequences",
        ours[3] / ours[0],
        ours[4] / eight
    );
    require_ratio(&ratios, args.at_least)
}

fn ask(content: String, max_tokens: u32, deterministic: bool) -> Prompt {
    let sampling =
        Sampling { max_tokens, deterministic, prompt_lookup: false, temperature: 1.0, ..Sampling::default() };
    prompt(content, sampling, OutputFormat::Text)
}

/// Runs prompts concurrently; returns the usage of each.
async fn run(engine: &LocalEngine, prompts: Vec<Prompt>) -> anyhow::Result<Vec<Usage>> {
    let mut running = Vec::new();
    for prompt in prompts {
        running.push(engine.admit(prompt).await?.start());
    }
    let mut done = Vec::new();
    for mut generation in running {
        loop {
            if let GenerationEvent::Done(how) = generation.next().await {
                done.push(how?.usage);
                break;
            }
        }
    }
    Ok(done)
}

/// Prefill rate of a prompt of about 512 tokens, in tokens per second.
async fn prefill(engine: &LocalEngine, round: usize, deterministic: bool) -> anyhow::Result<f64> {
    // The prompt begins differently in each round, so that nothing of it is in the prefix cache.
    let text = format!("Round {round} {deterministic}. {}", "The quick brown fox jumps over the lazy dog. ".repeat(48));
    let usage = run(engine, vec![ask(text, 1, deterministic)]).await?;
    let Some(usage) = usage.first().filter(|u| u.cached_tokens < 64) else { bail!("the prompt was partly cached") };
    Ok(f64::from(usage.prompt_tokens - usage.cached_tokens) * 1e3 / usage.first_token_ms as f64)
}

/// Decode rate of concurrent sequences, summed over all of them, in tokens per second.
async fn decode(engine: &LocalEngine, sequences: usize, deterministic: bool) -> anyhow::Result<f64> {
    let story = |n| ask(format!("Tell me a long story about {n} lighthouses."), STEPS, deterministic);
    let prompts = (0..sequences).map(story);
    let usages = run(engine, prompts.collect()).await?;
    let rate = |u: &Usage| f64::from(u.output_tokens - 1) * 1e3 / (u.total_ms - u.first_token_ms).max(1) as f64;
    Ok(usages.iter().map(rate).sum())
}

/// Current and peak resident memory of a process, as text.
fn memory(process: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mib = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0) / 1024.0
    };
    format!("{:.0} MiB resident, {:.0} at peak", mib("VmRSS:"), mib("VmHWM:"))
}
