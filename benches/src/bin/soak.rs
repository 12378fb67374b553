//! Soak test: runs tasks on a running server for minutes or hours, with the models that are configured there. Tasks are
//! short or long, their reviews are constrained to a schema, and some tasks are cancelled while they run. Exits with 1
//! if a task neither finishes nor stops for a human, if a node still runs a sequence at the end, or if the memory of a
//! process grows after the warm-up.
//!
//!     cfq up --config two-models.toml    # PID is its process id, by which its child processes are found
//!     CFQ_URL=... CFQ_TOKEN=... cargo run -p cfq-benches --bin soak -- REPO PID 60    # for 60 minutes
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

/// Number of concurrent tasks.
const CONCURRENCY: u64 = 5;
/// Time after which a task that has neither finished nor stopped for a human counts as stuck.
const TASK_TIMEOUT: Duration = Duration::from_secs(600);
/// Share of the run that is warm-up: 24 minutes in a run of one hour. KV pools and the host KV cache fill during the
/// first 20 minutes.
const WARM_UP_SHARE: f64 = 0.4;
/// Length of each of the two sampling periods (after the warm-up, and at the end of the run), as a share of the run.
const SAMPLE_SHARE: f64 = 0.25;
/// Maximum relative growth of resident memory between the two sampling periods. A process that exceeds both this and
/// `MAX_GROWTH_BYTES` counts as leaking.
const MAX_GROWTH_SHARE: f64 = 0.05;
const MAX_GROWTH_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Short,
    Long,
    Cancelled,
}

/// State shared by all workers.
struct Workload {
    client: Client,
    repo: PathBuf,
    copies: PathBuf,
    until: Instant,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [repo, process, minutes] = &args[..] else {
        bail!("requires three arguments: a git repository, the process id of `cfq up`, and a number of minutes")
    };
    let copies = std::env::temp_dir().join(format!("cfq-soak-{}", std::process::id()));
    std::fs::create_dir_all(&copies)?;
    let began = Instant::now();
    let duration = Duration::from_secs_f64(minutes.parse::<f64>()? * 60.0);
    let load = Arc::new(Workload { client: client()?, repo: repo.into(), copies, until: began + duration });
    let mut workers = JoinSet::new();
    for worker in 0..CONCURRENCY {
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
            _ = every.tick(), if began.elapsed() < duration => {
                let now = memory(process)?;
                let words: Vec<String> = now.iter().map(|(name, bytes)| format!("{name} {} MiB", bytes >> 20)).collect();
                println!("{:5.1} min: {}", began.elapsed().as_secs_f64() / 60.0, words.join(", "));
                samples.push((began.elapsed(), now));
            }
        }
    }
    println!("{ends:?}");
    let count: u64 = ends.values().sum();
    ensure!(count > 0, "no task finished or stopped for a human");
    println!("{count} tasks in {:.0} min, none stuck", began.elapsed().as_secs_f64() / 60.0);
    require_no_sequences(&load.client).await?;
    require_no_growth(&samples, duration)
}

/// Runs tasks one after the other until the end time. Returns the kind and final state of each task.
async fn work(load: Arc<Workload>, worker: u64) -> anyhow::Result<Vec<(Kind, String)>> {
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
    let (max_tokens, notes) = match kind {
        Kind::Short => (60, 0),
        Kind::Long => (400, 120),
        Kind::Cancelled => (300, 30),
    };
    let notes: String =
        (0..notes).map(|n| format!("Note {n} of task {seed}: keep line {n} short and plain. ")).collect();
    let spec = serde_json::from_value(serde_json::json!({
        "description": format!("Write a Python function add_{seed}(n) that returns n + {seed}. {notes}"),
        "language": "python", "repo": repo, "max_iterations": 2,
        "agents": {
            "alpha": { "seed": seed, "max_tokens": max_tokens, "temperature": 0.7 },
            "beta": { "seed": seed, "max_tokens": 160 },
        },
    }))?;
    let began = Instant::now();
    let key = TaskKey::Id(client.submit(&spec, None).await?.id);
    let cancel_at = Duration::from_millis(seed % 40 * 100);
    let mut cancelled = false;
    loop {
        let state = client.task(key).await?.summary.state;
        if state.is_settled() {
            return Ok(state);
        }
        if kind == Kind::Cancelled && !cancelled && began.elapsed() >= cancel_at {
            // The cancel fails if the task has ended in the meantime.
            cancelled = client.cancel(key, "soak").await.is_ok();
        }
        ensure!(began.elapsed() < TASK_TIMEOUT, "{key} is {state} after {TASK_TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until no node runs a sequence; fails after one minute.
async fn require_no_sequences(client: &Client) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let nodes = client.nodes().await?;
        let running: u32 = nodes.iter().flat_map(|n| &n.ledger.models).map(|m| m.running).sum();
        if running == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{running} sequences still run a minute after the last task");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Resident bytes of the child processes of `cfq up`, by name.
fn memory(up: &str) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let Ok(stat) = std::fs::read_to_string(path.join("stat")) else { continue };
        // The process name may contain blanks and parentheses; the fields after it do not.
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

/// Fails if a process's median resident memory at the end of the run exceeds that after the warm-up by more than both
/// limits.
fn require_no_growth(samples: &[(Duration, BTreeMap<String, u64>)], duration: Duration) -> anyhow::Result<()> {
    let median = |name: &str, from: f64, to: f64| {
        let inside = samples.iter().filter(|(at, _)| (duration.mul_f64(from)..duration.mul_f64(to)).contains(at));
        let mut values: Vec<u64> = inside.filter_map(|(_, all)| all.get(name).copied()).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    };
    let names: std::collections::BTreeSet<&String> = samples.iter().flat_map(|(_, all)| all.keys()).collect();
    let mut grown = Vec::new();
    for name in names {
        let (warm, end) =
            (median(name, WARM_UP_SHARE, WARM_UP_SHARE + SAMPLE_SHARE), median(name, 1.0 - SAMPLE_SHARE, 1.0));
        println!("{name}: {} MiB after the warm-up, {} MiB at the end", warm >> 20, end >> 20);
        let growth = end.saturating_sub(warm);
        if growth > MAX_GROWTH_BYTES && growth as f64 > MAX_GROWTH_SHARE * warm as f64 {
            grown.push(name.as_str());
        }
    }
    ensure!(grown.is_empty(), "memory grew after the warm-up: {}", grown.join(", "));
    Ok(())
}
