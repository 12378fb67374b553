//! Hours of mixed tasks through a running server: short and long ones, with every review constrained, some cancelled in the
//! middle, over whatever models its agents are bound to. Ends with 1 if a task did not come to rest, if a node still holds a
//! sequence when all is over, or if a process grew after it was warm.
//!
//!     cfq up --config two-models.toml    # as a child of which the processes are found: name its process id
//!     CFQ_URL=... CFQ_TOKEN=... cargo run -p cfq-benches --bin soak -- REPO PID 60
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use cfq_benches::client;
use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use tokio::task::JoinSet;

/// Tasks in flight.
const WIDTH: u64 = 5;
/// A task that has not come to rest by then is stuck.
const PATIENCE: Duration = Duration::from_secs(600);
/// Share of the time after which everything is warm: pools and the arena of parked keys and values fill for 20 minutes.
const WARM: f64 = 0.4;
const PART: f64 = 0.25;
/// Growth after that which is no noise: of the resident memory, and in bytes.
const GROWTH: f64 = 0.05;
const GROWTH_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Short,
    Long,
    Cancelled,
}

struct Load {
    client: Client,
    repo: PathBuf,
    copies: PathBuf,
    until: Instant,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [repo, process, minutes] = &args[..] else {
        bail!("three arguments: a git repository, the pid of cfq up, minutes")
    };
    let copies = std::env::temp_dir().join(format!("cfq-soak-{}", std::process::id()));
    std::fs::create_dir_all(&copies)?;
    let began = Instant::now();
    let last = Duration::from_secs_f64(minutes.parse::<f64>()? * 60.0);
    let load = Arc::new(Load { client: client()?, repo: repo.into(), copies, until: began + last });
    let mut workers = JoinSet::new();
    for worker in 0..WIDTH {
        workers.spawn(work(load.clone(), worker));
    }
    let mut samples = Vec::new();
    let mut ends: BTreeMap<(Kind, String), u64> = BTreeMap::new();
    let mut every = tokio::time::interval(Duration::from_secs(20));
    while !workers.is_empty() {
        tokio::select! {
            Some(done) = workers.join_next() => {
                for end in done?? {
                    *ends.entry(end).or_default() += 1;
                }
            }
            _ = every.tick(), if began.elapsed() < last => {
                let now = memory(process)?;
                let words: Vec<String> = now.iter().map(|(name, bytes)| format!("{name} {} MiB", bytes >> 20)).collect();
                println!("{:5.1} min: {}", began.elapsed().as_secs_f64() / 60.0, words.join(", "));
                samples.push((began.elapsed(), now));
            }
        }
    }
    println!("{ends:?}");
    let count: u64 = ends.values().sum();
    ensure!(count > 0, "no task came to rest");
    println!("{count} tasks in {:.0} min, none stuck", began.elapsed().as_secs_f64() / 60.0);
    quiet(&load.client).await?;
    grew(&samples, last)
}

/// Tasks one after the other until the time is over: how each ended.
async fn work(load: Arc<Load>, worker: u64) -> anyhow::Result<Vec<(Kind, String)>> {
    let mut ends = Vec::new();
    let mut number = 0;
    while Instant::now() < load.until {
        let kind = [Kind::Short, Kind::Short, Kind::Long, Kind::Cancelled][((worker + number) % 4) as usize];
        let seed = worker * 1_000_000 + number;
        number += 1;
        let copy = load.copies.join(format!("{seed}"));
        clone(&load.repo, &copy).await?;
        let state =
            task(&load.client, kind, seed, &copy).await.with_context(|| format!("{kind:?} task of seed {seed}"))?;
        ends.push((kind, state.to_string()));
        std::fs::remove_dir_all(&copy)?;
    }
    Ok(ends)
}

async fn clone(from: &Path, to: &Path) -> anyhow::Result<()> {
    let (from, to) = (from.to_owned(), to.to_owned());
    let status = tokio::task::spawn_blocking(move || {
        std::process::Command::new("git").args(["clone", "--quiet"]).args([from, to]).status()
    });
    ensure!(status.await??.success(), "git clone failed");
    Ok(())
}

async fn task(client: &Client, kind: Kind, seed: u64, repo: &Path) -> anyhow::Result<TaskState> {
    let (most, background) = match kind {
        Kind::Short => (60, 0),
        Kind::Long => (400, 120),
        Kind::Cancelled => (300, 30),
    };
    let notes: String =
        (0..background).map(|n| format!("Note {n} of task {seed}: keep line {n} short and plain. ")).collect();
    let spec = serde_json::from_value(serde_json::json!({
        "description": format!("Write a Python function add_{seed}(n) that returns n + {seed}. {notes}"),
        "language": "python", "repo": repo, "max_iterations": 2,
        "agents": { "alpha": { "seed": seed, "max_tokens": most, "temperature": 0.7 }, "beta": { "seed": seed, "max_tokens": 160 } },
    }))?;
    let began = Instant::now();
    let key = TaskKey::Id(client.submit(&spec, None).await?.id);
    let cancel_at = Duration::from_millis(seed % 40 * 100);
    let mut cancelled = false;
    loop {
        let state = client.task(key).await?.summary.state;
        if state.is_resting() {
            return Ok(state);
        }
        if kind == Kind::Cancelled && !cancelled && began.elapsed() >= cancel_at {
            // It may have come to rest in this moment.
            cancelled = client.cancel(key, "soak").await.is_ok();
        }
        ensure!(began.elapsed() < PATIENCE, "{key} is {state} after {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// All is over: no node holds a sequence any more.
async fn quiet(client: &Client) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let nodes = client.nodes().await?;
        let running: u32 = nodes.iter().flat_map(|n| &n.ledger.models).map(|m| m.running).sum();
        if running == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{running} sequences are still held a minute after the last task");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Resident bytes of `cfq up` and what it started, by what they are.
fn memory(up: &str) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let Ok(stat) = std::fs::read_to_string(path.join("stat")) else { continue };
        // The name may hold blanks and brackets: what follows it does not.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        if rest.split(' ').nth(1) != Some(up) {
            continue;
        }
        let command = std::fs::read_to_string(path.join("cmdline")).unwrap_or_default();
        let mut words = command.split('\0');
        let program = words.next().and_then(|p| p.rsplit('/').next()).unwrap_or_default();
        // `cfq serve node`
        let name = if program == "cfq" { words.nth(1).unwrap_or_default() } else { program };
        let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
        let kib =
            status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        *all.entry(name.to_owned()).or_default() += kib.unwrap_or(0) << 10;
    }
    ensure!(all.contains_key("node"), "process {up} has no child `cfq serve node`: is it `cfq up`?");
    Ok(all)
}

/// Medians of the first quarter in which everything was warm, and of the last.
fn grew(samples: &[(Duration, BTreeMap<String, u64>)], last: Duration) -> anyhow::Result<()> {
    let median = |name: &str, from: f64, to: f64| {
        let inside = samples.iter().filter(|(at, _)| (last.mul_f64(from)..last.mul_f64(to)).contains(at));
        let mut values: Vec<u64> = inside.filter_map(|(_, all)| all.get(name).copied()).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    };
    let names: std::collections::BTreeSet<&String> = samples.iter().flat_map(|(_, all)| all.keys()).collect();
    let mut grown = Vec::new();
    for name in names {
        let (warm, end) = (median(name, WARM, WARM + PART), median(name, 1.0 - PART, 1.0));
        println!("{name}: {} MiB when warm, {} MiB at the end", warm >> 20, end >> 20);
        let growth = end.saturating_sub(warm);
        if growth > GROWTH_BYTES && growth as f64 > GROWTH * warm as f64 {
            grown.push(name.as_str());
        }
    }
    ensure!(grown.is_empty(), "grew after it was warm: {}", grown.join(", "));
    Ok(())
}
