//! Benchmarks. Each prints a ratio against a yardstick of the same run, since machines differ and are noisy; the figures that
//! were seen, with the commands, are in docs/benchmarks.md.

pub mod engine;
pub mod random_model;
pub mod yardstick;

use anyhow::{Context, ensure};
use cfq_proto::client::Client;
use std::time::Duration;

/// The running server that `CFQ_URL` and `CFQ_TOKEN` name.
pub fn client() -> anyhow::Result<Client> {
    let url = std::env::var("CFQ_URL").context("set CFQ_URL to a running server")?;
    let token = std::env::var("CFQ_TOKEN").context("set CFQ_TOKEN to its token")?;
    Ok(Client::new(cfq_link::outbound::api_client()?, &url, token.trim()))
}

pub fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

pub fn percentile(times: &mut [Duration], p: usize) -> Duration {
    times.sort();
    times.get((times.len() * p / 100).min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Ends the benchmark as failed where one of these ratios is below what was asked for.
pub fn hold(ratios: &[(&str, f64)], at_least: Option<f64>) -> anyhow::Result<()> {
    for (name, ratio) in ratios {
        let wanted = at_least.unwrap_or(f64::NEG_INFINITY);
        ensure!(*ratio >= wanted, "{name}: {ratio:.2} times the yardstick, and at least {wanted} were asked for");
    }
    Ok(())
}
