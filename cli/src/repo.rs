//! The repository a person means, and the commit they start from.

use std::path::{Path, PathBuf};

use cfq_agent_runner::workstream;
use git2::Repository;

use crate::exit;

pub struct Start {
    pub root: PathBuf,
    pub base: String,
}

/// From any folder inside the repository; `base` is a commit, branch or tag, HEAD if absent.
pub fn start(dir: &Path, base: Option<&str>) -> anyhow::Result<Start> {
    let dir = dir
        .canonicalize()
        .map_err(|error| exit::usage(format!("no repository at {}: {error}; use --repo DIR", dir.display())))?;
    let found = Repository::discover(&dir).map_err(|_| {
        exit::usage(format!(
            "{} is not in a git repository: use --repo DIR, or `git init` and commit first",
            dir.display()
        ))
    })?;
    let root = found.workdir().unwrap_or_else(|| found.path()).to_path_buf();
    let root = root.canonicalize().unwrap_or(root);
    let base = match base {
        None => workstream::head_commit(&root).map_err(|error| exit::usage(error.to_string()))?,
        Some(name) => found
            .revparse_single(name)
            .and_then(|object| object.peel_to_commit())
            .map(|commit| commit.id().to_string())
            .map_err(|error| {
                exit::usage(format!("--base {name} names no commit in {}: {}", root.display(), error.message()))
            })?,
    };
    Ok(Start { root, base })
}
