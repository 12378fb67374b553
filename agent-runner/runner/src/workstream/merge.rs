//! Merging into the mirror's `main`: planned, recorded as an intent, then one compare-and-swap of the reference.
//!
//! Whoever is killed in between finds out by comparing the reference with the intent: it stands at the old commit (swap),
//! at or behind the new one (done), or elsewhere (somebody merged first: plan again).

use git2::{ErrorCode, MergeOptions, Oid, Repository};

use super::commit::signature;
use super::error::{GitError, git, oid};
use super::mirror::Mirror;

const MAIN: &str = "refs/heads/main";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergePlan {
    /// Where `main` stands.
    pub old: String,
    /// Where it will stand: the head itself, or a merge commit.
    pub new: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MergeOutcome {
    Planned(MergePlan),
    /// These paths were changed on both sides.
    Conflict {
        paths: Vec<String>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeState {
    /// `main` has the new commit, now or already before.
    Merged,
    /// `main` stands neither at the old nor at the new commit.
    Overtaken,
}

impl Mirror {
    /// What merging `head` would do. Writes at most a merge commit's objects, and makes `main` at the task's base if the
    /// mirror has none. The merge commit is a function of both commits, `message` and `time`.
    pub fn plan_merge(&self, base: &str, head: &str, message: &str, time: i64) -> Result<MergeOutcome, GitError> {
        let repository = self.repository()?;
        let head = oid(head)?;
        let old = main_or(&repository, oid(base)?)?;
        let planned = |new: Oid| Ok(MergeOutcome::Planned(MergePlan { old: old.to_string(), new: new.to_string() }));
        if old == head || contains(&repository, old, head)? {
            return planned(old);
        }
        if contains(&repository, head, old)? {
            return planned(head);
        }
        let ours = git("read main", repository.find_commit(old))?;
        let theirs = git("read the head to merge", repository.find_commit(head))?;
        let mut options = MergeOptions::new();
        options.find_renames(true);
        let mut index = git("merge", repository.merge_commits(&ours, &theirs, Some(&options)))?;
        if index.has_conflicts() {
            let mut paths: Vec<String> = git("read the conflicts", index.conflicts())?
                .flatten()
                .filter_map(|c| c.our.or(c.their).or(c.ancestor))
                .map(|entry| String::from_utf8_lossy(&entry.path).into_owned())
                .collect();
            paths.sort();
            paths.dedup();
            return Ok(MergeOutcome::Conflict { paths });
        }
        let tree = git("write the merged tree", index.write_tree_to(&repository))?;
        let tree = git("read the merged tree", repository.find_tree(tree))?;
        let me = signature(time)?;
        planned(git("write the merge commit", repository.commit(None, &me, &me, message, &tree, &[&ours, &theirs]))?)
    }

    /// Carries out a recorded intent; may be called again.
    pub fn merge(&self, old: &str, new: &str) -> Result<MergeState, GitError> {
        let repository = self.repository()?;
        let _alone = self.lock("cfq-merge.lock")?;
        let (old, new) = (oid(old)?, oid(new)?);
        let main = main_or(&repository, old)?;
        if main == new || (main != old && contains(&repository, main, new)?) {
            return Ok(MergeState::Merged);
        }
        if main != old {
            return Ok(MergeState::Overtaken);
        }
        match repository.reference_matching(MAIN, new, true, old, "cfq: merge") {
            Ok(_) => Ok(MergeState::Merged),
            Err(error) if error.code() == ErrorCode::Modified => Ok(MergeState::Overtaken),
            Err(source) => Err(GitError::Git { doing: "move main".to_owned(), source }),
        }
    }
}

/// Where `main` stands; made at `start` if there is none.
fn main_or(repository: &Repository, start: Oid) -> Result<Oid, GitError> {
    match repository.refname_to_id(MAIN) {
        Ok(id) => Ok(id),
        Err(error) if error.code() == ErrorCode::NotFound => {
            match repository.reference(MAIN, start, false, "cfq: start") {
                Ok(_) => Ok(start),
                Err(error) if error.code() == ErrorCode::Exists => git("read main", repository.refname_to_id(MAIN)),
                Err(source) => Err(GitError::Git { doing: "make main".to_owned(), source }),
            }
        }
        Err(source) => Err(GitError::Git { doing: "read main".to_owned(), source }),
    }
}

/// Whether `ancestor` is reachable from `commit`, its parents and theirs. An id that is not here is not.
fn contains(repository: &Repository, commit: Oid, ancestor: Oid) -> Result<bool, GitError> {
    if repository.find_commit(ancestor).is_err() || repository.find_commit(commit).is_err() {
        return Ok(false);
    }
    git("walk the history", repository.graph_descendant_of(commit, ancestor))
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
            self.mirror.repository().unwrap().refname_to_id(MAIN).unwrap().to_string()
        }
    }

    #[test]
    fn the_first_merge_is_a_fast_forward_and_the_second_a_real_one() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("b.py", "y = 2\n"));
        let plan = f.planned(&one);
        assert_eq!(plan, MergePlan { old: f.user.base.clone(), new: one.clone() });
        assert_eq!(f.mirror.merge(&plan.old, &plan.new).unwrap(), MergeState::Merged);
        let plan = f.planned(&two);
        assert_eq!(plan.old, one);
        assert_eq!(plan, f.planned(&two), "planning again changes nothing");
        assert_eq!(f.mirror.merge(&plan.old, &plan.new).unwrap(), MergeState::Merged);
        let repository = f.mirror.repository().unwrap();
        let merged = Snapshot::of(&repository, &f.main()).unwrap();
        assert_eq!(merged.read_text("a.py").unwrap(), "x = 2\n");
        assert_eq!(merged.read_text("b.py").unwrap(), "y = 2\n");
    }

    #[test]
    fn an_intent_may_be_carried_out_again_and_is_not_when_overtaken() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("b.py", "y = 2\n"));
        let (first, stale) = (f.planned(&one), f.planned(&two));
        assert_eq!(f.mirror.merge(&first.old, &first.new).unwrap(), MergeState::Merged);
        assert_eq!(f.mirror.merge(&stale.old, &stale.new).unwrap(), MergeState::Overtaken);
        let again = f.planned(&two);
        assert_eq!(f.mirror.merge(&again.old, &again.new).unwrap(), MergeState::Merged);
        let main = f.main();
        assert_eq!(f.mirror.merge(&first.old, &first.new).unwrap(), MergeState::Merged, "long since in main");
        assert_eq!(f.main(), main, "nothing moved back");
        assert_eq!(f.planned(&one), MergePlan { old: main.clone(), new: main });
    }

    #[test]
    fn a_conflict_names_its_paths_and_moves_nothing() {
        let f = fixture();
        let (one, two) = (f.head("a.py", "x = 2\n"), f.head("a.py", "x = 3\n"));
        let plan = f.planned(&one);
        f.mirror.merge(&plan.old, &plan.new).unwrap();
        assert_eq!(f.plan(&two), MergeOutcome::Conflict { paths: vec!["a.py".into()] });
        assert_eq!(f.main(), one);
    }
}
