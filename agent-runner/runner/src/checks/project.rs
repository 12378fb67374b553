//! Runs the checks that a project declares, for example its tests, on a commit.
//!
//! Each check gets a checkout of its own, which is removed afterwards, and runs in a sandbox: it reads the checkout and the
//! system's programs, and has no network. A check that cannot run is an error, never a passed check. Without a sandbox no
//! check runs.

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
use cfq_proto::review::{CheckKind, CheckRun, Finding};
use cfq_sandbox::{
    CommandLimits, CommandOutcome, LaunchError, SandboxAccount, SandboxLauncher, SandboxLevel, SandboxedCommand,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::checks_file::{CHECKS_FILE_PATH, ProjectCheck};
use crate::workstream::GitError;

/// Start of the name of the folder with the checkouts, in the configured folder or the runner's data folder.
const CHECKOUTS: &str = "cfq-checks";
/// Bytes of each output stream that a finding quotes: its end, where test runners print what failed.
const MAX_QUOTED_BYTES: usize = 2000;
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

/// Why checks were not run. The result must not pass, but the change is not at fault.
#[derive(Debug, thiserror::Error)]
pub enum CheckRunError {
    /// The file that declares the checks is invalid.
    #[error(
        "{CHECKS_FILE_PATH} of the base commit is invalid: {reason}; commit a corrected file, then `cfq retry` the task"
    )]
    InvalidFile {
        /// What is wrong with it.
        reason: String,
    },
    /// The machine offers no sandbox.
    #[error("this project declares checks, but this machine offers no sandbox to run them in: {reasons}")]
    NoSandbox {
        /// For each level the reason and what to change.
        reasons: String,
    },
    /// The runner runs as root without another account for checks.
    #[error("this project declares checks, and checks never run as root: run cfq as an ordinary user")]
    Root,
    /// The program of a check does not exist, or cannot be executed.
    #[error(
        "cannot run the check `{check}`: {program} cannot be executed in the sandbox ({source}); install it, or name its \
         folder with `readable` under [checks] in cfq.toml"
    )]
    Program {
        /// Name of the check.
        check: String,
        /// The program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// It cannot be found out which sandbox this machine offers.
    #[error("cannot test the sandbox in which checks run")]
    Probe(#[source] LaunchError),
    /// The sandbox failed.
    #[error("cannot run the check `{check}`")]
    Sandbox {
        /// Name of the check.
        check: String,
        /// The error.
        #[source]
        source: LaunchError,
    },
    /// A folder cannot be created, given to the account or removed.
    #[error("cannot prepare {path} for a check")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The commit cannot be checked out.
    #[error(transparent)]
    Git(#[from] GitError),
    /// The checks were cancelled.
    #[error("the checks were cancelled")]
    Cancelled,
}

impl CheckRunError {
    /// Whether no result of this task can be checked, so that the task fails before a model is called.
    pub(crate) fn is_invalid_request(&self) -> bool {
        match self {
            Self::InvalidFile { .. } | Self::NoSandbox { .. } | Self::Root => true,
            Self::Git(error) => error.is_invalid_request(),
            Self::Program { .. } | Self::Probe(_) | Self::Sandbox { .. } | Self::Folder { .. } | Self::Cancelled => {
                false
            }
        }
    }

    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Git(error) => error.is_transient(),
            Self::Folder { .. } | Self::Probe(_) => true,
            Self::Sandbox { source, .. } => matches!(source, LaunchError::NoResult { .. } | LaunchError::Connection(_)),
            Self::InvalidFile { .. } | Self::NoSandbox { .. } | Self::Root | Self::Program { .. } | Self::Cancelled => {
                false
            }
        }
    }

    /// The message with the messages of all causes.
    pub(crate) fn with_causes(&self) -> String {
        if let Self::Git(error) = self {
            return error.with_causes();
        }
        let mut text = self.to_string();
        let mut source = match self {
            // Its message contains the cause.
            Self::Program { .. } => None,
            other => std::error::Error::source(other),
        };
        while let Some(error) = source {
            text = format!("{text}: {error}");
            source = error.source();
        }
        text
    }
}

/// Runs checks. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CheckRunner {
    launcher: SandboxLauncher,
    config: Arc<ProjectChecksConfig>,
    root: PathBuf,
    /// The strongest level of this machine, once it is known.
    level: Arc<OnceLock<SandboxLevel>>,
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
        Self { launcher, config: Arc::new(config), root, level: Arc::default() }
    }

    /// Removes the checkouts that an earlier process left behind.
    ///
    /// # Errors
    /// If a folder cannot be removed.
    pub fn remove_checkouts(&self) -> Result<(), CheckRunError> {
        remove(&self.root)
    }

    /// Runs `checks` one after the other. Returns how each ended, and a finding for each that failed. `check_out` creates a checkout of the
    /// commit in a folder. `name` is a name for the folder that no other task uses. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if a check was not run to its end.
    pub fn run(
        &self,
        name: &str,
        checks: &[ProjectCheck],
        check_out: impl Fn(&Path) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let level = self.level()?;
        self.create_root().map_err(|source| CheckRunError::Folder { path: self.root.clone(), source })?;
        let folder = self.root.join(name);
        let (mut ran, mut findings) = (Vec::new(), Vec::new());
        for check in checks {
            if cancelled.load(Ordering::Relaxed) {
                return Err(CheckRunError::Cancelled);
            }
            remove(&folder)?;
            let outcome = self.run_one(level, &folder, check, &check_out, cancelled);
            // The outcome matters more than a folder that is left behind, which the next start removes.
            if let Err(error) = remove(&folder) {
                tracing::warn!(%error, "cannot remove the checkout of a check");
            }
            let outcome = outcome?;
            if outcome.end == cfq_sandbox::CommandEnd::Cancelled {
                return Err(CheckRunError::Cancelled);
            }
            tracing::info!(check = check.name, end = %outcome.end, %level, wall = ?outcome.usage.wall, "check has run");
            let passed = outcome.end.is_success();
            let ms = u64::try_from(outcome.usage.wall.as_millis()).unwrap_or(u64::MAX);
            ran.push(CheckRun { name: check.name.clone(), passed, sandbox: level.as_str().to_owned(), ms });
            findings.extend((!passed).then(|| finding(check, &outcome)));
        }
        Ok((ran, findings))
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

    fn run_one(
        &self,
        level: SandboxLevel,
        folder: &Path,
        check: &ProjectCheck,
        check_out: impl Fn(&Path) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<CommandOutcome, CheckRunError> {
        let (work, scratch) = (folder.join("work"), folder.join("scratch"));
        for path in [&work, &scratch] {
            fs::create_dir_all(path).map_err(|source| CheckRunError::Folder { path: path.clone(), source })?;
        }
        check_out(&work)?;
        if let Some(account) = self.config.account {
            change_owner(folder, account)
                .map_err(|source| CheckRunError::Folder { path: folder.to_owned(), source })?;
        }
        let env = self.config.env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let command = SandboxedCommand {
            program: OsString::from(check.run.first().map(String::as_str).unwrap_or_default()),
            args: check.run.iter().skip(1).map(OsString::from).collect(),
            env: [(OsString::from("PATH"), self.path())].into_iter().chain(env).collect(),
            work_dir: work.clone(),
            readable: self.config.readable.clone(),
            writable: vec![work],
            scratch_dir: scratch,
            limits: CommandLimits { wall: check.timeout(), cpu: processor_time(check), ..CommandLimits::default() },
        };
        self.launcher.run(level, &command, cancelled).map_err(|error| match error {
            LaunchError::Program { program, source } => {
                CheckRunError::Program { check: check.name.clone(), program: program.display().to_string(), source }
            }
            source => CheckRunError::Sandbox { check: check.name.clone(), source },
        })
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

fn finding(check: &ProjectCheck, outcome: &CommandOutcome) -> Finding {
    let mut message = format!("the project's check `{}` failed ({})", check.name, outcome.end);
    for (name, output) in [("stdout", &outcome.stdout), ("stderr", &outcome.stderr)] {
        let text = quoted(&output.bytes);
        if !text.is_empty() {
            message.push_str(&format!("; end of its {name}:\n{text}"));
        }
    }
    Finding { check: CheckKind::Project, path: String::new(), line: 0, message }
}

/// The end of an output, without control characters.
fn quoted(output: &[u8]) -> String {
    let tail = &output[output.len().saturating_sub(MAX_QUOTED_BYTES)..];
    let text = String::from_utf8_lossy(tail);
    let text: String = text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect();
    // The first line is cut if the output is longer.
    let text = match output.len() > MAX_QUOTED_BYTES {
        true => text.split_once('\n').map_or(text.as_str(), |(_, rest)| rest),
        false => text.as_str(),
    };
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_quotes_the_end_of_the_output() {
        let long: String = (0..1000).map(|n| format!("line {n}\n")).collect();
        let text = quoted(long.as_bytes());
        assert!(text.len() <= MAX_QUOTED_BYTES && text.starts_with("line ") && text.ends_with("line 999"), "{text}");
        assert_eq!(quoted(b"\x1b[31mred\x1b[0m\r\n\xff"), "[31mred[0m\n\u{fffd}");
    }
}
