//! The engine beside llama.cpp: the same file, the same threads, in turns within one run.
//!
//!     python3 -m venv /somewhere && /somewhere/bin/pip install llama-cpp-python
//!     cargo run --release -p cfq-benches --bin engine_speed -- FILE.gguf --threads 2 --llama-cpp /somewhere/bin/python
//!     ... --at-least 1.0                     ends with 1 where a rate is below that many times llama.cpp's
//!     ... -- random-q4km:/tmp/random.gguf    makes a file of 726 million random weights in Q4_K and Q6_K first
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_benches::engine::{load, middle, prompt, with_threads};
use cfq_benches::hold;
use cfq_benches::random_model::file_or_random;
use cfq_benches::yardstick::Yardstick;
use cfq_inference_node::engine::candle::CandleEngine;
use cfq_inference_node::engine::{Engine, Event};
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
    let file = file_or_random(args.next())?;
    let mut parsed = Arguments { file, threads: "2".to_owned(), python: None, at_least: None };
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} wants a value"))?;
        match name.as_str() {
            "--threads" => parsed.threads = value,
            "--llama-cpp" => parsed.python = Some(value),
            "--at-least" => parsed.at_least = Some(value.parse().context("--at-least wants a number")?),
            other => bail!("unknown argument {other}"),
        }
    }
    Ok(parsed)
}

fn main() -> anyhow::Result<()> {
    let args = arguments()?;
    with_threads(&args.threads)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(args))
}

async fn bench(args: Arguments) -> anyhow::Result<()> {
    let began = Instant::now();
    let engine = load(&args.file, 8)?;
    let (took, held) = (began.elapsed().as_secs_f64(), memory("self"));
    println!("{}: loaded in {took:.2} s, {held}, {} threads", args.file.display(), args.threads);
    let mut yardstick = args.python.as_deref().map(|p| Yardstick::start(p, &args.file, &args.threads)).transpose()?;
    if let Some(y) = &yardstick {
        let amx = if y.system.contains("AMX") { "with" } else { "without" };
        let held = memory(&y.process().to_string());
        println!("llama.cpp, built {amx} AMX: loaded in {:.2} s, {held}; {}", y.load, y.system);
    }
    // What llama.cpp is asked for beside it; nothing beside the deterministic ones, which stand beside our own.
    let measures = [
        ("prefill 512", Some("prefill 512")),
        ("decode, 1 sequence", Some("decode 1 64")),
        ("decode, 8 sequences", Some("decode 8 64")),
        ("prefill 512, deterministic", None),
        ("decode, 8 sequences, deterministic", None),
    ];
    let mut ours = [const { Vec::new() }; 5];
    let mut theirs = [const { Vec::new() }; 5];
    for round in 0..ROUNDS {
        for (at, (_, ask)) in measures.iter().enumerate() {
            ours[at].push(match at {
                0 => prefill(&engine, round, false).await?,
                1 => decode(&engine, 1, false).await?,
                2 => decode(&engine, 8, false).await?,
                3 => prefill(&engine, round, true).await?,
                _ => decode(&engine, 8, true).await?,
            });
            if let (Some(yardstick), Some(ask)) = (&mut yardstick, ask) {
                theirs[at].push(yardstick.ask(ask)?);
            }
        }
    }
    let ours = ours.map(|mut rates| middle(&mut rates));
    let mut ratios = Vec::new();
    for (at, (name, _)) in measures.iter().enumerate() {
        let ours = ours[at];
        match theirs[at].is_empty() {
            true => println!("{name:35} {ours:8.1} tokens/s"),
            false => {
                let theirs = middle(&mut theirs[at]);
                println!("{name:35} {ours:8.1} tokens/s, llama.cpp {theirs:8.1}, ratio {:.2}", ours / theirs);
                ratios.push((*name, ours / theirs));
            }
        }
    }
    let [_, one, eight, ..] = ours;
    println!("8 sequences together are {:.2} times one", eight / one);
    println!("deterministic: {:.2} of the rate at prompts, {:.2} at 8 sequences", ours[3] / ours[0], ours[4] / eight);
    hold(&ratios, args.at_least)
}

fn ask(content: String, max_tokens: u32, deterministic: bool) -> Prompt {
    let sampling =
        Sampling { max_tokens, deterministic, prompt_lookup: false, temperature: 1.0, ..Sampling::default() };
    prompt(content, sampling, OutputFormat::Text)
}

/// Runs prompts together; the usage of each.
async fn run(engine: &CandleEngine, prompts: Vec<Prompt>) -> anyhow::Result<Vec<Usage>> {
    let mut running = Vec::new();
    for prompt in prompts {
        running.push(engine.admit(prompt).await?.start());
    }
    let mut done = Vec::new();
    for mut generation in running {
        loop {
            if let Event::Done(how) = generation.next().await {
                done.push(how?.usage);
                break;
            }
        }
    }
    Ok(done)
}

async fn prefill(engine: &CandleEngine, round: usize, deterministic: bool) -> anyhow::Result<f64> {
    // Another beginning each time, or it would be found.
    let text = format!("Round {round} {deterministic}. {}", "The quick brown fox jumps over the lazy dog. ".repeat(48));
    let usage = run(engine, vec![ask(text, 1, deterministic)]).await?;
    let Some(usage) = usage.first().filter(|u| u.cached_tokens < 64) else { bail!("the prompt was cached") };
    Ok(f64::from(usage.prompt_tokens - usage.cached_tokens) * 1e3 / usage.first_token_ms as f64)
}

/// Tokens a second of `sequences` together, while all of them decode.
async fn decode(engine: &CandleEngine, sequences: usize, deterministic: bool) -> anyhow::Result<f64> {
    let story = |n| ask(format!("Tell me a long story about {n} lighthouses."), STEPS, deterministic);
    let prompts = (0..sequences).map(story);
    let usages = run(engine, prompts.collect()).await?;
    let rate = |u: &Usage| f64::from(u.output_tokens - 1) * 1e3 / (u.total_ms - u.first_token_ms).max(1) as f64;
    Ok(usages.iter().map(rate).sum())
}

/// What a process holds, and the most it held.
fn memory(process: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mib = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0) / 1024.0
    };
    format!("{:.0} MiB resident, {:.0} at most", mib("VmRSS:"), mib("VmHWM:"))
}
