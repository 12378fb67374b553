//! Runs the checks that a project declares, for example its tests, on a commit.
//!
//! Each run of a check gets a checkout of its own (see `kept_checkouts`), and runs in a sandbox: it reads the
//! checkout, what the project's preparations have installed (see `prepared_environment`), and the system's programs,
//! and has no network. A check that cannot run is an error, never a passed check. Without a sandbox no check runs. What
//! counts as passed is decided in `verdict`; outcomes on commits to compare with are cached.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cfq_link::child::Account;
use cfq_proto::review::{CheckRun, Finding, LineCoverage};
use cfq_sandbox::{
    CommandEnd, CommandLimits, CommandOutcome, LaunchError, MissingLevel, SandboxAccount, SandboxLauncher,
    SandboxLevel, SandboxSupport, SandboxedCommand,
};
use sha2::{Digest, Sha256};

use super::DeclaredChecks;
use super::activity::{ActivityGuard, CurrentActivities};
use super::baseline_cache::BaselineCache;
use super::check_findings::{Comparison, FindingBudget, about_target, findings, test_names};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::config::ProjectChecksConfig;
use super::coverage_report::CoverageReport;
use super::environment::PreparedEnvironment;
use super::kept_checkouts::KeptCheckouts;
use super::preparation::hex;
use super::prepared_store::PreparedStore;
use super::report_file;
use super::test_report::{ReportError, TestReport};
use super::verdict::{Baseline, CheckOutcome, Verdict, coverage_problem, is_repeatable, judge};
use crate::workstream::{CheckedOut, Mirror};

/// Start of the name of the folder with the checkouts, in the configured folder or the runner's data folder.
const CHECKOUTS: &str = "cfq-checks";
/// Name of the folder in it with the checkouts that later runs may use.
const KEPT: &str = "kept";
/// Start of the name of the folder with what preparations have installed, beside it.
const PREPARED: &str = "cfq-prepared";
/// Maximum number of runs of one check to judge one result: three on the base commit, two on the result.
pub(crate) const MAX_RUNS: u32 = 5;

/// Runs checks. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CheckRunner {
    pub(super) launcher: SandboxLauncher,
    pub(super) config: Arc<ProjectChecksConfig>,
    /// Folder of the checkouts.
    pub(super) root: PathBuf,
    pub(super) prepared: PreparedStore,
    /// What this machine offers, once it is known.
    support: Arc<OnceLock<SandboxSupport>>,
    pub(super) baselines: Arc<BaselineCache>,
    pub(super) activities: CurrentActivities,
    /// `None` if checkouts are not kept.
    kept: Option<KeptCheckouts>,
}

/// The commits that are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedCommits {
    /// The commit that is checked.
    pub result: String,
    /// The commit that it is compared with.
    pub base: String,
}

/// What all runs of a check share.
pub(super) struct RunContext<'a> {
    pub level: SandboxLevel,
    /// Folder of the checkout and of the temporary files.
    pub folder: PathBuf,
    /// Mirror with the commits.
    pub mirror: &'a Mirror,
    pub cancelled: &'a AtomicBool,
    pub environment: PreparedEnvironment,
    pub activity: ActivityGuard,
}

/// A run of a check, and what its checkout contained when the check started.
struct FinishedRun {
    outcome: CommandOutcome,
    report: Option<Result<TestReport, ReportError>>,
    coverage: Option<Result<CoverageReport, ReportError>>,
    content: CheckedOut,
}

impl RunContext<'_> {
    /// Folder of the checkout.
    pub fn work(&self) -> PathBuf {
        self.folder.join("work")
    }

    /// Folder of the temporary files and of the home folder.
    pub fn scratch(&self) -> PathBuf {
        self.folder.join("scratch")
    }
}

impl CheckRunner {
    /// `data_dir` is the runner's data folder.
    pub fn new(launcher: SandboxLauncher, config: ProjectChecksConfig, data_dir: &Path) -> Self {
        let account = config.account.map(|Account { uid, gid }| SandboxAccount { uid, gid });
        let launcher = SandboxLauncher { account, ..launcher };
        // Another runner may use the same folder.
        let own = fs::canonicalize(data_dir).unwrap_or_else(|_| data_dir.to_owned());
        let digest = Sha256::digest(own.as_os_str().as_encoded_bytes());
        let hash = hex(&digest[..8]);
        let parent = config.dir.as_deref().unwrap_or(data_dir);
        let root = parent.join(format!("{CHECKOUTS}-{hash}"));
        let prepared = PreparedStore::new(parent.join(format!("{PREPARED}-{hash}")), config.account.is_some());
        Self {
            launcher,
            config: Arc::new(config),
            root,
            prepared,
            support: Arc::default(),
            baselines: Arc::default(),
            activities: CurrentActivities::default(),
            kept: None,
        }
    }

    /// Keeps the checkouts of finished runs, so that later runs on the same repository write only the files that
    /// differ. At most one process may do this for one data folder. Under another account nothing is kept, because this
    /// process cannot change that account's files.
    pub fn keeping_checkouts(self) -> Self {
        let kept = self.config.account.is_none().then(|| KeptCheckouts::new(self.root.join(KEPT)));
        Self { kept, ..self }
    }

    /// Removes the checkouts that an earlier process left behind.
    ///
    /// # Errors
    /// If a folder cannot be removed.
    pub fn remove_checkouts(&self) -> Result<(), CheckRunError> {
        remove(&self.root)
    }

    /// Removes the checkouts whose names `is_abandoned`.
    ///
    /// # Errors
    /// If a folder cannot be removed.
    pub fn remove_abandoned(&self, is_abandoned: impl Fn(&str) -> bool) -> Result<(), CheckRunError> {
        let names = fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let mut abandoned = names.filter(|name| name.to_str().is_some_and(&is_abandoned));
        abandoned.try_for_each(|name| remove(&self.root.join(name)))
    }

    /// What the checks of the task of this name do, as text that continues a sentence.
    pub fn activity(&self, name: &str) -> Option<String> {
        match self.is_waiting(name) {
            true => Some("waiting for another task that runs the same preparation".to_owned()),
            false => self.activities.get(name),
        }
    }

    /// Whether the task of this name waits for another one that prepares the same.
    pub fn is_waiting(&self, name: &str) -> bool {
        self.prepared.is_waiting(name)
    }

    /// Runs the checks of `declared` one after the other, after its preparations. Returns how each ended, and the
    /// findings of those that failed. `mirror` has the commits. `name` is a name for the folder that no other task uses.
    /// Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if a check was not run to its end.
    pub fn run(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        commits: &CheckedCommits,
        mirror: &Mirror,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let context = self.prepare_context(name, declared, Some(&commits.base), mirror, cancelled)?;
        let coverage = RefCell::default();
        let (ran, mut found) = run_each(&declared.checks, |check| self.run_check(&context, check, commits, &coverage))?;
        let target = declared.coverage_target.as_ref();
        found.extend(target.and_then(|target| about_target(target, &coverage.into_inner())));
        Ok((ran, found))
    }

    /// Runs a check and judges it. Adds its coverage report to `coverage`.
    fn run_check(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commits: &CheckedCommits,
        coverage: &RefCell<Vec<CoverageReport>>,
    ) -> Result<(CheckRun, Vec<Finding>), CheckRunError> {
        let mut baseline = match check.report {
            Some(_) => Some(self.baseline(context, check, &commits.base)?),
            None => None,
        };
        let (first, mut wall) = self.run_once(context, check, &commits.result, "the result")?;
        let mut runs = vec![first];
        let mut verdict = verdict_of(baseline.as_deref(), &runs);
        if !verdict.problems.is_empty() && is_repeatable(runs[0].end) {
            let (second, time) = self.run_once(context, check, &commits.result, "the result again")?;
            wall += time;
            runs.push(second);
            verdict = verdict_of(baseline.as_deref(), &runs);
        }
        // The name of a test may differ from run to run. Then two runs on the base commit show it.
        if let Some(once) = baseline.as_ref().filter(|baseline| !baseline.is_repeated())
            && verdict.problems.has_missing_tests()
        {
            tracing::info!(check = check.name, tests = once.count(), "tests are missing; comparing with another run");
            baseline = Some(self.run_baseline(context, check, &commits.base, true)?);
            verdict = verdict_of(baseline.as_deref(), &runs);
        }
        if !verdict.problems.is_empty() && check.report.is_none() {
            baseline = self.baseline_if_it_runs(context, check, &commits.base)?;
        }
        self.keep_as_baseline(context, check, &commits.result, &verdict, &runs);
        // If there are two runs, the second one passed.
        if verdict.problems.is_empty() {
            verdict.problems.run = runs.last().and_then(|run| coverage_problem(run, check.min_coverage.unwrap_or(0)));
        }
        let found = findings(check, &verdict, &runs, Comparison::Base(baseline.as_deref()));
        let run = check_run(check, &verdict, &runs, context.level, wall);
        coverage.borrow_mut().extend(last_coverage(&runs).cloned());
        Ok((run, found))
    }

    /// Runs a check on a commit. Returns the outcome and the elapsed time. `on` says to users what it runs on.
    pub(super) fn run_once(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
        on: &str,
    ) -> Result<(CheckOutcome, Duration), CheckRunError> {
        if context.cancelled.load(Ordering::Relaxed) {
            return Err(CheckRunError::Cancelled);
        }
        context.activity.set(format!("running the check `{}` on {on}", check.name));
        remove(&context.folder)?;
        let kept = self.kept.as_ref().filter(|_| context.level == SandboxLevel::Namespaces);
        // Tools such as make compare the times of files with those of installed folders: a kept file must be newer.
        let key = format!("{} {}", context.mirror.repository_id(), context.environment.id());
        let before = kept.map(|kept| kept.take(&key, &context.work()));
        let run = self.run_in_checkout(context, check, commit, before).map(|run| {
            if let Some(kept) = kept.filter(|_| run.outcome.has_ended) {
                kept.keep(&key, &context.work(), run.content);
            }
            (run.outcome, run.report, run.coverage)
        });
        // The outcome matters more than a folder that is left behind, which the next start removes.
        if let Err(error) = remove(&context.folder) {
            tracing::warn!(%error, "cannot remove the checkout of a check");
        }
        let (outcome, report, coverage) = run?;
        if outcome.end == CommandEnd::Cancelled {
            return Err(CheckRunError::Cancelled);
        }
        let output = [outcome.stdout.bytes, outcome.stderr.bytes];
        Ok((CheckOutcome { end: outcome.end, report, coverage, output }, outcome.usage.wall))
    }

    /// Creates the folder of the checkouts, which other users cannot read.
    pub(super) fn create_root(&self) -> io::Result<()> {
        fs::create_dir_all(&self.root)?;
        let mode = if self.config.account.is_some() { 0o711 } else { 0o700 };
        fs::set_permissions(&self.root, fs::Permissions::from_mode(mode))
    }

    /// Finds out whether checks can run on this machine.
    ///
    /// # Errors
    /// [`CheckRunError`] if they cannot.
    pub fn level(&self) -> Result<SandboxLevel, CheckRunError> {
        let support = match self.support.get() {
            Some(support) => support,
            None => {
                let support = match self.launcher.probe() {
                    Ok(support) => support,
                    Err(LaunchError::Root) => return Err(CheckRunError::Root),
                    Err(source) => return Err(CheckRunError::Probe(source)),
                };
                for missing in &support.missing {
                    let MissingLevel { level, reason, remedy } = missing;
                    tracing::warn!(%level, reason, remedy, "a level of the sandbox does not work");
                }
                if support.level.is_none() {
                    // The next call tries again.
                    return Err(CheckRunError::NoSandbox { reasons: reasons(&support) });
                }
                self.support.get_or_init(|| support)
            }
        };
        support.level.ok_or_else(|| CheckRunError::NoSandbox { reasons: reasons(support) })
    }

    /// Why stronger levels than the one in use do not work, and what to change.
    pub(super) fn missing_level_reasons(&self) -> String {
        self.support.get().map(reasons).unwrap_or_default()
    }

    fn run_in_checkout(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
        before: Option<CheckedOut>,
    ) -> Result<FinishedRun, CheckRunError> {
        let (work, content) = self.check_out_into(context, commit, &context.environment.mounts, before)?;
        for report in check.report.iter().chain(&check.coverage) {
            report_file::remove(&work, report)
                .map_err(|error| CheckRunError::Folder { path: work.join(report), source: error.into() })?;
        }
        let wall = check.timeout();
        let limits = CommandLimits { wall, cpu: processor_time(wall), ..CommandLimits::default() };
        let command = SandboxedCommand { limits, ..self.sandboxed_command(context, &check.run) };
        let outcome = self.launcher.run(context.level, &command, context.cancelled).map_err(|error| match error {
            LaunchError::Program { program, source } => {
                CheckRunError::Program { check: check.name.clone(), program: program.display().to_string(), source }
            }
            source => CheckRunError::Sandbox { check: check.name.clone(), source },
        })?;
        let report = check.report.as_ref().map(|report| report_file::read(&work, report));
        let coverage = check.coverage.as_ref().map(|report| report_file::read_coverage(&work, report));
        Ok(FinishedRun { outcome, report, coverage, content })
    }
}

/// Runs checks one after the other. Returns the runs, and the findings, whose texts are limited.
pub(super) fn run_each(
    checks: &[ProjectCheck],
    run: impl Fn(&ProjectCheck) -> Result<(CheckRun, Vec<Finding>), CheckRunError>,
) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
    let (mut ran, mut all) = (Vec::new(), Vec::new());
    let mut budget = FindingBudget::default();
    for check in checks {
        let (run, found) = run(check)?;
        tracing::info!(check = check.name, ?run, "check has run");
        ran.push(run);
        all.extend(found.into_iter().map(|finding| budget.limit(finding)));
    }
    Ok((ran, all))
}

fn verdict_of(baseline: Option<&Baseline>, runs: &[CheckOutcome]) -> Verdict {
    match runs {
        [] => Verdict::default(),
        [first, rest @ ..] => judge(baseline, first, rest.first()),
    }
}

/// The coverage report of the last run.
fn last_coverage(runs: &[CheckOutcome]) -> Option<&CoverageReport> {
    runs.last()?.coverage.as_ref()?.as_ref().ok()
}

/// The record of a check's runs on a result.
pub(super) fn check_run(
    check: &ProjectCheck,
    verdict: &Verdict,
    runs: &[CheckOutcome],
    level: SandboxLevel,
    wall: Duration,
) -> CheckRun {
    let reports = runs.iter().rev().filter_map(|run| run.report.as_ref()?.as_ref().ok());
    let coverage = last_coverage(runs).map(CoverageReport::total);
    let command = verdict.is_command_flaky.then_some(&check.name);
    CheckRun {
        name: check.name.clone(),
        passed: verdict.problems.is_empty(),
        sandbox: level.as_str().to_owned(),
        ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
        tests: reports.map(TestReport::count).next(),
        coverage: coverage.map(LineCoverage::from),
        known_failures: test_names(&verdict.known_failures),
        flaky: test_names(verdict.flaky.iter().chain(command)),
    }
}

/// Processor time of a process that uses all processors until the limit of elapsed time.
pub(super) fn processor_time(wall: Duration) -> Duration {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    wall.saturating_mul(u32::try_from(processors).unwrap_or(u32::MAX))
}

/// Why levels do not work, and what to change.
fn reasons(support: &SandboxSupport) -> String {
    let reasons = support.missing.iter();
    let reasons: Vec<String> = reasons.map(|m| format!("{}: {} ({})", m.level, m.reason, m.remedy)).collect();
    reasons.join("; ")
}

pub(super) fn remove(path: &Path) -> Result<(), CheckRunError> {
    cfq_sandbox::remove_folder(path).map_err(|source| CheckRunError::Folder { path: path.to_owned(), source })
}
