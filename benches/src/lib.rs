//! Benchmarks. Each prints a ratio to a baseline measured in the same run, because machines differ and are noisy.
//! Measured results and their commands are in docs/benchmarks.md.

pub mod engine;
pub mod llama_cpp;
pub mod merge_port;
pub mod random_model;

use anyhow::{Context, ensure};
use cfq_proto::client::Client;
use std::time::Duration;

/// Creates a client for the running server at `CFQ_URL`, with the token `CFQ_TOKEN`.
pub fn client() -> anyhow::Result<Client> {
    let url = std::env::var("CFQ_URL").context("set CFQ_URL to a running server")?;
    let token = std::env::var("CFQ_TOKEN").context("set CFQ_TOKEN to the API token of the server at CFQ_URL")?;
    Ok(Client::new(cfq_link::outbound::api_client()?, &url, token.trim()))
}

/// Median of the times; zero if there are none.
pub fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The `p`-th percentile of the times; zero if there are none.
pub fn percentile(times: &mut [Duration], p: usize) -> Duration {
    times.sort();
    times.get((times.len() * p / 100).min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Fails the benchmark if one of these ratios is below `at_least`.
pub fn require_ratio(ratios: &[(&str, f64)], at_least: Option<f64>) -> anyhow::Result<()> {
    for (name, ratio) in ratios {
        let minimum = at_least.unwrap_or(f64::NEG_INFINITY);
        ensure!(*ratio >= minimum, "{name}: {ratio:.2} times the baseline, below the required {minimum}");
    }
    Ok(())
}
