//! The tasks that were merged into `main` before, named for a user whose result cannot be merged.

use std::fmt;
use std::path::Path;

use git2::{Commit, Oid, Repository};

use super::commit::AUTHOR_EMAIL;

/// Maximum number of commits of `main` that are read.
const MAX_COMMITS: usize = 64;
/// Maximum number of tasks that are named.
const MAX_NAMED: usize = 3;
/// Start of the subject of a merge commit.
const MERGE_PREFIX: &str = "Merge ";

/// The tasks of the last merges into `main`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EarlierMerges {
    /// The last of them with their titles, newest first.
    named: Vec<String>,
    /// Number of others.
    more: usize,
}

impl EarlierMerges {
    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }
}

impl fmt::Display for EarlierMerges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.named.join(", "))?;
        match self.more {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

/// Names the tasks of the last merges on `main`, back to the commit `until`. With `paths`, only those that changed one
/// of them. Commits that cannot be read are left out.
pub(super) fn earlier_merges(
    repository: &Repository,
    main: Oid,
    until: Option<Oid>,
    paths: &[String],
) -> EarlierMerges {
    let mut named: Vec<String> = Vec::new();
    let mut next = Some(main).filter(|main| Some(*main) != until);
    for _ in 0..MAX_COMMITS {
        let Some(commit) = next.and_then(|id| repository.find_commit(id).ok()) else { break };
        // The commits of one task follow one another.
        if let Some(name) = task_name(&commit)
            && named.last() != Some(&name)
            && (paths.is_empty() || changes_one_of(&commit, paths))
        {
            named.push(name);
        }
        next = commit.parent_id(0).ok().filter(|parent| Some(*parent) != until);
    }
    let more = named.len().saturating_sub(MAX_NAMED);
    named.truncate(MAX_NAMED);
    EarlierMerges { named, more }
}

/// The task and its title, from the subject of a commit that cfq created.
fn task_name(commit: &Commit<'_>) -> Option<String> {
    if commit.author().email_bytes() != AUTHOR_EMAIL.as_bytes() {
        return None;
    }
    let subject = commit.message().ok()?.lines().next()?;
    let name = subject.strip_prefix(MERGE_PREFIX).unwrap_or(subject);
    let number = name.strip_prefix('t')?.split_once(": ")?.0;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then(|| name.to_owned())
}

fn changes_one_of(commit: &Commit<'_>, paths: &[String]) -> bool {
    let tree = commit.tree().ok();
    let before = commit.parent(0).and_then(|parent| parent.tree()).ok();
    paths.iter().any(|path| {
        let entry = |tree: &Option<git2::Tree<'_>>| {
            let entry = tree.as_ref()?.get_path(Path::new(path)).ok()?;
            Some((entry.id(), entry.filemode()))
        };
        entry(&tree) != entry(&before)
    })
}
