//! Time that cfq adds to an iteration of the review loop, beside the model calls and the project's checks: prompts,
//! edits, commits, durable steps, messages, decisions. Everything is real but the models, which answer at once. The
//! baseline, measured in the same run, is what the git program needs to commit and show such a change.
//!
//!     cargo run -p cfq-tests --bin loop_overhead -- --files 1000 --commits 1000 --tasks 20
//!     ... --check     the project declares a check that does nothing; its checkout and its sandbox are counted
//!     ... --at-most 50    exits with 1 if the median is above that, in ms
//!     ... --events    prints the median time between two events of a task, for each pair that occurs in an iteration
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::loop_step::Step;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::scripted::{Reply, file, review};

const FILES_PER_FOLDER: usize = 100;
/// Iterations of a task: the scores of the critic. They rise, so that only the last one converges.
const SCORES: [u32; 5] = [40, 50, 60, 70, 95];
/// Number of commits of the baseline.
const BASELINE_COMMITS: usize = 20;

struct Arguments {
    files: usize,
    commits: usize,
    tasks: usize,
    check: bool,
    events: bool,
    at_most: Option<f64>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = Arguments { files: 1000, commits: 1000, tasks: 20, check: false, events: false, at_most: None };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        match name.as_str() {
            "--check" => arguments.check = true,
            "--events" => arguments.events = true,
            _ => {}
        }
        if matches!(name.as_str(), "--check" | "--events") {
            continue;
        }
        let value = given.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--files" => arguments.files = value.parse()?,
            "--commits" => arguments.commits = value.parse()?,
            "--tasks" => arguments.tasks = value.parse()?,
            "--at-most" => arguments.at_most = Some(value.parse()?),
            other => bail!("unknown argument {other}"),
        }
    }
    ensure!(arguments.files > 0 && arguments.tasks > 0, "--files and --tasks must be at least 1");
    let folder = tempfile::Builder::new().prefix("cfq-loop-").tempdir()?;
    let repo = folder.path().join("repo");
    let base = create_repository(&repo, &arguments)?;
    let mut baseline = git_commits(&repo, &folder.path().join("clone"))?;
    // The product's intervals, not those of tests.
    let cluster = Cluster::start_with(Options { timing: Timing::default(), ..Options::default() }).await;
    let (mut overheads, mut between) = (Vec::new(), BTreeMap::<_, Vec<f64>>::new());
    // The first task copies the repository.
    for n in 0..=arguments.tasks {
        let path = format!("new/d{}/t{n}.py", n / FILES_PER_FOLDER);
        let reply = |i: usize| Reply::Text(file(&path, &format!("def f():\n    return {}\n", n * 10 + i)));
        cluster.models.script("alpha", (0..SCORES.len()).map(reply).collect());
        cluster.models.script("beta", SCORES.map(|score| Reply::Text(review(score, &[]))).to_vec());
        let spec: TaskSpec = serde_json::from_value(serde_json::json!({
            "description": format!("Write f() in {path}."), "language": "python", "repo": repo, "base": base,
        }))?;
        let task = cluster.submit(&spec).await;
        let detail = cluster.wait_until_settled(task).await;
        ensure!(detail.summary.state == TaskState::Merged, "task {n} is {}: {}", detail.summary.state, detail.reason);
        let events = cluster.client.events(task, 0).await?.events;
        if n > 0 {
            overheads.extend(overheads_of(&events)?);
            for [before, after] in events.array_windows() {
                let pair = format!("{} -> {}", kind(before), kind(after));
                between.entry(pair).or_default().push((after.at - before.at) * 1000.0);
            }
        }
    }
    cluster.finish().await;
    let Arguments { files, commits, tasks, check, events, at_most } = arguments;
    for (pair, times) in between.iter_mut().filter(|(_, times)| events && times.len() >= tasks * SCORES.len() / 2) {
        println!("{pair}: {:.1} ms, {} times", median(times), times.len());
    }
    let with = if check { "with a check" } else { "without checks" };
    let (own, git) = (median(&mut overheads), median(&mut baseline));
    let p95 = overheads[overheads.len() * 95 / 100];
    println!(
        "{files} files, {commits} commits, {with}: {own:.1} ms an iteration at the median of {} (95 %: {p95:.1} ms, {tasks} \
         tasks); git needs {git:.1} ms for a commit and its diff: ratio {:.2}",
        overheads.len(),
        own / git
    );
    if let Some(at_most) = at_most {
        ensure!(own <= at_most, "the median is {own:.1} ms, above the allowed {at_most} ms");
    }
    Ok(())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The time of each iteration in ms, from the decision before it (or the start) to its own decision, without the time
/// that the model calls and the checks report.
fn overheads_of(events: &[Event]) -> anyhow::Result<Vec<f64>> {
    let (mut overheads, mut since, mut other_ms) = (Vec::new(), None, 0.0);
    for event in events {
        match &event.body {
            EventBody::StepCommitted { step: Step::Started { .. }, .. } => since = Some(event.at),
            EventBody::StepCommitted { step: Step::Checked { ran, .. }, .. } => {
                other_ms += ran.iter().map(|run| run.ms as f64).sum::<f64>();
            }
            EventBody::JobChanged { usage: Some(usage), .. } => other_ms += usage.total_ms as f64,
            EventBody::StepCommitted { step: Step::Decided { .. }, .. } => {
                let began = since.replace(event.at).context("a decision before the start")?;
                overheads.push((event.at - began) * 1000.0 - std::mem::take(&mut other_ms));
            }
            _ => {}
        }
    }
    ensure!(overheads.len() == SCORES.len(), "{} iterations instead of {}", overheads.len(), SCORES.len());
    Ok(overheads)
}

/// Kind of an event, with that of its step, or the role and state of its job.
fn kind(event: &Event) -> String {
    match &event.body {
        EventBody::StepCommitted { step, .. } => step.kind().to_owned(),
        EventBody::JobChanged { role, state, .. } => format!("{role} {state}"),
        _ => "other".to_owned(),
    }
}

fn git(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(folder).args(["-c", "user.name=a", "-c", "user.email=a@example.org"]).args(arguments);
    command
}

fn succeed(mut command: Command) -> anyhow::Result<Vec<u8>> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}

/// Creates a repository in which every commit but the first changes one file, and returns HEAD's commit.
fn create_repository(path: &Path, arguments: &Arguments) -> anyhow::Result<String> {
    let Arguments { files, commits, check, .. } = *arguments;
    std::fs::create_dir_all(path)?;
    succeed(git(path, &["init", "--quiet", "--initial-branch=main"]))?;
    let mut import = git(path, &["fast-import", "--quiet"]).stdin(Stdio::piped()).spawn()?;
    {
        let mut input = std::io::BufWriter::new(import.stdin.take().context("the input of git fast-import")?);
        let checks = "[[check]]\nname = \"nothing\"\nrun = [\"true\"]\n";
        for commit in 0..commits.max(1) {
            let time = 1_000_000_000 + commit;
            writeln!(input, "commit refs/heads/main\ncommitter user <user@example.org> {time} +0000\ndata 1\nm")?;
            let changed = if commit == 0 { 0..files } else { commit % files..commit % files + 1 };
            for n in changed {
                let content = format!("# {n}, version {commit}\ndef f():\n    return {commit}\n");
                let path = format!("src/d{}/f{n}.py", n / FILES_PER_FOLDER);
                writeln!(input, "M 100644 inline {path}\ndata {}\n{content}", content.len())?;
            }
            if commit == 0 && check {
                writeln!(input, "M 100644 inline .cfq/checks.toml\ndata {}\n{checks}", checks.len())?;
            }
        }
        writeln!(input, "done")?;
    }
    ensure!(import.wait()?.success(), "git fast-import failed");
    Ok(String::from_utf8(succeed(git(path, &["rev-parse", "HEAD"]))?)?.trim().to_owned())
}

/// The times of commits with the git program in a clone, in ms: a file is written, added and committed, and the diff
/// is printed.
fn git_commits(repo: &Path, clone: &Path) -> anyhow::Result<Vec<f64>> {
    let from = repo.to_str().context("the path of the repository")?;
    succeed(git(repo, &["clone", "--quiet", "--shared", from, clone.to_str().context("the path of the clone")?]))?;
    let mut times = Vec::new();
    for n in 0..BASELINE_COMMITS {
        let began = Instant::now();
        std::fs::write(clone.join("new.py"), format!("def f():\n    return {n}\n"))?;
        succeed(git(clone, &["add", "new.py"]))?;
        succeed(git(clone, &["commit", "--quiet", "-m", "m"]))?;
        succeed(git(clone, &["diff", "HEAD~1"]))?;
        times.push(Duration::as_secs_f64(&began.elapsed()) * 1000.0);
    }
    Ok(times)
}
