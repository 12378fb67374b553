//! The queue under random faults: the properties of `cfq_simulator::cluster::checks` hold for fixed seeds, and for one
//! from `CFQ_SIMULATION_SEED`.

use cfq_simulator::cluster::{self, ClusterConfig, Faults, Outcome, Timing};
use cfq_simulator::engine::EngineConfig;
use cfq_simulator::trace::{TaskLoad, task_loops};

/// Seed if `CFQ_SIMULATION_SEED` is not set; none of the fixed seeds.
const DEFAULT_SEED: u64 = 4711;

fn simulate(seed: u64, faults: Faults) -> Outcome {
    let load = TaskLoad { models: 3, jobs: 600, duration_s: 900.0 };
    let engine = EngineConfig { kv_tokens: 65_536, max_sequences: 4, models_in_memory: 1, ..EngineConfig::default() };
    let timing = Timing { plan_delay_ms: 20, ..Timing::default() };
    let config =
        ClusterConfig { nodes: 6, engine, timing, faults, seed, random_priorities: true, repeat_one_plan_in: 3 };
    cluster::run(&task_loops(load, seed), config)
}

/// Checks the properties. Returns how often each kind of fault, and of reaction to it, happened.
fn properties_hold(seed: u64) -> [u64; 13] {
    let outcome = simulate(seed, Faults::harsh(900.0));
    assert_eq!(outcome.violations.count, 0, "seed {seed}: {:#?}", outcome.violations.first);
    let [done, failed, dead, cancelled] = outcome.ends;
    assert_eq!(done + failed + dead + cancelled, 600, "seed {seed}: {outcome:?}");
    assert!(done > 500, "seed {seed}: {outcome:?}");
    [
        outcome.network.lost,
        outcome.network.duplicated,
        outcome.tables.lost,
        outcome.tables.rejected,
        outcome.counts.crashes,
        outcome.counts.leaders,
        outcome.counts.replaced,
        outcome.counts.repeated,
        outcome.counts.compared,
        outcome.tables.refused,
        outcome.counts.stopped,
        outcome.counts.fenced,
        cancelled,
    ]
}

#[test]
fn properties_hold_under_faults() {
    let mut happened = [0; 13];
    for seed in 1..=8 {
        happened.iter_mut().zip(properties_hold(seed)).for_each(|(sum, count)| *sum += count);
    }
    // A run without faults would show nothing.
    assert!(happened.iter().all(|count| *count > 0), "{happened:?}");
}

#[test]
fn properties_hold_for_the_seed_of_the_environment() {
    let seed = std::env::var("CFQ_SIMULATION_SEED").map(|text| text.parse().expect("CFQ_SIMULATION_SEED is a number"));
    properties_hold(seed.unwrap_or(DEFAULT_SEED));
}

#[test]
fn same_seed_gives_the_same_run() {
    let summary = |seed| {
        let outcome = simulate(seed, Faults::harsh(900.0));
        (outcome.counts, outcome.tables, outcome.network, outcome.ends, outcome.virtual_s.to_bits())
    };
    assert_eq!(summary(5), summary(5));
    assert_ne!(summary(5), summary(6));
}

#[test]
fn nothing_is_lost_or_rejected_without_faults() {
    let outcome = simulate(1, Faults::default());
    assert_eq!(outcome.violations.count, 0, "{:#?}", outcome.violations.first);
    assert_eq!(outcome.ends, [600, 0, 0, 0]);
    assert_eq!((outcome.tables.lost, outcome.tables.rejected, outcome.counts.stopped), (0, 0, 0));
}
