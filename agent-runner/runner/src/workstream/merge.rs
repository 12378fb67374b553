//! Merge into the mirror's `main`: planned, recorded as an intent, then one compare-and-swap of the ref.
//!
//! After a crash the next attempt compares the ref with the recorded intent. If `main` is at the old commit, the ref is
//! updated; if `main` contains the new commit, the merge is already done; otherwise another task merged first, and the
//! merge is planned again.

use git2::{ErrorCode, MergeOptions, Oid, Repository};

use super::commit::signature;
use super::durable::{sync_commit, sync_ref};
use super::error::{GitError, git_context, parse_oid};
use super::mirror::Mirror;

const MAIN_REF: &str = "refs/heads/main";

/// A planned update of `main`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergePlan {
    /// Current commit of `main`.
    pub old: String,
    /// Commit of `main` after the merge: the head itself (fast-forward), or a merge commit.
    pub new: String,
}

/// Result of planning a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MergeOutcome {
    /// The merge is possible.
    Planned(MergePlan),
    /// Both sides changed the same paths.
    Conflict {
        /// Conflicting paths, sorted.
        paths: Vec<String>,
    },
}

/// State of `main` after a merge attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeState {
    /// `main` contains the new commit, merged now or before.
    Merged,
    /// `main` has moved to a commit that is not the old one and does not contain the new one: plan again.
    MainMoved,
}

impl Mirror {
    /// Plans the merge of `head` into `main`. Writes at most the objects of a merge commit, and creates `main` at the
    /// task's base if the mirror has none. The merge commit is a function of `main`'s commit, `head`, `message` and
    /// `time` (seconds since 1970).
    ///
    /// # Errors
    /// A [`GitError`] if an id is invalid, a commit is missing or libgit2 fails.
    pub fn plan_merge(&self, base: &str, head: &str, message: &str, time: i64) -> Result<MergeOutcome, GitError> {
        let repository = self.repository()?;
        let head = parse_oid(head)?;
        let old = main_or_create(&repository, parse_oid(base)?)?;
        let planned = |new: Oid| Ok(MergeOutcome::Planned(MergePlan { old: old.to_string(), new: new.to_string() }));
        if old == head || is_ancestor(&repository, head, old)? {
            return planned(old);
        }
        if is_ancestor(&repository, old, head)? {
            return planned(head);
        }
        let ours = git_context("read the mirror's main", repository.find_commit(old))?;
        let theirs = git_context("read the commit to merge", repository.find_commit(head))?;
        let mut options = MergeOptions::new();
        options.find_renames(true);
        let mut index = git_context("merge", repository.merge_commits(&ours, &theirs, Some(&options)))?;
        if index.has_conflicts() {
            let mut paths: Vec<String> = git_context("read the conflicts", index.conflicts())?
                .flatten()
                .filter_map(|c| c.our.or(c.their).or(c.ancestor))
                .map(|entry| String::from_utf8_lossy(&entry.path).into_owned())
                .collect();
            paths.sort();
            paths.dedup();
            return Ok(MergeOutcome::Conflict { paths });
        }
        let tree = git_context("write the merged tree", index.write_tree_to(&repository))?;
        let tree = git_context("read the merged tree", repository.find_tree(tree))?;
        let author = signature(time)?;
        let parents = [&ours, &theirs];
        let merge_commit = repository.commit(None, &author, &author, message, &tree, &parents);
        let merge_commit = git_context("write the merge commit", merge_commit)?;
        sync_commit(&repository, merge_commit, &git_context("read the tree of main", ours.tree())?)?;
        planned(merge_commit)
    }

    /// Carries out a recorded merge intent; the new `main` is on disk when this returns. Idempotent.
    ///
    /// # Errors
    /// A [`GitError`] if an id is invalid, the lock cannot be taken or libgit2 fails.
    pub fn merge(&self, old: &str, new: &str) -> Result<MergeState, GitError> {
        let repository = self.repository()?;
        let _lock = self.lock("cfq-merge.lock")?;
        let (old, new) = (parse_oid(old)?, parse_oid(new)?);
        let main = main_or_create(&repository, old)?;
        if main == new || (main != old && is_ancestor(&repository, new, main)?) {
            sync_ref(&repository, MAIN_REF)?;
            return Ok(MergeState::Merged);
        }
        if main != old {
            return Ok(MergeState::MainMoved);
        }
        match repository.reference_matching(MAIN_REF, new, true, old, "cfq: merge") {
            Ok(_) => sync_ref(&repository, MAIN_REF).map(|()| MergeState::Merged),
            Err(error) if error.code() == ErrorCode::Modified => Ok(MergeState::MainMoved),
            Err(source) => Err(GitError::Git { operation: "update the mirror's main".to_owned(), source }),
        }
    }
}

/// Returns the commit of `main`; creates `main` at `start` if it does not exist.
fn main_or_create(repository: &Repository, start: Oid) -> Result<Oid, GitError> {
    match repository.refname_to_id(MAIN_REF) {
        Ok(id) => Ok(id),
        Err(error) if error.code() == ErrorCode::NotFound => {
            match repository.reference(MAIN_REF, start, false, "cfq: start") {
                Ok(_) => Ok(start),
                Err(error) if error.code() == ErrorCode::Exists => {
                    git_context("read the mirror's main", repository.refname_to_id(MAIN_REF))
                }
                Err(source) => Err(GitError::Git { operation: "create the mirror's main".to_owned(), source }),
            }
        }
        Err(source) => Err(GitError::Git { operation: "read the mirror's main".to_owned(), source }),
    }
}

/// True if `ancestor` is a strict ancestor of `commit`. False if the repository lacks one of them.
fn is_ancestor(repository: &Repository, ancestor: Oid, commit: Oid) -> Result<bool, GitError> {
    if repository.find_commit(ancestor).is_err() || repository.find_commit(commit).is_err() {
        return Ok(false);
    }
    git_context("walk the history", repository.graph_descendant_of(commit, ancestor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};
    use crate::workstream::{CommitPlan, Snapshot};

    struct Fixture {
        user: UserRepo,
        mirror: Mirror,
        _data: tempfile::TempDir,
    }

    fn fixture() -> Fixture {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "y = 1\n")]);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        Fixture { user, mirror, _data: data }
    }

    impl Fixture {
        fn head(&self, path: &str, content: &str) -> String {
            let files = [file(path, content)];
            let base = &self.user.base;
            self.mirror.commit(&CommitPlan { base, files: &files, parent: base, message: path, time: 7 }).unwrap()
        }

        fn plan(&self, head: &str) -> MergeOutcome {
            self.mirror.plan_merge(&self.user.base, head, "Merge", 9).unwrap()
        }

        fn planned(&self, head: &str) -> MergePlan {
            let MergeOutcome::Planned(plan) = self.plan(head) else { panic!("a conflict") };
            plan
        }

        fn main(&self) -> String {
            self.mirror.repository().unwrap().refname_to_id(MAIN_REF).unwrap().to_string()
        }
    }

    #[test]
    fn first_merge_fast_forwards_and_second_creates_a_merge_commit() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("b.py", "y = 2\n"));
        let plan = f.planned(&one);
        assert_eq!(plan, MergePlan { old: f.user.base.clone(), new: one.clone() });
        assert_eq!(f.mirror.merge(&plan.old, &plan.new).unwrap(), MergeState::Merged);
        let plan = f.planned(&two);
        assert_eq!(plan.old, one);
        assert_eq!(plan, f.planned(&two), "planning is idempotent");
        assert_eq!(f.mirror.merge(&plan.old, &plan.new).unwrap(), MergeState::Merged);
        let repository = f.mirror.repository().unwrap();
        let merged = Snapshot::of(&repository, &f.main()).unwrap();
        assert_eq!(merged.read_text("a.py").unwrap(), "x = 2\n");
        assert_eq!(merged.read_text("b.py").unwrap(), "y = 2\n");
    }

    #[test]
    fn merge_intent_is_idempotent_and_refused_after_main_moved() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("b.py", "y = 2\n"));
        let (first, stale) = (f.planned(&one), f.planned(&two));
        assert_eq!(f.mirror.merge(&first.old, &first.new).unwrap(), MergeState::Merged);
        assert_eq!(f.mirror.merge(&stale.old, &stale.new).unwrap(), MergeState::MainMoved);
        let again = f.planned(&two);
        assert_eq!(f.mirror.merge(&again.old, &again.new).unwrap(), MergeState::Merged);
        let main = f.main();
        assert_eq!(f.mirror.merge(&first.old, &first.new).unwrap(), MergeState::Merged, "already in main");
        assert_eq!(f.main(), main, "main does not move back");
        assert_eq!(f.planned(&one), MergePlan { old: main.clone(), new: main });
    }

    #[test]
    fn conflict_names_its_paths_and_leaves_main_unchanged() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("a.py", "x = 3\n"));
        let plan = f.planned(&one);
        f.mirror.merge(&plan.old, &plan.new).unwrap();
        assert_eq!(f.plan(&two), MergeOutcome::Conflict { paths: vec!["a.py".into()] });
        assert_eq!(f.main(), one);
    }
}
