//! Access to the user's repositories, in a child process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use cfq_agent_runner::workstream::{
    FailureKind, GitError, RepositoryAccess, RepositoryProgram, StartPoint, StartPointRequest, StopCondition,
};

use crate::exit;

/// Maximum time of one operation of a command on a repository; the check of a large repository on a slow disk takes
/// minutes.
pub const MAX_ACCESS: Duration = Duration::from_secs(600);

/// Access to repositories through a child process of this program.
pub fn access() -> anyhow::Result<RepositoryAccess> {
    let path = std::env::current_exe().context("cannot find the program of this process")?;
    let args = ["serve", "repository-access"].map(str::to_owned).to_vec();
    Ok(RepositoryAccess::new(RepositoryProgram { path, args }))
}

/// Finds the repository that contains `dir`, and resolves `base` (a commit, branch or tag; HEAD if absent) to a commit,
/// which must contain the context files. The user named `dir` with `option`.
pub fn resolve_for(
    option: &str,
    dir: &Path,
    base: Option<&str>,
    context_files: &[String],
) -> anyhow::Result<StartPoint> {
    let dir = existing_folder(option, dir)?;
    let (base, context_files) = (base.map(str::to_owned), context_files.to_vec());
    let request = StartPointRequest { dir: dir.clone(), base, context_files };
    let (stop, _cancel) = StopCondition::after(MAX_ACCESS);
    access()?.start_point(request, &stop).map_err(|error| not_usable(option, &dir, error))
}

/// The canonical path of a folder that the user named with `option`.
pub fn existing_folder(option: &str, dir: &Path) -> anyhow::Result<PathBuf> {
    dir.canonicalize().map_err(|error| {
        exit::usage(format!("cannot open {}: {error}; check the path of the repository ({option})", dir.display()))
    })
}

/// The user's error for a repository that cannot be used.
pub fn not_usable(option: &str, dir: &Path, error: GitError) -> anyhow::Error {
    match error {
        GitError::AccessFailed { kind: FailureKind::NotARepository, .. } => exit::usage(format!(
            "{} is not in a git repository: name one with {option}, or run `git init` and commit first",
            dir.display()
        )),
        other => exit::usage(other.with_causes()),
    }
}

/// [`resolve_for`] a folder that was named on the command line.
pub fn resolve(dir: &Path, base: Option<&str>, context_files: &[String]) -> anyhow::Result<StartPoint> {
    resolve_for("--repo DIR", dir, base, context_files)
}
