//! Time from the start of a `cfq submit` process until the task is accepted, and latency of the API request alone. The
//! baselines, measured in the same run, are `cfq --version` and a request without side effects.
//!
//!     CFQ_URL=... CFQ_TOKEN=... cargo run -p cfq-benches --bin submit_latency -- target/debug/cfq REPO
#![allow(clippy::print_stdout)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cfq_benches::{client, median, percentile};
use cfq_proto::ids::TaskKey;

const RUNS: usize = 40;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let cfq = args.next().context("first argument: the cfq binary")?;
    let repo = args.next().context("second argument: a git repository")?;
    let client = client()?;
    let (mut version, mut submit, mut healthy, mut accepted) = (vec![], vec![], vec![], vec![]);
    for run in 0..RUNS {
        version.push(timed(Command::new(&cfq).arg("--version"))?);
        submit.push(timed(Command::new(&cfq).args([
            "submit",
            "bench: do nothing",
            "--repo",
            &repo,
            "--priority",
            "P3",
        ]))?);
        let start = Instant::now();
        client.check_ready().await?;
        healthy.push(start.elapsed());
        let spec = serde_json::from_value(serde_json::json!({
            "description": format!("bench {run}: do nothing"), "repo": repo, "priority": "P3",
        }))?;
        let start = Instant::now();
        let reply = client.submit(&spec, None).await?;
        accepted.push(start.elapsed());
        client.cancel(TaskKey::Id(reply.id), "bench").await?;
    }
    for task in client.tasks(None, 1000).await?.tasks {
        if !task.state.is_terminal() && task.title.starts_with("bench") {
            client.cancel(TaskKey::Id(task.id), "bench").await?;
        }
    }
    line("cfq --version (baseline)", &mut version);
    line("cfq submit to accepted", &mut submit);
    line("GET /readyz (baseline)", &mut healthy);
    line("POST /api/v1/tasks", &mut accepted);
    println!("ratio submit / version: {:.2}", ratio(&mut submit, &mut version));
    println!("ratio POST / readyz:    {:.2}", ratio(&mut accepted, &mut healthy));
    Ok(())
}

fn timed(command: &mut Command) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let status = command.stdout(Stdio::null()).stderr(Stdio::inherit()).stdin(Stdio::null()).status()?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(start.elapsed())
}

fn line(what: &str, times: &mut [Duration]) {
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    println!("{what:28} median {:7.2} ms   p95 {:7.2} ms", ms(median(times)), ms(percentile(times, 95)));
}

fn ratio(a: &mut [Duration], b: &mut [Duration]) -> f64 {
    median(a).as_secs_f64() / median(b).as_secs_f64()
}
