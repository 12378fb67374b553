//! How long `cfq status`, `cfq ls` and `cfq show` take with many tasks in the database. The baseline, measured in the same
//! run, is `cfq --version`: the start of the program.
//!
//!     cargo run -p cfq-tests --bin command_latency -- --tasks 10000 --runs 30
//!
//! Exits with 1 if the median of a command is above its limit.
#![allow(clippy::print_stdout)]

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use cfq_proto::http::{BatchRequest, BulkRequest, TaskAction};
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::repo::UserRepo;

/// Limit of the median, in ms.
const LIMIT_MS: f64 = 50.0;
/// Number of tasks in one request.
const BATCH: usize = 100;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (mut tasks, mut runs) = (10_000_usize, 30_usize);
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--tasks" => tasks = value.parse()?,
            "--runs" => runs = value.parse()?,
            other => bail!("unknown argument {other}"),
        }
    }
    ensure!(tasks >= BATCH && runs > 0, "--tasks must be at least {BATCH}, and --runs at least 1");
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    // They do not start.
    spec.run_at = Some(4_000_000_000);
    for n in (0..tasks).step_by(BATCH) {
        spec.description = format!("Write add(a, b), batch {n}");
        let batch = BatchRequest { tasks: vec![spec.clone(); BATCH] };
        cluster.client.submit_batch(&batch, Some(&format!("batch-{n}"))).await?;
        // Most tasks of a database have ended; those of the last batch have not.
        if n + BATCH >= tasks {
            break;
        }
        let mut request = BulkRequest {
            action: TaskAction::Cancel { reason: String::new() },
            tasks: Vec::new(),
            state: None,
            labels: Vec::new(),
            all: true,
            dry_run: false,
            after: None,
        };
        loop {
            let reply = cluster.client.act_on_tasks(&request).await?;
            if reply.next.is_none() {
                break;
            }
            request.after = reply.next;
        }
    }
    let program = binary::cfq();
    let time = |args: &[&str]| -> anyhow::Result<f64> {
        let mut command = Command::new(&program);
        command.args(args).env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN).stdout(Stdio::null());
        let began = Instant::now();
        ensure!(command.status()?.success(), "cfq {args:?} failed");
        Ok(began.elapsed().as_secs_f64() * 1000.0)
    };
    let commands: [&[&str]; 5] = [
        &["--version"],
        &["status"],
        &["ls"],
        &["show", "t50"],
        &["ls", "--repo", repo.dir.path().to_str().unwrap_or(".")],
    ];
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); commands.len()];
    // In turns, so that a busy moment of the machine affects all.
    for _ in 0..runs {
        for (args, times) in commands.iter().zip(&mut times) {
            times.push(time(args)?);
        }
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let medians: Vec<f64> = times.iter_mut().map(median).collect();
    println!("{tasks} tasks, {runs} runs each, medians:");
    let mut is_slow = false;
    for (args, ms) in commands.iter().zip(&medians) {
        let name = if args.contains(&"--repo") { "ls --repo DIR".to_owned() } else { args.join(" ") };
        println!("cfq {name:14} {ms:6.1} ms, {:4.1} times `cfq --version`", ms / medians[0]);
        is_slow |= *ms > LIMIT_MS;
    }
    cluster.finish().await;
    ensure!(!is_slow, "a command takes more than {LIMIT_MS} ms");
    Ok(())
}
