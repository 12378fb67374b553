//! Unified diffs between two commits, for users and for the critic.

use git2::{DiffFormat, DiffOptions, Repository};

use super::error::{GitError, git_context};
use super::tree::Snapshot;

/// Number of unchanged lines around a change.
const CONTEXT_LINES: u32 = 3;

/// Returns the unified diff from the tree of commit `from` to the tree of commit `to`. Bytes that are not UTF-8 are
/// replaced.
///
/// # Errors
/// A [`GitError`] if a commit is missing or libgit2 fails.
pub fn unified(repository: &Repository, from: &str, to: &str) -> Result<String, GitError> {
    let (from, to) = (Snapshot::of(repository, from)?, Snapshot::of(repository, to)?);
    let mut options = DiffOptions::new();
    options.context_lines(CONTEXT_LINES).indent_heuristic(true);
    let diff = repository.diff_tree_to_tree(Some(from.tree()), Some(to.tree()), Some(&mut options));
    let diff = git_context("compare two trees", diff)?;
    let mut text = String::new();
    let printed = diff.print(DiffFormat::Patch, |_, _, line| {
        if matches!(line.origin(), '+' | '-' | ' ') {
            text.push(line.origin());
        }
        text.push_str(&String::from_utf8_lossy(line.content()));
        true
    });
    git_context("print a diff", printed)?;
    Ok(text)
}
