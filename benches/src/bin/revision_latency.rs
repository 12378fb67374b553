//! Latency of a revision, the most frequent turn of the loop: the prompt repeats the previous one except for its end,
//! and the answer repeats a file of the prompt except for some lines. The baseline is llama.cpp without cached tokens
//! and without drafting. The effects of prefix reuse and of prompt lookup are also measured separately.
//!
//! A grammar allows one answer only, so that all variants generate the same text, but every token is sampled (without
//! jump-forward over tokens that the grammar determines). llama.cpp decodes the same number of tokens without
//! constraint.
//!
//!     cargo run --release -p cfq-benches --bin revision_latency -- FILE.gguf --threads 2 --llama-cpp /somewhere/bin/python
//!     ... --at-least 2.0    exits with 1 if prefix reuse with prompt lookup is below that many times llama.cpp's speed
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_benches::engine::{finish, load, median_f64, prompt, restart_with_threads};
use cfq_benches::llama_cpp::LlamaCpp;
use cfq_benches::require_ratio;
use cfq_engine::LocalEngine;
use cfq_proto::job::{OutputFormat, Sampling, Usage};

const ROUNDS: usize = 3;
/// Number of lines of the file to revise, which is at the beginning of the prompt.
const REVISED_LINES: usize = 27;
/// Number of lines of code in the prompt after the file to revise.
const OTHER_LINES: usize = 65;
/// Number of lines of the review at the end of the prompt.
const FEEDBACK_LINES: usize = 14;

/// One configuration in which the revision is measured.
struct Variant {
    name: &'static str,
    prefix_cached: bool,
    prompt_lookup: bool,
}

const VARIANTS: [Variant; 4] = [
    Variant { name: "prefix reuse and prompt lookup", prefix_cached: true, prompt_lookup: true },
    Variant { name: "prefix reuse alone", prefix_cached: true, prompt_lookup: false },
    Variant { name: "prompt lookup alone", prefix_cached: false, prompt_lookup: true },
    Variant { name: "neither", prefix_cached: false, prompt_lookup: false },
];

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let (mut threads, mut python, mut at_least) = ("2".to_owned(), None, None);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--threads" => threads = value,
            "--llama-cpp" => python = Some(value),
            "--at-least" => at_least = Some(value.parse().context("--at-least requires a number")?),
            other => bail!("unknown argument {other}"),
        }
    }
    restart_with_threads(&threads)?;
    let engine = load(&file, 2)?;
    let llama_cpp = python.as_deref().map(|p| LlamaCpp::start(p, &file, &threads)).transpose()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine, llama_cpp, at_least))
}

async fn bench(engine: &LocalEngine, mut llama_cpp: Option<LlamaCpp>, at_least: Option<f64>) -> anyhow::Result<()> {
    let mut times: [Vec<f64>; VARIANTS.len()] = [const { Vec::new() }; VARIANTS.len()];
    let mut baseline = Vec::new();
    let mut last = [Usage::default(); VARIANTS.len()];
    for round in 0..ROUNDS {
        for (at, variant) in VARIANTS.iter().enumerate() {
            // The prompt begins differently each time, so that nothing from earlier rounds is found in the prefix
            // cache.
            let base = base(round * VARIANTS.len() + at);
            if variant.prefix_cached {
                turn(engine, &base, None, false).await?;
            }
            let began = Instant::now();
            last[at] = turn(engine, &format!("{base}{}", feedback()), Some(revised()), variant.prompt_lookup).await?;
            times[at].push(began.elapsed().as_secs_f64());
        }
        if let Some(llama_cpp) = &mut llama_cpp {
            let usage = last[0];
            baseline.push(llama_cpp.measure(&format!("turn {} {}", usage.prompt_tokens, usage.output_tokens))?);
        }
    }
    let baseline = (!baseline.is_empty()).then(|| median_f64(&mut baseline));
    if let Some(baseline) = baseline {
        println!("llama.cpp without cached tokens: {baseline:.2} s");
    }
    let mut ratios = Vec::new();
    for (at, variant) in VARIANTS.iter().enumerate() {
        let (ours, usage) = (median_f64(&mut times[at]), last[at]);
        ratios.extend(baseline.map(|baseline| (variant.name, baseline / ours)));
        let ratio = baseline.map_or_else(String::new, |baseline| format!(", {:.2} times as fast", baseline / ours));
        println!(
            "{}: {ours:.2} s{ratio}; prompt {} tokens, {} of them cached; answer {} tokens, {} of {} drafts accepted; \
             {} ms for the grammar",
            variant.name,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.accepted_tokens,
            usage.drafted_tokens,
            usage.constraint_ms
        );
    }
    ratios.truncate(1);
    require_ratio(&ratios, at_least)
}

/// Runs the prompt `content`. The output is constrained to exactly `answer`; if `answer` is `None`, the output is one
/// token.
async fn turn(engine: &LocalEngine, content: &str, answer: Option<String>, lookup: bool) -> anyhow::Result<Usage> {
    let max_tokens = if answer.is_some() { 4096 } else { 1 };
    let format = match &answer {
        Some(text) => OutputFormat::Regex { pattern: escaped(text) },
        None => OutputFormat::Text,
    };
    let sampling = Sampling { max_tokens, prompt_lookup: lookup, jump_forward: false, ..Sampling::default() };
    let done = finish(engine, prompt(content.to_owned(), sampling, format)).await?;
    if let Some(answer) = answer.filter(|a| *a != done.text) {
        bail!("the answer differs from the grammar's text: {:?} instead of {answer:?}", done.text);
    }
    Ok(done.usage)
}

/// Line `n` of code; all lines are different.
fn line(n: usize) -> String {
    const VERBS: [&str; 7] = ["load", "merge", "count", "split", "check", "sort", "write"];
    const NOUNS: [&str; 5] = ["orders", "prices", "users", "lines", "dates"];
    let (verb, noun) = (VERBS[n % VERBS.len()], NOUNS[n / 2 % NOUNS.len()]);
    format!("    {noun}_{n} = {verb}_{noun}(source, limit={})\n", n * 37 % 1000)
}

fn base(round: usize) -> String {
    let mut text = format!("Task {round}: revise the file below.\n");
    for n in 0..REVISED_LINES + OTHER_LINES {
        text.push_str(&line(n));
    }
    text
}

fn feedback() -> String {
    (0..FEEDBACK_LINES).fold("Review:\n".to_owned(), |mut text, n| {
        let _ = writeln!(text, "- item {n}: the limit in line {} is wrong, make it {}", n * 3, n * 11 % 97);
        text
    })
}

/// The revised file: the original lines with every tenth one changed.
fn revised() -> String {
    (0..REVISED_LINES).fold(String::new(), |text, n| match n % 10 {
        9 => text + &format!("    total_{n} = sum(values_{n}.get(key, 0) for key in keys)\n"),
        _ => text + &line(n),
    })
}

/// Regular expression that matches exactly this text.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '\n' => out.push_str("\\n"),
            c if c.is_alphanumeric() || c == ' ' || c == '_' => out.push(c),
            c => {
                out.push('\\');
                out.push(c);
            }
        }
        out
    })
}
