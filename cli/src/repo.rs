//! The repository and the base commit of a task.

use std::path::{Path, PathBuf};

use cfq_agent_runner::workstream::{self, GitError};

use crate::exit;

/// Repository and commit that a task starts from.
pub struct StartPoint {
    /// Top folder of the repository.
    pub root: PathBuf,
    /// Id of the base commit.
    pub base: String,
}

impl StartPoint {
    /// Checks that the base commit contains these files: a missing file is most likely misspelt, or not committed yet.
    pub fn check_context(&self, paths: &[String]) -> anyhow::Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        let repository = workstream::open_source_repository(&self.root)?;
        let tree = repository.find_commit(git2::Oid::from_str(&self.base)?)?.tree()?;
        match paths.iter().find(|path| tree.get_path(Path::new(path)).is_err()) {
            None => Ok(()),
            Some(path) => Err(exit::usage(format!(
                "the context file {path} is not in {} at commit {}: name it relative to the repository's root, and \
                 commit it first",
                self.root.display(),
                self.base.get(..12).unwrap_or(&self.base)
            ))),
        }
    }
}

/// Finds the repository that contains `dir`, and resolves `base` (a commit, branch or tag; HEAD if absent) to a commit.
pub fn resolve(dir: &Path, base: Option<&str>) -> anyhow::Result<StartPoint> {
    let dir = dir.canonicalize().map_err(|error| {
        exit::usage(format!("cannot open {}: {error}; check the path of the repository (--repo)", dir.display()))
    })?;
    let found = workstream::find_source_repository(&dir).map_err(|error| match error {
        GitError::NotARepository { .. } => exit::usage(format!(
            "{} is not in a git repository: name one with --repo DIR, or run `git init` and commit first",
            dir.display()
        )),
        other => exit::usage(other.with_causes()),
    })?;
    let root = found.workdir().unwrap_or_else(|| found.path()).to_path_buf();
    let root = root.canonicalize().unwrap_or(root);
    // The checked folders are those around `.git`; `core.worktree` could name the files of another repository.
    let git_dir = found.path().canonicalize().unwrap_or_else(|_| found.path().to_owned());
    let is_elsewhere = found.workdir().is_some() && git_dir.parent() != Some(root.as_path());
    if git_dir.ends_with(".git") && is_elsewhere {
        return Err(exit::usage(format!(
            "{} sets core.worktree to {}, so it is not clear which files belong to it: remove the setting, or name the \
             other folder with --repo",
            git_dir.join("config").display(),
            root.display()
        )));
    }
    let base = match base {
        None => workstream::head_commit(&root).map_err(|error| exit::usage(error.to_string()))?,
        Some(name) => found
            .revparse_single(name)
            .and_then(|object| object.peel_to_commit())
            .map(|commit| commit.id().to_string())
            .map_err(|error| {
                exit::usage(format!("--base {name} is not a commit in {}: {}", root.display(), error.message()))
            })?,
    };
    Ok(StartPoint { root, base })
}
