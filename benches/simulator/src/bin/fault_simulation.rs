//! Simulates a cluster with random faults and checks its properties after every event; the module `cluster::checks`
//! lists them. Exits with 1 if one was violated.
//!
//!     cargo run --release -p cfq-simulator --bin fault_simulation -- --nodes 1000 --jobs 1000000 --hours 24 --faults daily
//!
//! `--faults` is `none`, `daily` (each node crashes once a day) or `harsh` (all faults, often). `--seeds N`
//! runs N seeds, one after the other, starting at `--seed`.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use anyhow::{bail, ensure};
use cfq_simulator::arguments::Arguments;
use cfq_simulator::cluster::{self, ClusterConfig, Faults, Outcome, Timing};
use cfq_simulator::engine::EngineConfig;
use cfq_simulator::trace::{TaskLoad, task_loops};

const NAMES: &[&str] =
    &["nodes", "jobs", "hours", "models", "seed", "seeds", "faults", "heartbeat-ms", "plan-delay-ms", "resync-ms"];

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse(NAMES)?;
    ensure!(arguments.positional.is_empty(), "unknown argument {:?}", arguments.positional[0]);
    let hours: f64 = arguments.get("hours", 1.0)?;
    let name: String = arguments.get("faults", "harsh".to_owned())?;
    let faults = match name.as_str() {
        "none" => Faults::default(),
        "daily" => Faults::daily(hours * 3_600.0),
        "harsh" => Faults::harsh(hours * 3_600.0),
        _ => bail!("--faults cannot be {name:?}; known: none, daily, harsh"),
    };
    let heartbeat_ms = arguments.get("heartbeat-ms", 2_000)?;
    let timing = Timing {
        heartbeat_ms,
        lease_ttl_ms: 3 * heartbeat_ms,
        plan_delay_ms: arguments.get("plan-delay-ms", 10)?,
        resync_ms: arguments.get("resync-ms", 5_000)?,
        ..Timing::default()
    };
    let load = TaskLoad {
        models: arguments.get("models", 4)?,
        jobs: arguments.get("jobs", 10_000)?,
        duration_s: hours * 3_600.0,
    };
    let nodes = arguments.get("nodes", 20)?;
    let (first, seeds): (u64, u64) = (arguments.get("seed", 1)?, arguments.get("seeds", 1)?);
    let mut violated = 0;
    for seed in first..first.saturating_add(seeds) {
        let engine =
            EngineConfig { kv_tokens: 65_536, max_sequences: 4, models_in_memory: 2, ..EngineConfig::default() };
        let config =
            ClusterConfig { nodes, engine, timing, faults, seed, random_priorities: true, repeat_one_plan_in: 10 };
        let began = Instant::now();
        let outcome = cluster::run(&task_loops(load, seed), config);
        print(seed, &outcome, began.elapsed().as_secs_f64());
        violated += outcome.violations.count;
    }
    ensure!(violated == 0, "{violated} violated properties");
    Ok(())
}

fn print(seed: u64, outcome: &Outcome, wall_s: f64) {
    let [done, failed, dead, cancelled] = outcome.ends;
    println!("seed {seed}: {:.0} s of virtual time in {wall_s:.1} s", outcome.virtual_s);
    println!(
        "  jobs: {done} done, {failed} failed, {dead} dead letters, {cancelled} cancelled, {} open",
        outcome.unfinished
    );
    println!("  longest wait {:.1} s; {} model loads", outcome.metrics.longest_wait_ms / 1e3, outcome.metrics.loads);
    println!("  {:?}", outcome.tables);
    println!("  {:?}", outcome.network);
    println!("  {:?}", outcome.counts);
    println!("  violated properties: {}", outcome.violations.count);
    outcome.violations.first.iter().for_each(|violation| println!("    {violation}"));
}
