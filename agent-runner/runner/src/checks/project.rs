//! Runs the checks that a project declares, for example its tests, on a commit.
//!
//! Each run of a check gets a checkout of its own, which is removed afterwards, and runs in a sandbox: it reads the checkout
//! and the system's programs, and has no network. A check that cannot run is an error, never a passed check. Without a
//! sandbox no check runs. What counts as passed is decided in `verdict`; what the base commit's tests say is kept, so that
//! the check runs there once, not for each result.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cfq_link::child::Account;
use cfq_proto::review::{CheckRun, Finding};
use cfq_sandbox::{
    CommandEnd, CommandLimits, CommandOutcome, LaunchError, SandboxAccount, SandboxLauncher, SandboxLevel,
    SandboxedCommand,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::base_cache::BaseCache;
use super::check_findings::{findings, listed, quoted_output};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::report_file;
use super::test_report::{ReportError, TestReport};
use super::verdict::{BaseTests, RunOutcome, judge, may_be_flaky};
use crate::workstream::GitError;

/// Start of the name of the folder with the checkouts, in the configured folder or the runner's data folder.
const CHECKOUTS: &str = "cfq-checks";
/// Maximum number of runs of one check, to judge one result: two on the base commit, two on the result.
pub(crate) const MAX_RUNS: u32 = 4;
/// Folders that are searched for programs, after those of the configuration.
const SYSTEM_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/run/current-system/sw/bin";

/// Which programs the checks of projects may use, in addition to those of the system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProjectChecksConfig {
    /// Files and folders that checks may read and execute, for example those of a compiler in a home folder. Each folder,
    /// and `bin` in it, is searched for programs.
    pub readable: Vec<PathBuf>,
    /// Environment variables of the checks.
    pub env: BTreeMap<String, String>,
    /// Folder in which commits are checked out for their checks; by default the runner's data folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// Account that checks run as. Needed if the runner runs as root, and then it must be able to enter `dir`, and the
    /// runner to change the owner of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<Account>,
}

/// Runs checks. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CheckRunner {
    launcher: SandboxLauncher,
    config: Arc<ProjectChecksConfig>,
    root: PathBuf,
    /// The strongest level of this machine, once it is known.
    level: Arc<OnceLock<SandboxLevel>>,
    bases: Arc<BaseCache>,
}

/// The commits of one judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedCommits {
    /// The commit that is checked.
    pub result: String,
    /// The commit that it is compared with.
    pub base: String,
}

/// What all runs of one judgement have in common.
struct Runs<'a, F> {
    level: SandboxLevel,
    folder: &'a Path,
    check_out: F,
    cancelled: &'a AtomicBool,
}

impl CheckRunner {
    /// `data_dir` is the runner's data folder.
    pub fn new(launcher: SandboxLauncher, config: ProjectChecksConfig, data_dir: &Path) -> Self {
        let account = config.account.map(|Account { uid, gid }| SandboxAccount { uid, gid });
        let launcher = SandboxLauncher { account, ..launcher };
        // Another runner may use the same folder.
        let own = fs::canonicalize(data_dir).unwrap_or_else(|_| data_dir.to_owned());
        let digest = Sha256::digest(own.as_os_str().as_encoded_bytes());
        let hash: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let root = config.dir.as_deref().unwrap_or(data_dir).join(format!("{CHECKOUTS}-{hash}"));
        Self { launcher, config: Arc::new(config), root, level: Arc::default(), bases: Arc::default() }
    }

    /// Removes the checkouts that an earlier process left behind.
    ///
    /// # Errors
    /// If a folder cannot be removed.
    pub fn remove_checkouts(&self) -> Result<(), CheckRunError> {
        remove(&self.root)
    }

    /// Runs `checks` one after the other. Returns how each ended, and the findings of those that failed. `check_out` creates
    /// a checkout of a commit in a folder. `name` is a name for the folder that no other task uses. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if a check was not run to its end.
    pub fn run(
        &self,
        name: &str,
        checks: &[ProjectCheck],
        commits: &CheckedCommits,
        check_out: impl Fn(&Path, &str) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let level = self.level()?;
        self.create_root().map_err(|source| CheckRunError::Folder { path: self.root.clone(), source })?;
        let runs = Runs { level, folder: &self.root.join(name), check_out, cancelled };
        let (mut ran, mut all) = (Vec::new(), Vec::new());
        for check in checks {
            let (run, findings) = self.judge(&runs, check, commits)?;
            tracing::info!(check = check.name, ?run, "check has run");
            ran.push(run);
            all.extend(findings);
        }
        Ok((ran, all))
    }

    fn judge<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        runs: &Runs<'_, F>,
        check: &ProjectCheck,
        commits: &CheckedCommits,
    ) -> Result<(CheckRun, Vec<Finding>), CheckRunError> {
        let mut base = match check.report {
            Some(_) => Some(self.base_tests(runs, check, &commits.base)?),
            None => None,
        };
        let (first, mut wall) = self.run_once(runs, check, &commits.result)?;
        let second = match may_be_flaky(base.as_deref(), &first) {
            true => Some(self.run_once(runs, check, &commits.result)?),
            false => None,
        };
        let second = second.map(|(outcome, time)| {
            wall += time;
            outcome
        });
        let verdict = judge(base.as_deref(), &first, second.as_ref());
        let passed = verdict.problems.is_empty();
        if !passed && base.is_none() {
            base = Some(self.base_tests(runs, check, &commits.base)?);
        }
        let tests = first.report.as_ref().and_then(|report| report.as_ref().ok()).map(|report| report.tests.len());
        let outcomes: Vec<RunOutcome> = [first].into_iter().chain(second).collect();
        let found = findings(check, &verdict, &outcomes, base.as_deref());
        // A check as a whole is named after the check.
        let flaky = verdict.flaky.into_iter().map(|name| if name.is_empty() { check.name.clone() } else { name });
        let run = CheckRun {
            name: check.name.clone(),
            passed,
            sandbox: runs.level.as_str().to_owned(),
            ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
            tests: tests.and_then(|tests| u32::try_from(tests).ok()),
            known_failures: listed(verdict.known),
            flaky: listed(flaky.collect()),
        };
        Ok((run, found))
    }

    /// How the check ends on the base commit: its tests, if it declares a report.
    fn base_tests<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        runs: &Runs<'_, F>,
        check: &ProjectCheck,
        base: &str,
    ) -> Result<Arc<BaseTests>, CheckRunError> {
        if let Some(known) = self.bases.get(base, check) {
            return Ok(known);
        }
        let (first, _) = self.run_once(runs, check, base)?;
        let second = match first.end {
            // A run that exceeded a limit would take as long again.
            CommandEnd::Exited(0) | CommandEnd::LimitExceeded(_) => None,
            CommandEnd::Exited(_) | CommandEnd::Signalled(_) | CommandEnd::Cancelled => {
                Some(self.run_once(runs, check, base)?.0)
            }
        };
        let tests = match &check.report {
            Some(report) => BaseTests::of(&first, second.as_ref()).map_err(|problem| {
                let last = second.as_ref().unwrap_or(&first);
                CheckRunError::NoBaseReport {
                    check: check.name.clone(),
                    report: report.clone(),
                    problem: problem.to_string(),
                    end: last.end.to_string(),
                    output: quoted_output(last),
                }
            })?,
            None => BaseTests::without_report(&first, second.as_ref()),
        };
        Ok(self.bases.insert(base, check, tests))
    }

    /// Runs a check on a commit. Returns the outcome and the elapsed time.
    fn run_once<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        runs: &Runs<'_, F>,
        check: &ProjectCheck,
        commit: &str,
    ) -> Result<(RunOutcome, Duration), CheckRunError> {
        if runs.cancelled.load(Ordering::Relaxed) {
            return Err(CheckRunError::Cancelled);
        }
        remove(runs.folder)?;
        let run = self.run_in_checkout(runs, check, commit);
        // The outcome matters more than a folder that is left behind, which the next start removes.
        if let Err(error) = remove(runs.folder) {
            tracing::warn!(%error, "cannot remove the checkout of a check");
        }
        let (outcome, report) = run?;
        if outcome.end == CommandEnd::Cancelled {
            return Err(CheckRunError::Cancelled);
        }
        let output = [outcome.stdout.bytes, outcome.stderr.bytes];
        Ok((RunOutcome { end: outcome.end, report, output }, outcome.usage.wall))
    }

    /// Creates the folder of the checkouts, which other users cannot read.
    fn create_root(&self) -> io::Result<()> {
        fs::create_dir_all(&self.root)?;
        let mode = if self.config.account.is_some() { 0o711 } else { 0o700 };
        fs::set_permissions(&self.root, fs::Permissions::from_mode(mode))
    }

    /// Finds out whether checks can run on this machine.
    ///
    /// # Errors
    /// [`CheckRunError`] if they cannot.
    pub fn level(&self) -> Result<SandboxLevel, CheckRunError> {
        if let Some(level) = self.level.get() {
            return Ok(*level);
        }
        let support = match self.launcher.probe() {
            Ok(support) => support,
            Err(LaunchError::Root) => return Err(CheckRunError::Root),
            Err(source) => return Err(CheckRunError::Probe(source)),
        };
        for missing in &support.missing {
            tracing::warn!(level = %missing.level, missing.reason, missing.remedy, "a level of the sandbox does not work");
        }
        let reasons = || {
            let reasons = support.missing.iter();
            let reasons: Vec<String> = reasons.map(|m| format!("{}: {} ({})", m.level, m.reason, m.remedy)).collect();
            reasons.join("; ")
        };
        let level = support.level.ok_or_else(|| CheckRunError::NoSandbox { reasons: reasons() })?;
        Ok(*self.level.get_or_init(|| level))
    }

    fn run_in_checkout<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        runs: &Runs<'_, F>,
        check: &ProjectCheck,
        commit: &str,
    ) -> Result<(CommandOutcome, Option<Result<TestReport, ReportError>>), CheckRunError> {
        let folder = runs.folder;
        let (work, scratch) = (folder.join("work"), folder.join("scratch"));
        let folder_error = |path: &Path, source| CheckRunError::Folder { path: path.to_owned(), source };
        for path in [&work, &scratch] {
            fs::create_dir_all(path).map_err(|source| folder_error(path, source))?;
        }
        (runs.check_out)(&work, commit)?;
        if let Some(report) = &check.report {
            report_file::remove(&work, report).map_err(|error| folder_error(&work.join(report), error.into()))?;
        }
        if let Some(account) = self.config.account {
            change_owner(folder, account).map_err(|source| folder_error(folder, source))?;
        }
        let env = self.config.env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let command = SandboxedCommand {
            program: OsString::from(check.run.first().map(String::as_str).unwrap_or_default()),
            args: check.run.iter().skip(1).map(OsString::from).collect(),
            env: [(OsString::from("PATH"), self.path())].into_iter().chain(env).collect(),
            work_dir: work.clone(),
            readable: self.config.readable.clone(),
            writable: vec![work.clone()],
            scratch_dir: scratch,
            limits: CommandLimits { wall: check.timeout(), cpu: processor_time(check), ..CommandLimits::default() },
        };
        let outcome = self.launcher.run(runs.level, &command, runs.cancelled).map_err(|error| match error {
            LaunchError::Program { program, source } => {
                CheckRunError::Program { check: check.name.clone(), program: program.display().to_string(), source }
            }
            source => CheckRunError::Sandbox { check: check.name.clone(), source },
        })?;
        let report = check.report.as_ref().map(|report| report_file::read(&work, report));
        Ok((outcome, report))
    }

    fn path(&self) -> OsString {
        let folders = self.config.readable.iter().flat_map(|path| [path.join("bin"), path.clone()]);
        let mut path: Vec<PathBuf> = folders.filter(|folder| folder.is_dir()).collect();
        path.extend(std::env::split_paths(SYSTEM_PATH));
        // A folder whose name contains a colon cannot be in the list.
        std::env::join_paths(path).unwrap_or_else(|_| SYSTEM_PATH.into())
    }
}

/// Processor time of a process that uses all processors until the check's time limit.
fn processor_time(check: &ProjectCheck) -> Duration {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    check.timeout().saturating_mul(u32::try_from(processors).unwrap_or(u32::MAX))
}

fn remove(path: &Path) -> Result<(), CheckRunError> {
    cfq_sandbox::remove_folder(path).map_err(|source| CheckRunError::Folder { path: path.to_owned(), source })
}

/// Gives a folder and everything below it to an account. Nothing has run in the folder, so its depth is limited.
fn change_owner(path: &Path, account: Account) -> io::Result<()> {
    let Account { uid, gid } = account;
    if path.symlink_metadata()?.is_dir() {
        for entry in fs::read_dir(path)? {
            change_owner(&entry?.path(), account)?;
        }
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid))
}
