//! Cost of a task in the runner, from its grant to its delivered branch, while the history grows. The models and the
//! scheduler are replaced by a table in memory that answers at once, so only git and the loop remain.
//!
//! A small repository is measured from the first task to the last: the cost of the last tasks is divided by that of the
//! first ones. Then the same number of first tasks is measured on a large repository, and divided by those of the small
//! one.
//!
//!     cargo run --release -p cfq-benches --bin merge_cost -- --tasks 5000 --at-once 16 --commits 100000 --files 10000
//!     ... --at-most 1.5    exits with 1 if one of the ratios is above that
#![allow(clippy::print_stdout)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use cfq_agent_runner::checks::{CheckRunner, ProjectChecksConfig};
use cfq_agent_runner::driver::{Assignment, TaskDriver};
use cfq_agent_runner::workstream::{MaintenanceLimits, RepositoryAccess, maintain_mirrors};
use cfq_benches::merge_port::{MemoryPort, Records};
use cfq_convergence::{History, LoopLimits};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::LoopState;
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;
use cfq_sandbox::SandboxLauncher;
use tokio::task::JoinSet;

/// Number of windows into which the tasks are divided; the first and the last are compared.
const WINDOWS: usize = 10;
/// Wait between two rounds of maintenance, as in the runner.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(10);
const FILES_PER_FOLDER: usize = 100;

struct Options {
    tasks: usize,
    at_once: usize,
    commits: usize,
    files: usize,
    at_most: Option<f64>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut options = Options { tasks: 1000, at_once: 16, commits: 100_000, files: 10_000, at_most: None };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--tasks" => options.tasks = value.parse()?,
            "--at-once" => options.at_once = value.parse()?,
            "--commits" => options.commits = value.parse()?,
            "--files" => options.files = value.parse()?,
            "--at-most" => options.at_most = Some(value.parse()?),
            other => bail!("unknown argument {other}"),
        }
    }
    ensure!(options.tasks >= WINDOWS, "--tasks must be at least {WINDOWS}");
    let window = options.tasks / WINDOWS;
    let small = measure("10 commits, 10 files", 10, 10, options.tasks, &options).await?;
    let growth = ratio(&small[WINDOWS - 1], &small[0]);
    println!("last tenth of {} tasks: {growth:.2} times the time of the first tenth", options.tasks);
    let mut worst = growth;
    if options.commits > 0 {
        let name = format!("{} commits, {} files", options.commits, options.files);
        let large = measure(&name, options.commits, options.files, 2 * window, &options).await?;
        let size = ratio(&large[1], &small[1]);
        println!("{name}: {size:.2} times the time of the small repository, after {window} tasks");
        worst = worst.max(size);
    }
    if let Some(at_most) = options.at_most {
        ensure!(worst <= at_most, "a ratio is {worst:.2}, above the allowed {at_most}");
    }
    Ok(())
}

fn ratio(value: &Duration, baseline: &Duration) -> f64 {
    value.as_secs_f64() / baseline.as_secs_f64()
}

/// Runs tasks on a new repository and returns the time of each window of tasks.
async fn measure(
    name: &str,
    commits: usize,
    files: usize,
    tasks: usize,
    options: &Options,
) -> anyhow::Result<Vec<Duration>> {
    let folder = tempfile::tempdir()?;
    let (user, data) = (folder.path().join("user"), folder.path().join("data"));
    let base = create_repository(&user, commits, files)?;
    let records = Arc::new(Records::default());
    let window = options.tasks / WINDOWS;
    let _maintenance = maintain_in_background(data.clone())?;
    // The first task copies the repository; the copy is not part of the comparison.
    let began = Instant::now();
    run_task(&user, &data, &base, 0, records.clone()).await?;
    println!("{name}: first task with the copy of the repository {:.1?}", began.elapsed());
    let (mut times, mut next) = (Vec::new(), 1);
    while next < tasks {
        let (began, cpu) = (Instant::now(), cpu_time()?);
        let end = next + window;
        let mut running = JoinSet::new();
        let mut done = 0;
        while done < window {
            while next < end && running.len() < options.at_once {
                let (user, data, base, records) = (user.clone(), data.clone(), base.clone(), records.clone());
                running.spawn(async move { run_task(&user, &data, &base, next, records).await });
                next += 1;
            }
            running.join_next().await.context("a running task")???;
            done += 1;
        }
        let (wall, cpu) = (began.elapsed(), cpu_time()?.saturating_sub(cpu));
        let per_task = |time: Duration| time.as_secs_f64() * 1000.0 / window as f64;
        println!(
            "{name}: tasks {} to {}: {:.1} tasks/s, {:.1} ms and {:.1} ms of CPU time per task",
            end - window,
            end - 1,
            1000.0 / per_task(wall),
            per_task(wall),
            per_task(cpu)
        );
        times.push(wall);
    }
    Ok(times)
}

/// Maintains the mirror as the runner does, until the sender is dropped.
fn maintain_in_background(data: PathBuf) -> anyhow::Result<SyncSender<()>> {
    let (stop, stopped) = sync_channel(1);
    std::thread::Builder::new().spawn(move || {
        while stopped.recv_timeout(MAINTENANCE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            maintain_mirrors(&data, &MaintenanceLimits::default());
        }
    })?;
    Ok(stop)
}

/// CPU time of this process so far.
fn cpu_time() -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(") ").next().context("/proc/self/stat")?.split(' ').collect();
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    // Linux reports times in units of 10 ms.
    Ok(Duration::from_millis(ticks * 10))
}

async fn run_task(user: &Path, data: &Path, base: &str, n: usize, records: Arc<Records>) -> anyhow::Result<()> {
    let path = format!("new/d{}/t{n}.py", n / FILES_PER_FOLDER);
    let spec: TaskSpec = serde_json::from_value(serde_json::json!({
        "description": format!("Write a function in {path}."), "language": "python", "repo": user, "base": base,
        "agents": { "alpha": { "model": "openai:x/alpha" }, "beta": { "model": "openai:x/beta" } },
    }))?;
    let (task, number) = (TaskId::fresh(), TaskNumber(n as i64 + 1));
    let port = MemoryPort::new(task, records, format!("{path}\n```python\ndef f{n}():\n    return {n}\n```\n"));
    let limits = LoopLimits::default();
    let (spec, history) = (Arc::new(spec), History::default());
    let assignment =
        Assignment { task, number, attempt: 1, spec, limits, history, worker: n % 16 + 1, reviewed: Vec::new() };
    // The product opens repositories in a process of its own; it is left out of this measurement.
    let repositories = RepositoryAccess::in_process();
    // The repository declares no checks.
    let launcher = SandboxLauncher::of_this_program(Vec::<String>::new());
    let checks = CheckRunner::new(launcher, ProjectChecksConfig::default(), data);
    let (policies, timing) = (Arc::default(), Timing::default());
    let driver = TaskDriver::new(port, assignment, data.to_owned(), repositories, checks, policies, timing);
    let history = driver.run().await?;
    ensure!(history.state == LoopState::Idle && history.hand_off.merged.is_some(), "task {n} is not merged");
    Ok(())
}

/// Creates a repository with the git program, and returns HEAD's commit. Every commit changes one file.
fn create_repository(path: &Path, commits: usize, files: usize) -> anyhow::Result<String> {
    let git = |args: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(path).args(args);
        command
    };
    std::fs::create_dir_all(path)?;
    ensure!(git(&["init", "--quiet", "--bare", "--initial-branch=main"]).status()?.success(), "git init failed");
    let mut import = git(&["fast-import", "--quiet"]).stdin(Stdio::piped()).spawn()?;
    {
        let mut input = std::io::BufWriter::new(import.stdin.take().context("the input of git fast-import")?);
        let file = |n: usize| format!("src/d{}/f{n}.py", n / FILES_PER_FOLDER);
        for commit in 0..commits.max(1) {
            let message = format!("commit {commit}");
            writeln!(
                input,
                "commit refs/heads/main\ncommitter user <user@example.org> {} +0000",
                1_000_000_000 + commit
            )?;
            writeln!(input, "data {}\n{message}", message.len())?;
            let changed = if commit == 0 { 0..files } else { commit % files..commit % files + 1 };
            for n in changed {
                let content = format!("# {n}, version {commit}\ndef f():\n    return {commit}\n");
                writeln!(input, "M 100644 inline {}\ndata {}\n{content}", file(n), content.len())?;
            }
        }
        writeln!(input, "done")?;
    }
    ensure!(import.wait()?.success(), "git fast-import failed");
    let head = git(&["rev-parse", "HEAD"]).output()?;
    Ok(String::from_utf8(head.stdout)?.trim().to_owned())
}
