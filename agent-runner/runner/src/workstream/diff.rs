//! What changed: for people as a unified diff, for the checks as line numbers.

use std::collections::BTreeSet;

use git2::{DiffFormat, DiffOptions, Patch, Repository};

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

/// Numbers (from 1) of the lines in `new` that `old` does not have there.
pub fn added_lines(old: &str, new: &str) -> Result<BTreeSet<usize>, GitError> {
    if old.is_empty() {
        return Ok((1..=new.lines().count()).collect());
    }
    let patch = git("compare two files", Patch::from_buffers(old.as_bytes(), None, new.as_bytes(), None, None))?;
    let mut added = BTreeSet::new();
    for hunk in 0..patch.num_hunks() {
        for line in 0..git("read a diff", patch.num_lines_in_hunk(hunk))? {
            let line = git("read a diff", patch.line_in_hunk(hunk, line))?;
            if line.origin() == '+' {
                added.extend(line.new_lineno().and_then(|n| usize::try_from(n).ok()));
            }
        }
    }
    Ok(added)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_added_lines_are_numbered() {
        assert_eq!(added_lines("a\nb\nc\n", "a\nx\nb\nc\ny\n").unwrap(), BTreeSet::from([2, 5]));
        assert_eq!(added_lines("", "a\nb\n").unwrap(), BTreeSet::from([1, 2]));
        assert_eq!(added_lines("a\n", "a\n").unwrap(), BTreeSet::new());
        assert_eq!(added_lines("a\nb\n", "b\n").unwrap(), BTreeSet::new());
    }
}
