//! Alpha and Beta in turns, with room for only one of them: what is computed again under plain eviction, and what is not
//! where evicted keys and values are parked in host memory, for each way of keeping them.
//!
//! The device is a pool of the smallest size, the host an arena that holds both. Everything is measured against a pool that
//! holds both, for which nothing is computed twice.
//!
//!     cargo run --release -p cfq-benches --bin parked_kv -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use cfq_inference_node::engine::candle::{Arena, Bytes, CandleEngine, Limits, LoadError, ParkedAs, need};
use cfq_inference_node::engine::{Engine, Event};
use cfq_proto::job::{ChatMessage, ChatRole, Completion, OutputFormat, Prompt, Sampling};

const TURNS: usize = 6;
/// Lines that an agent begins with, and that each turn brings.
const FIRST: usize = 62;
const MORE: usize = 2;
const ANSWER: u32 = 48;
const ARENA: u64 = 1 << 30;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().context("first argument: a GGUF file")?);
    let mut threads = "2".to_owned();
    while let Some(name) = args.next() {
        match name.as_str() {
            "--threads" => threads = args.next().context("--threads wants a value")?,
            other => bail!("unknown argument {other}"),
        }
    }
    if std::env::var_os("CFQ_BENCH_CHILD").is_none() {
        // The kernels read their number of threads once, before anything else runs.
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

/// All turns of one way.
#[derive(Default)]
struct Run {
    texts: Vec<String>,
    computed: u32,
    /// Milliseconds to the first token, of turns after the first.
    waits: Vec<f64>,
    parked: u64,
}

impl Run {
    fn note(&mut self, turn: usize, done: Completion) {
        self.computed += done.usage.prompt_tokens - done.usage.cached_tokens;
        if turn > 0 {
            self.waits.push(done.usage.first_token_ms as f64);
        }
        self.texts.push(done.text);
    }
}

async fn bench(file: &Path) -> anyhow::Result<()> {
    println!("one model, both agents on it:");
    let roomy = one_model(file, 12 << 30, None).await?;
    let least = least(file)?;
    let plain = one_model(file, least, None).await?;
    say("room for both", &roomy, &roomy, None);
    say("plain eviction", &plain, &roomy, None);
    for how in [ParkedAs::Exact, ParkedAs::F16, ParkedAs::Q8] {
        let run = one_model(file, least, Arena::new(ARENA, how)).await?;
        say(&format!("parked as {how:?}").to_lowercase(), &run, &roomy, Some(&plain));
    }
    println!("two models, each loaded for its turn and unloaded after it:");
    let plain = two_models(file, least, None).await?;
    say("plain", &plain, &roomy, None);
    let run = two_models(file, least, Arena::new(ARENA, ParkedAs::Exact)).await?;
    say("parked as exact", &run, &roomy, Some(&plain));
    Ok(())
}

fn say(name: &str, run: &Run, roomy: &Run, plain: Option<&Run>) {
    let again = |run: &Run| f64::from(run.computed) - f64::from(roomy.computed);
    let share =
        plain.map_or_else(String::new, |plain| format!(" = {:.1} % of plain", again(run) / again(plain) * 100.0));
    let same = run.texts.iter().zip(&roomy.texts).filter(|(a, b)| a == b).count();
    let mut waits = run.waits.clone();
    waits.sort_by(f64::total_cmp);
    println!(
        "  {name}: {} tokens computed, {} again{share}; first token after {:.0} ms; {} parked; {same} of {} texts the same",
        run.computed,
        again(run),
        waits.get(waits.len() / 2).copied().unwrap_or(f64::NAN),
        Bytes(run.parked),
        run.texts.len()
    );
}

/// Memory for the smallest pool.
fn least(file: &Path) -> anyhow::Result<u64> {
    match need(file, Limits { memory: 0, max_sequences: 2 }) {
        Err(LoadError::DoesNotFit { source, .. }) => Ok(source.need.total()),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("the model fits into nothing"),
    }
}

fn load(file: &Path, model: &str, memory: u64, arena: Option<Arc<Arena>>) -> anyhow::Result<CandleEngine> {
    let limits = Limits { memory, max_sequences: 2 };
    Ok(CandleEngine::load_parking(model.parse()?, file, limits, Arc::default(), arena)?)
}

async fn one_model(file: &Path, memory: u64, arena: Option<Arc<Arena>>) -> anyhow::Result<Run> {
    let engine = load(file, "path:both", memory, arena.clone())?;
    let mut run = Run::default();
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            run.note(turn, answer(&engine, agent, turn).await?);
        }
    }
    run.parked = arena.map_or(0, |arena| arena.bytes());
    Ok(run)
}

async fn two_models(file: &Path, memory: u64, arena: Option<Arc<Arena>>) -> anyhow::Result<Run> {
    let mut run = Run::default();
    let mut unloading = 0.0;
    for turn in 0..TURNS {
        for agent in ["Alpha", "Beta"] {
            let engine = load(file, &format!("path:{agent}"), memory, arena.clone())?;
            run.note(turn, answer(&engine, agent, turn).await?);
            let began = Instant::now();
            engine.unload();
            unloading += began.elapsed().as_secs_f64();
        }
    }
    println!("  unloaded in {:.0} ms each", unloading * 1000.0 / (2 * TURNS) as f64);
    run.parked = arena.map_or(0, |arena| arena.bytes());
    Ok(run)
}

async fn answer(engine: &CandleEngine, agent: &str, turn: usize) -> anyhow::Result<Completion> {
    let mut content = format!("You are {agent}. What {agent} knows:\n");
    for n in 0..FIRST + turn * MORE {
        let _ = writeln!(content, "- {agent} counted {} things of kind {n} in room {}", n * 37 % 1000, n * 11 % 97);
    }
    let sampling = Sampling { max_tokens: ANSWER, ..Sampling::default() };
    let messages = vec![ChatMessage { role: ChatRole::User, content }];
    let mut generation = engine.admit(Prompt { messages, sampling, format: OutputFormat::Text }).await?.start();
    loop {
        if let Event::Done(how) = generation.next().await {
            return Ok(how?);
        }
    }
}
