//! Replays a trace of model calls in virtual time: with the scheduler's planner and, in the same run, with three
//! routers as baselines. Prints prefix reuse (the share of the prompt tokens that were cached), its ratio to one cache
//! with the memory of all nodes, the time to first token, model loads and the longest wait for a node.
//!
//!     cargo run --release -p cfq-simulator --bin simulate -- TRACE --workers 4 --kv-tokens 262144 --speed 0.25
//!
//! TRACE is a file in the format of the Mooncake traces or in the agentic one, or `alternating:CALLS:INTERVAL_MS`. See
//! `EngineConfig` for the defaults of the other arguments.
#![allow(clippy::print_stdout)]

use std::path::Path;

use anyhow::{Context, bail};
use cfq_simulator::arguments::Arguments;
use cfq_simulator::cluster::{self, ClusterConfig, Faults, Timing};
use cfq_simulator::engine::EngineConfig;
use cfq_simulator::metrics::Metrics;
use cfq_simulator::routers::{self, Router};
use cfq_simulator::trace::{self, TraceOptions, Workload, alternating};

const NAMES: &[&str] = &[
    "workers",
    "kv-tokens",
    "host-tokens",
    "speed",
    "max-prompt",
    "seed",
    "policy",
    "slots",
    "models-in-memory",
    "prefill-rate",
    "decode-rate",
    "load-ms",
    "batch-slowdown",
];

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse(NAMES)?;
    let name = arguments.positional.first().context("first argument: a trace file")?;
    let options =
        TraceOptions { speed: arguments.get("speed", 1.0)?, max_prompt_tokens: arguments.get("max-prompt", 32_768)? };
    let workload = workload(name, options)?;
    let defaults = EngineConfig::default();
    let engine = EngineConfig {
        kv_tokens: arguments.get("kv-tokens", defaults.kv_tokens)?,
        host_tokens: arguments.get("host-tokens", defaults.host_tokens)?,
        max_sequences: arguments.get("slots", defaults.max_sequences)?,
        models_in_memory: arguments.get("models-in-memory", defaults.models_in_memory)?,
        prefill_rate: arguments.get("prefill-rate", defaults.prefill_rate)?,
        decode_rate: arguments.get("decode-rate", defaults.decode_rate)?,
        batch_slowdown: arguments.get("batch-slowdown", defaults.batch_slowdown)?,
        load_ms: arguments.get("load-ms", defaults.load_ms)?,
        ..defaults
    };
    let workers: usize = arguments.get("workers", 4)?;
    let policy: String = arguments.get("policy", "all".to_owned())?;
    println!(
        "{} calls of {} models, {} prompt tokens; {workers} nodes with {engine:?}",
        workload.calls.len(),
        workload.models.len(),
        workload.prompt_tokens(),
    );
    println!(
        "{:<14} {:>7} {:>7} {:>9} {:>10} {:>10} {:>6} {:>10} {:>10}",
        "policy", "reuse", "pooled", "of pooled", "p50 ttft", "p99 ttft", "loads", "max wait", "makespan"
    );
    let seed = arguments.get("seed", 1)?;
    let mut is_known = false;
    for (name, router) in [
        ("planner", None),
        ("round-robin", Some(Router::RoundRobin)),
        ("least-loaded", Some(Router::LeastLoaded)),
        ("cache-aware", Some(Router::CacheAware)),
    ] {
        if policy != "all" && policy != name {
            continue;
        }
        is_known = true;
        let metrics = match router {
            Some(router) => routers::run(&workload, workers, engine, router),
            None => planner(&workload, workers, engine, seed)?,
        };
        print(name, metrics);
    }
    if !is_known {
        bail!("--policy cannot be {policy:?}; known: all, planner, round-robin, least-loaded, cache-aware");
    }
    Ok(())
}

fn workload(name: &str, options: TraceOptions) -> anyhow::Result<Workload> {
    let Some(numbers) = name.strip_prefix("alternating:") else {
        return Ok(trace::read(Path::new(name), options)?);
    };
    let (calls, interval_ms) = numbers.split_once(':').context("expected alternating:CALLS:INTERVAL_MS")?;
    Ok(alternating(2, calls.parse()?, interval_ms.parse()?, 8, 100))
}

fn planner(workload: &Workload, nodes: usize, engine: EngineConfig, seed: u64) -> anyhow::Result<Metrics> {
    let (timing, faults) = (Timing::default(), Faults::default());
    let config =
        ClusterConfig { nodes, engine, timing, faults, seed, random_priorities: false, repeat_one_plan_in: 100 };
    let outcome = cluster::run(workload, config);
    if outcome.violations.count > 0 {
        bail!("{} violated properties: {:#?}", outcome.violations.count, outcome.violations.first);
    }
    Ok(outcome.metrics)
}

fn print(name: &str, mut metrics: Metrics) {
    println!(
        "{name:<14} {:>7.3} {:>7.3} {:>9.3} {:>8.0}ms {:>8.0}ms {:>6} {:>9.1}s {:>9.1}s",
        metrics.reuse(),
        metrics.pooled.reuse(),
        metrics.ratio_to_pooled(),
        metrics.first_token_percentile(50.0),
        metrics.first_token_percentile(99.0),
        metrics.loads,
        metrics.longest_wait_ms / 1e3,
        metrics.makespan_s,
    );
}
