//! Injects random faults into a cluster of the real binary while tasks are submitted, and checks the result from
//! outside. Exits with 1 and lists the violations if there are any; data folder and logs are then kept.
//!
//!     cargo run -p cfq-tests --bin chaos -- SECONDS SEED
#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use anyhow::{Context, bail};

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, seed] = &args[..] else { bail!("requires two arguments: the seconds of faults, and a seed") };
    let seconds = seconds.parse().context("SECONDS is not a number")?;
    let seed = seed.parse().context("SEED is not a number")?;
    let report = cfq_tests::chaos::run(seconds, seed).await;
    print!("{}", report.text());
    if report.violations.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("{} violations; data and logs are in {}", report.violations.len(), report.dir.display());
    Ok(ExitCode::FAILURE)
}
