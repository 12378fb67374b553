//! The turn this system makes most: a revision. The prompt repeats the last one but for its end, the answer repeats a file of
//! the prompt but for some lines. Beside llama.cpp, which begins from cold and guesses nothing; and with the shares of prefix
//! reuse and of prompt lookup apart.
//!
//! The answer is held to one text by a grammar, so that every way of making it writes the same; but every token of it is drawn
//! (without jumping forward over what the grammar leaves no choice about). llama.cpp decodes as many tokens freely.
//!
//!     cargo run --release -p cfq-benches --bin revise_turn -- FILE.gguf --threads 2 --llama-cpp /somewhere/bin/python
//!     ... --at-least 2.0          ends with 1 where the first way is slower than that many times llama.cpp's speed
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_benches::engine::{finish, load, middle, prompt, with_threads};
use cfq_benches::hold;
use cfq_benches::yardstick::Yardstick;
use cfq_inference_node::engine::candle::CandleEngine;
use cfq_proto::job::{OutputFormat, Sampling, Usage};

const ROUNDS: usize = 3;
/// Lines of the file that is revised, and of those around it in the prompt.
const REVISED: usize = 27;
const AROUND: usize = 65;
const FEEDBACK: usize = 14;

/// One way of making the turn.
struct Way {
    name: &'static str,
    warm: bool,
    lookup: bool,
}

const WAYS: [Way; 4] = [
    Way { name: "prefix reuse and prompt lookup", warm: true, lookup: true },
    Way { name: "prefix reuse alone", warm: true, lookup: false },
    Way { name: "prompt lookup alone", warm: false, lookup: true },
    Way { name: "neither", warm: false, lookup: false },
];

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let (mut threads, mut python, mut at_least) = ("2".to_owned(), None, None);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} wants a value"))?;
        match name.as_str() {
            "--threads" => threads = value,
            "--llama-cpp" => python = Some(value),
            "--at-least" => at_least = Some(value.parse().context("--at-least wants a number")?),
            other => bail!("unknown argument {other}"),
        }
    }
    with_threads(&threads)?;
    let engine = load(&file, 2)?;
    let yardstick = python.as_deref().map(|p| Yardstick::start(p, &file, &threads)).transpose()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine, yardstick, at_least))
}

async fn bench(engine: &CandleEngine, mut yardstick: Option<Yardstick>, at_least: Option<f64>) -> anyhow::Result<()> {
    let mut times: [Vec<f64>; WAYS.len()] = [const { Vec::new() }; WAYS.len()];
    let mut theirs = Vec::new();
    let mut last = [Usage::default(); WAYS.len()];
    for round in 0..ROUNDS {
        for (at, way) in WAYS.iter().enumerate() {
            // A beginning of its own, or an earlier round's would be found.
            let base = base(round * WAYS.len() + at);
            if way.warm {
                turn(engine, &base, None, false).await?;
            }
            let began = Instant::now();
            last[at] = turn(engine, &format!("{base}{}", feedback()), Some(revised()), way.lookup).await?;
            times[at].push(began.elapsed().as_secs_f64());
        }
        if let Some(yardstick) = &mut yardstick {
            let usage = last[0];
            theirs.push(yardstick.ask(&format!("turn {} {}", usage.prompt_tokens, usage.output_tokens))?);
        }
    }
    let theirs = (!theirs.is_empty()).then(|| middle(&mut theirs));
    if let Some(theirs) = theirs {
        println!("llama.cpp from cold: {theirs:.2} s");
    }
    let mut ratios = Vec::new();
    for (at, way) in WAYS.iter().enumerate() {
        let (ours, usage) = (middle(&mut times[at]), last[at]);
        ratios.extend(theirs.map(|theirs| (way.name, theirs / ours)));
        let ratio = theirs.map_or_else(String::new, |theirs| format!(", {:.2} times as fast", theirs / ours));
        println!(
            "{}: {ours:.2} s{ratio}; prompt {} tokens, {} of them cached; answer {} tokens, {} of {} guesses right; \
             {} ms for the grammar",
            way.name,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.accepted_tokens,
            usage.guessed_tokens,
            usage.constraint_ms
        );
    }
    ratios.truncate(1);
    hold(&ratios, at_least)
}

/// Answers `content` with exactly `answer`, or with one token.
async fn turn(engine: &CandleEngine, content: &str, answer: Option<String>, lookup: bool) -> anyhow::Result<Usage> {
    let max_tokens = if answer.is_some() { 4096 } else { 1 };
    let format = match &answer {
        Some(text) => OutputFormat::Regex { pattern: escaped(text) },
        None => OutputFormat::Text,
    };
    let sampling = Sampling { max_tokens, prompt_lookup: lookup, jump_forward: false, ..Sampling::default() };
    let done = finish(engine, prompt(content.to_owned(), sampling, format)).await?;
    if let Some(answer) = answer.filter(|a| *a != done.text) {
        bail!("the answer is not the one that was meant: {:?} for {answer:?}", done.text);
    }
    Ok(done.usage)
}

/// A line of code that no other line repeats.
fn line(n: usize) -> String {
    const VERBS: [&str; 7] = ["load", "merge", "count", "split", "check", "sort", "write"];
    const NOUNS: [&str; 5] = ["orders", "prices", "users", "lines", "dates"];
    let (verb, noun) = (VERBS[n % VERBS.len()], NOUNS[n / 2 % NOUNS.len()]);
    format!("    {noun}_{n} = {verb}_{noun}(source, limit={})\n", n * 37 % 1000)
}

fn base(round: usize) -> String {
    let mut text = format!("Task {round}: revise the file below.\n");
    for n in 0..REVISED + AROUND {
        text.push_str(&line(n));
    }
    text
}

fn feedback() -> String {
    (0..FEEDBACK).fold("Review:\n".to_owned(), |mut text, n| {
        let _ = writeln!(text, "- item {n}: the limit in line {} is wrong, make it {}", n * 3, n * 11 % 97);
        text
    })
}

/// The file with every tenth line changed.
fn revised() -> String {
    (0..REVISED).fold(String::new(), |text, n| match n % 10 {
        9 => text + &format!("    total_{n} = sum(values_{n}.get(key, 0) for key in keys)\n"),
        _ => text + &line(n),
    })
}

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
