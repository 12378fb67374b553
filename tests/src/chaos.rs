//! A chaos run: random faults on the processes of a real cluster while a producer submits tasks, and an oracle that
//! compares the result with what the producer knows. `just chaos` runs it; docs/how-to/find-faults.md explains it.

use std::fmt::Write as _;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::FutureExt;
use serde_json::Value;

use crate::cluster::{Cluster, Options};
use crate::repo::UserRepo;
use crate::scripted::{Reply, file, review};

mod inject;
mod plan;
mod producer;
mod repository;
mod verdict;
mod watch;

use inject::Injected;
use plan::Plan;
use producer::Ledger;
use verdict::{Before, Verdict, message, verdict};

/// Time after the last fault within which every acknowledged task must be at rest.
const REST_LIMIT: Duration = Duration::from_secs(120);

/// Delay before each chunk of 8 characters of a reply: a reply takes about a quarter of a second, so that many faults
/// interrupt a running model call.
const CHUNK_DELAY: Duration = Duration::from_millis(15);

/// The figures and violations of a run.
#[derive(Default)]
pub struct Report {
    pub seed: u64,
    pub seconds: u64,
    injected: Injected,
    acknowledged: usize,
    failed_submits: u64,
    verdict: Verdict,
    /// Time from the last fault until every acknowledged task was at rest; `None` if this was never so.
    rest: Option<Duration>,
    pub violations: Vec<String>,
    /// Folder with data and logs.
    pub dir: PathBuf,
}

impl Report {
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<32}{value}");
        };
        let faults = |(kind, count): (&String, &u64)| format!("{kind} {count}");
        let states = |state: &str| self.verdict.states.get(state).copied().unwrap_or(0);
        let by_kind: Vec<String> = self.injected.by_kind.iter().map(faults).collect();
        let merged = [states("merged"), states("escalated") + states("waiting_on_human"), states("failed")];
        line("seed", self.seed.to_string());
        line("seconds", self.seconds.to_string());
        line("faults", format!("{}: {}", self.injected.by_kind.values().sum::<u64>(), by_kind.join(", ")));
        line("services that ended themselves", self.injected.ended.len().to_string());
        line("failed submissions, repeated", self.failed_submits.to_string());
        line("tasks acknowledged", self.acknowledged.to_string());
        line("merged / escalated / failed", format!("{} / {} / {}", merged[0], merged[1], merged[2]));
        let fenced_off: Vec<String> =
            self.verdict.fenced_off.iter().map(|(how, count)| format!("{how} {count}")).collect();
        line(
            "attempts fenced off",
            format!("{}: {}", self.verdict.fenced_off.values().sum::<usize>(), fenced_off.join(", ")),
        );
        line("duplicates", self.verdict.duplicates.to_string());
        line("losses", self.verdict.losses.to_string());
        line("last fault to rest", self.rest.map_or("never".to_owned(), |t| format!("{:.1} s", t.as_secs_f64())));
        for task in &self.verdict.not_merged {
            line("not merged", task.clone());
        }
        for end in &self.injected.ended {
            line("service", end.clone());
        }
        for violation in &self.violations {
            line("VIOLATION", violation.clone());
        }
        text
    }
}

/// Runs faults for `seconds`, waits until the tasks are at rest, and checks the result. Must be called on the thread
/// that runs until the process ends, because the kernel ends the cluster's processes together with this thread.
pub async fn run(seconds: u64, seed: u64) -> Report {
    let mut report = Report { seed, seconds, ..Report::default() };
    if let Err(panic) = AssertUnwindSafe(run_into(&mut report)).catch_unwind().await {
        report.violations.push(format!("the run stopped: {}", message(&*panic)));
    }
    let took_effect = !report.verdict.fenced_off.is_empty() || report.failed_submits > 0;
    if report.injected.by_kind.is_empty() || !took_effect {
        report.violations.push("no fault took effect on an attempt or on a submission".to_owned());
    }
    if report.acknowledged == 0 {
        report.violations.push("no task was acknowledged".to_owned());
    }
    if report.violations.is_empty() {
        drop(std::fs::remove_dir_all(&report.dir));
    }
    report
}

async fn run_into(report: &mut Report) {
    let mut options = Options { dedicated_postgres: true, ..Options::default() };
    // The model server never fails, so a call fails only together with a process; no task may end for this reason.
    options.timing.retry_ceiling_ms = 60_000;
    let mut cluster = Cluster::start_with(options).await;
    cluster.dir.disable_cleanup(true);
    report.dir = cluster.dir.path().to_owned();
    let mut repo = UserRepo::with_uncommitted_changes();
    repo.dir.disable_cleanup(true);
    let link = report.dir.join("user-repository");
    std::os::unix::fs::symlink(repo.path(), &link).unwrap();
    eprintln!("seed {}, {} s, data and logs in {}", report.seed, report.seconds, report.dir.display());
    let written = |messages: &Value| {
        let number = producer::number_in(&messages.to_string()).expect("a prompt names the function");
        file(&format!("{}.py", producer::function(number)), &producer::content(number))
    };
    cluster.models.script("alpha", vec![Reply::Computed(written, CHUNK_DELAY)]);
    cluster.models.script("beta", vec![Reply::Slow(review(95, &[]), CHUNK_DELAY)]);
    let before = Before::of(&repo);
    let ledger = Arc::new(Ledger::default());
    let producer =
        tokio::spawn(producer::produce(cluster.client.clone(), cluster.spec(&repo), report.seed, ledger.clone()));

    tokio::select! {
        () = watch::watch(&cluster, ledger.clone()) => {}
        () = faults_and_rest(report, &cluster, &ledger, producer) => {}
    }

    cluster.wait_until_nodes_idle().await;
    let rows = watch::tasks(&cluster).await.unwrap();
    report.acknowledged = ledger.acknowledged.lock().unwrap().len();
    report.failed_submits = ledger.failed_submits.load(Ordering::SeqCst);
    report.violations.append(&mut report.injected.violations);
    report.violations.append(&mut ledger.violations.lock().unwrap());
    report.verdict = verdict(&cluster, &repo, &before, &ledger, &rows).await;
    report.violations.append(&mut report.verdict.violations);
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
    if report.violations.is_empty() {
        drop(std::fs::remove_dir_all(repo.dir.path()));
    }
}

/// Injects faults until the time is over, then waits until every submission is acknowledged and every acknowledged task
/// is at rest.
async fn faults_and_rest(
    report: &mut Report,
    cluster: &Cluster,
    ledger: &Ledger,
    producer: tokio::task::JoinHandle<()>,
) {
    let began = Instant::now();
    let mut plan = Plan::new(report.seed);
    while began.elapsed() < Duration::from_secs(report.seconds) {
        let fault = plan.next().unwrap();
        report.injected.inject(cluster, fault, began).await;
        drop(std::fs::write(report.dir.join("faults.txt"), &report.injected.timeline));
    }
    let last_fault = Instant::now();
    ledger.stop.store(true, Ordering::SeqCst);
    let mut last = String::new();
    while last_fault.elapsed() < REST_LIMIT {
        report.injected.start_ended_services(cluster);
        last = match watch::tasks(cluster).await {
            _ if !producer.is_finished() => "submissions without an acknowledgement".to_owned(),
            Ok(rows) if rows.iter().all(watch::TaskRow::is_settled) => {
                report.rest = Some(last_fault.elapsed());
                return producer.await.unwrap();
            }
            Ok(rows) => format!("{:#?}", rows.into_iter().filter(|row| !row.is_settled()).collect::<Vec<_>>()),
            Err(error) => error,
        };
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    producer.abort();
    report.violations.push(format!("not at rest {REST_LIMIT:?} after the last fault: {last}"));
}
