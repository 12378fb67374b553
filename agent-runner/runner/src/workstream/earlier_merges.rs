//! The tasks that were merged into `main` before, named for a user whose result cannot be merged.

use std::path::Path;

use git2::{Commit, Oid, Repository};

/// Maximum number of commits of `main` that are read.
const MAX_COMMITS: usize = 64;
/// Maximum number of tasks that are named.
const MAX_NAMED: usize = 3;
/// Start of the message of a merge commit.
const MERGE_PREFIX: &str = "Merge ";

/// Names the tasks of the last merges on `main`, newest first, back to the commit `until`. With `paths`, only those that
/// changed one of them. Commits that cannot be read are left out.
pub(super) fn earlier_merges(repository: &Repository, main: Oid, until: Option<Oid>, paths: &[String]) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut next = Some(main).filter(|main| Some(*main) != until);
    for _ in 0..MAX_COMMITS {
        let Some(commit) = next.and_then(|id| repository.find_commit(id).ok()) else { break };
        if let Some(name) = task_name(&commit)
            && names.last() != Some(&name)
            && (paths.is_empty() || changes_one_of(&commit, paths))
        {
            names.push(name);
        }
        next = commit.parent_id(0).ok().filter(|parent| Some(*parent) != until);
    }
    names.dedup();
    let more = names.len().saturating_sub(MAX_NAMED);
    names.truncate(MAX_NAMED);
    let mut text = names.join(", ");
    if more > 0 {
        text.push_str(&format!(", and {more} more"));
    }
    text
}

/// The task and its title, from the message of a commit that cfq has created.
fn task_name(commit: &Commit<'_>) -> Option<String> {
    let line = commit.message().ok()?.lines().next()?;
    let name = line.strip_prefix(MERGE_PREFIX).unwrap_or(line);
    let number = name.strip_prefix('t')?.split_once(": ")?.0;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then(|| name.to_owned())
}

fn changes_one_of(commit: &Commit<'_>, paths: &[String]) -> bool {
    let tree = commit.tree().ok();
    let before = commit.parent(0).and_then(|parent| parent.tree()).ok();
    paths.iter().any(|path| {
        let entry = |tree: &Option<git2::Tree<'_>>| {
            tree.as_ref()
                .and_then(|tree| tree.get_path(Path::new(path)).ok())
                .map(|entry| (entry.id(), entry.filemode()))
        };
        entry(&tree) != entry(&before)
    })
}
