//! What changed, as a unified diff: for people, and for the critic.

use git2::{DiffFormat, DiffOptions, Repository};

use super::error::{GitError, git};
use super::tree::Snapshot;

/// Lines of context around a change in diffs.
const CONTEXT: u32 = 3;

/// Unified diff from one commit's tree to another's.
pub fn unified(repository: &Repository, from: &str, to: &str) -> Result<String, GitError> {
    let (from, to) = (Snapshot::of(repository, from)?, Snapshot::of(repository, to)?);
    let mut options = DiffOptions::new();
    options.context_lines(CONTEXT).indent_heuristic(true);
    let diff = repository.diff_tree_to_tree(Some(from.tree()), Some(to.tree()), Some(&mut options));
    let diff = git("compare two trees", diff)?;
    let mut text = String::new();
    let printed = diff.print(DiffFormat::Patch, |_, _, line| {
        if matches!(line.origin(), '+' | '-' | ' ') {
            text.push(line.origin());
        }
        text.push_str(&String::from_utf8_lossy(line.content()));
        true
    });
    git("print a diff", printed)?;
    Ok(text)
}
