//! The repository and the base commit of a new task.

use std::path::{Path, PathBuf};

use git2::{Oid, Repository};
use serde::{Deserialize, Serialize};

use super::error::{GitError, git_context};
use super::source::{find_source_repository, head_of};

/// Number of characters of a commit id that messages show.
const SHOWN_ID_LENGTH: usize = 12;

/// What a user wants to start a task from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPointRequest {
    /// A folder in the repository, canonical.
    pub dir: PathBuf,
    /// A commit, branch or tag; HEAD if absent.
    pub base: Option<String>,
    /// Files that the base commit must contain: a missing file is most likely misspelt, or not committed yet.
    pub context_files: Vec<String>,
}

/// Repository and commit that a task starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPoint {
    /// Top folder of the repository.
    pub root: PathBuf,
    /// Id of the base commit.
    pub base: String,
}

impl StartPointRequest {
    /// Finds the repository and resolves the base to a commit.
    ///
    /// # Errors
    /// As [`StartPointRequest::open`].
    pub fn find(&self) -> Result<StartPoint, GitError> {
        self.open().map(|(_, start)| start)
    }

    /// Opens the repository and resolves the base to a commit.
    ///
    /// # Errors
    /// [`GitError::NotARepository`], [`GitError::WorktreeElsewhere`], [`GitError::BaseNotFound`],
    /// [`GitError::ContextFileNotFound`], and the errors of [`find_source_repository`] and [`head_of`].
    pub(super) fn open(&self) -> Result<(Repository, StartPoint), GitError> {
        let repository = find_source_repository(&self.dir)?;
        let root = root(&repository)?;
        let base = match &self.base {
            None => head_of(&repository, &root)?,
            Some(name) => {
                let commit = repository.revparse_single(name).and_then(|object| object.peel_to_commit());
                let commit = commit.map_err(|error| GitError::BaseNotFound {
                    name: name.clone(),
                    path: root.clone(),
                    reason: error.message().to_owned(),
                })?;
                commit.id().to_string()
            }
        };
        self.check_context(&repository, &root, &base)?;
        Ok((repository, StartPoint { root, base }))
    }

    fn check_context(&self, repository: &Repository, root: &Path, base: &str) -> Result<(), GitError> {
        if self.context_files.is_empty() {
            return Ok(());
        }
        let tree = Oid::from_str(base).and_then(|id| repository.find_commit(id)).and_then(|commit| commit.tree());
        let tree = git_context(format!("read the commit {base}"), tree)?;
        match self.context_files.iter().find(|file| tree.get_path(Path::new(file)).is_err()) {
            None => Ok(()),
            Some(file) => Err(GitError::ContextFileNotFound {
                file: file.clone(),
                path: root.to_owned(),
                commit: base.get(..SHOWN_ID_LENGTH).unwrap_or(base).to_owned(),
            }),
        }
    }
}

/// Top folder of the repository: that of its working tree, or the folder of a bare repository.
fn root(repository: &Repository) -> Result<PathBuf, GitError> {
    let root = repository.workdir().unwrap_or_else(|| repository.path()).to_path_buf();
    let root = root.canonicalize().unwrap_or(root);
    // The checked folders are those around `.git`; `core.worktree` could name the files of another repository.
    let git_dir = repository.path().canonicalize().unwrap_or_else(|_| repository.path().to_owned());
    let is_elsewhere = repository.workdir().is_some() && git_dir.parent() != Some(root.as_path());
    match git_dir.ends_with(".git") && is_elsewhere {
        true => Err(GitError::WorktreeElsewhere { config: git_dir.join("config"), worktree: root }),
        false => Ok(root),
    }
}
