//! Success rate of the configured models on the demo's task, over a number of sampling seeds. "Right" means that the
//! best artifact parses and defines the named function; it is not executed.
//!
//!     CFQ_URL=... CFQ_TOKEN=... cargo run -p cfq-benches --bin seeds -- REPO 20    # 20 seeds
#![allow(clippy::print_stdout)]

use anyhow::Context;
use cfq_benches::client;
use cfq_proto::ids::TaskKey;
use std::time::{Duration, Instant};

const TASK: &str = "Write a Python function is_even(n) that returns True if n is even and False otherwise.";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let repo = args.next().context("first argument: a git repository")?;
    let seeds: u64 = args.next().map_or(Ok(20), |n| n.parse())?;
    let client = client()?;
    let copies = std::env::temp_dir().join(format!("cfq-seeds-{}", std::process::id()));
    std::fs::create_dir_all(&copies)?;
    let (mut right, mut merged, mut escalated, mut iterations) = (0, 0, 0, 0);
    let start = Instant::now();
    for seed in 1..=seeds {
        // A separate clone for each task, because tasks that change the same lines of one repository would conflict.
        let copy = copies.join(format!("seed-{seed}"));
        let cloned = std::process::Command::new("git").args(["clone", "--quiet", &repo]).arg(&copy).status()?;
        anyhow::ensure!(cloned.success(), "cannot clone {repo}");
        // The same agent settings as in `cfq demo`.
        let agent = serde_json::json!({ "seed": seed, "max_tokens": 320 });
        let spec = serde_json::from_value(serde_json::json!({
            "description": TASK, "language": "python", "repo": copy, "max_iterations": 3,
            "agents": { "alpha": agent, "beta": agent },
        }))?;
        let task = TaskKey::Id(client.submit(&spec, None).await?.id);
        let detail = loop {
            let detail = client.task(task).await?;
            if detail.summary.state.is_settled() {
                break detail;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        // Quarantined artifacts are never the best, so the best artifact parses.
        let defines = match detail.best_iteration {
            None => false,
            Some(n) => {
                let chain = client.artifacts(task, Some(n)).await?;
                let last = chain.artifacts.last();
                last.is_some_and(|a| {
                    a.files.iter().any(|f| f.content.as_deref().is_some_and(|c| c.contains("def is_even(")))
                })
            }
        };
        right += u64::from(defines);
        iterations += detail.iterations.len();
        match detail.summary.state {
            cfq_proto::task::TaskState::Merged => merged += 1,
            cfq_proto::task::TaskState::Escalated => escalated += 1,
            _ => {}
        }
        println!(
            "seed {seed:3}: {} after {} iterations, best score {:?}, {}",
            detail.summary.state,
            detail.iterations.len(),
            detail.summary.best_score,
            if defines { "right" } else { "wrong" }
        );
    }
    println!(
        "{right} of {seeds} right; {merged} merged, {escalated} escalated; {:.2} iterations and {:.1} s per task",
        iterations as f64 / seeds as f64,
        start.elapsed().as_secs_f64() / seeds as f64
    );
    Ok(())
}
