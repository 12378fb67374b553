//! The repository and the base commit of a new task.

use std::path::{Path, PathBuf};

use git2::{ErrorCode, ObjectType, Oid, Pathspec, PathspecFlags, Repository, Tree};
use serde::{Deserialize, Serialize};

use super::error::{GitError, git_context};
use super::source::{find_source_repository, head_of};

/// Number of characters of a commit id that messages show.
const SHOWN_ID_LENGTH: usize = 12;
/// Maximum number of files that a pattern may match.
const MAX_MATCHES: usize = 50;

/// What a user wants to start a task from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPointRequest {
    /// A folder in the repository, canonical.
    pub dir: PathBuf,
    /// A commit, branch or tag; HEAD if absent.
    pub base: Option<String>,
    /// Files that the base commit must contain: a missing file is most likely misspelt, or not committed yet. A folder
    /// means all its files. A path with `*`, `?` or `[` is a pattern as in git, which must match a file.
    pub context_files: Vec<String>,
}

/// Repository and commit that a task starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPoint {
    /// Top folder of the repository.
    pub root: PathBuf,
    /// Id of the base commit.
    pub base: String,
    /// The context files of the request, with those that its patterns match.
    pub context_files: Vec<String>,
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
                    reason: match error.code() {
                        ErrorCode::NotFound => "there is no such commit, branch or tag".to_owned(),
                        _ => error.message().to_owned(),
                    },
                })?;
                commit.id().to_string()
            }
        };
        let context_files = self.find_context(&repository, &root, &base)?;
        Ok((repository, StartPoint { root, base, context_files }))
    }

    /// The context files, which the base contains.
    fn find_context(&self, repository: &Repository, root: &Path, base: &str) -> Result<Vec<String>, GitError> {
        if self.context_files.is_empty() {
            return Ok(Vec::new());
        }
        let tree = Oid::from_str(base).and_then(|id| repository.find_commit(id)).and_then(|commit| commit.tree());
        let tree = git_context(format!("read the commit {base}"), tree)?;
        let commit = || base.get(..SHOWN_ID_LENGTH).unwrap_or(base).to_owned();
        let mut found: Vec<String> = Vec::new();
        for file in &self.context_files {
            let kind = tree.get_path(Path::new(file)).ok().and_then(|entry| entry.kind());
            let matches = match kind {
                // All files of a folder.
                Some(ObjectType::Tree) => matching_files(&tree, file)?,
                Some(_) => vec![file.clone()],
                None if file.contains(['*', '?', '[']) => matching_files(&tree, file)?,
                None => Vec::new(),
            };
            if matches.is_empty() {
                return Err(GitError::ContextFileNotFound {
                    file: file.clone(),
                    path: root.to_owned(),
                    commit: commit(),
                });
            }
            if matches.len() > MAX_MATCHES {
                let (pattern, files) = (file.clone(), matches.len());
                return Err(GitError::TooManyContextFiles { pattern, files, most: MAX_MATCHES });
            }
            // A file that several patterns match is shown once.
            for path in matches {
                if !found.contains(&path) {
                    found.push(path);
                }
            }
        }
        Ok(found)
    }
}

/// The files of the tree that a pattern matches, in the order of their paths.
fn matching_files(tree: &Tree<'_>, pattern: &str) -> Result<Vec<String>, GitError> {
    let what = || format!("look for files that {pattern} matches");
    let spec = git_context(what(), Pathspec::new([pattern]))?;
    let found = git_context(what(), spec.match_tree(tree, PathspecFlags::DEFAULT))?;
    let mut paths: Vec<String> =
        found.entries().filter_map(|path| std::str::from_utf8(path).ok()).map(str::to_owned).collect();
    paths.sort_unstable();
    Ok(paths)
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
