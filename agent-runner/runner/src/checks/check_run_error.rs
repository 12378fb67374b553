//! Why the checks of a project were not run.

use std::io;
use std::path::PathBuf;

use cfq_sandbox::LaunchError;

use super::checks_file::CHECKS_FILE_PATH;
use crate::workstream::GitError;

/// Why checks were not run. The result must not pass, but the change is not at fault.
#[derive(Debug, thiserror::Error)]
pub enum CheckRunError {
    /// The file that declares the checks is invalid.
    #[error(
        "{CHECKS_FILE_PATH} of the base commit is invalid: {reason}; commit a corrected file, then submit the task again"
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
    /// The project declares preparations, which need a sandbox with namespaces.
    #[error(
        "this project declares preparations ([[prepare]] in {CHECKS_FILE_PATH}), which need a sandbox with namespaces: \
         {reasons}"
    )]
    NoNamespaces {
        /// Why there is none, and what to change.
        reasons: String,
    },
    /// A preparation failed. This is not a finding about a result.
    #[error(
        "the preparation `{name}` of the checks failed: {end}{problems}. If this machine or its network is the cause, correct \
         it and run `cfq retry TASK`; if a file of the project is, commit a corrected one and submit the task \
         again{output}"
    )]
    NotPrepared {
        /// Name of the preparation.
        name: String,
        /// How it ended.
        end: String,
        /// Hosts that it did not reach, with an introduction; may be empty.
        problems: String,
        /// The end of its output, with an introduction.
        output: String,
    },
    /// A merge has a preparation with another command or other lock files than the task's base commit. It does not run
    /// on a merge, which contains code that models wrote.
    #[error(
        "the merge has another preparation `{name}` or other lock files than the task's base commit, and what it \
         installs is not stored on this machine. If your repository has the newer ones, submit the task again from that \
         commit; if this task changed them, merge its branch yourself"
    )]
    MergeNotPrepared {
        /// Name of the preparation.
        name: String,
    },
    /// A commit has files where a folder of a preparation belongs.
    #[error(
        "commit {commit} contains {}, where a preparation of the checks creates a folder: remove it from the commit, or from \
         `keep` in {CHECKS_FILE_PATH}", path.display()
    )]
    KeptFolderInCommit {
        /// The file or folder.
        path: PathBuf,
        /// The commit.
        commit: String,
    },
    /// The proxy to the registries does not start.
    #[error("cannot start the proxy through which a preparation reaches registries")]
    Proxy(#[source] io::Error),
    /// The runner runs as root without another account for checks.
    #[error("this project declares checks, and checks never run as root: run cfq as an ordinary user")]
    Root,
    /// The program of a check does not exist, or cannot be executed.
    #[error(
        "cannot run the check `{check}`: {program} cannot be executed in the sandbox ({source}); {}",
        remedy_for_missing(program)
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
    /// On the base commit, the check does not write its report, so no result can be compared.
    #[error(
        "cannot compare the check `{check}` with the base commit: there, its report {report} {problem} ({end}). If \
         something is missing on this machine, install it and answer with retry_with_constraints; if {CHECKS_FILE_PATH} \
         is wrong, commit a corrected one, abort the task and submit it again{output}"
    )]
    NoBaselineReport {
        /// Name of the check.
        check: String,
        /// Path of the report.
        report: String,
        /// What is wrong with it.
        problem: String,
        /// How the check ended.
        end: String,
        /// The end of its output, with an introduction.
        output: String,
    },
    /// The check does not pass on a result that passed before, so that it cannot judge a merge of it.
    #[error(
        "the check `{check}` passed on the result before, and does not pass on it now, so it cannot judge the merge. \
         Correct what has changed on this machine; the answer accept_best_effort then repeats the merge"
    )]
    NoLongerPasses {
        /// Name of the check.
        check: String,
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

/// What to do about a program that does not exist in the sandbox.
pub(super) fn remedy_for_missing(program: &str) -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).find(|folder| folder.is_absolute() && folder.join(program).is_file());
    match found {
        Some(folder) if !program.contains('/') => format!(
            "it is in {0}, which the sandbox does not contain: name {0} with `readable` under [checks] in cfq.toml",
            folder.display()
        ),
        Some(_) | None => "install it, or name its folder with `readable` under [checks] in cfq.toml".to_owned(),
    }
}

impl CheckRunError {
    /// Whether no result of this task can be checked, so that the task fails before a model is called.
    pub(crate) fn is_invalid_request(&self) -> bool {
        match self {
            Self::InvalidFile { .. }
            | Self::NoSandbox { .. }
            | Self::NoNamespaces { .. }
            | Self::NotPrepared { .. }
            | Self::KeptFolderInCommit { .. }
            | Self::Root => true,
            Self::Git(error) => error.is_invalid_request(),
            Self::Program { .. }
            | Self::MergeNotPrepared { .. }
            | Self::Probe(_)
            | Self::Sandbox { .. }
            | Self::NoBaselineReport { .. }
            | Self::NoLongerPasses { .. }
            | Self::Folder { .. }
            | Self::Proxy(_)
            | Self::Cancelled => false,
        }
    }

    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Git(error) => error.is_transient(),
            Self::Folder { .. } | Self::Probe(_) | Self::Proxy(_) => true,
            Self::Sandbox { source, .. } => matches!(source, LaunchError::NoResult { .. } | LaunchError::Connection(_)),
            Self::InvalidFile { .. }
            | Self::NoSandbox { .. }
            | Self::NoNamespaces { .. }
            | Self::NotPrepared { .. }
            | Self::MergeNotPrepared { .. }
            | Self::KeptFolderInCommit { .. }
            | Self::Root
            | Self::Program { .. }
            | Self::NoBaselineReport { .. }
            | Self::NoLongerPasses { .. }
            | Self::Cancelled => false,
        }
    }

    /// The message with the messages of all causes.
    pub fn with_causes(&self) -> String {
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
