//! The mirror's `main`: a copy of the repository's recorded main branch. The record is in the scheduler's database, so
//! that the mirrors of all runners have the same branch; a mirror rebuilds the merges that it lacks.
//!
//! If a recorded merge cannot be rebuilt (its base is no longer in the user's repository), `main` is a stand-in: a
//! commit with another id than the recorded one. A ref connects the two.

use cfq_proto::messages::RecordedMerge;
use git2::{ErrorCode, Oid, Repository};

use super::commit::rebuild;
use super::durable::sync_ref;
use super::error::{FailureKind, GitError, git_context, parse_oid};
use super::merge::{MainBranch, MergeOutcome, MergeRequest};
use super::mirror::Mirror;

const MAIN_REF: &str = "refs/heads/main";
/// Prefix of the ref of a stand-in; the rest of its name is the recorded commit.
const STAND_IN_REFS: &str = "refs/cfq/main";

impl Mirror {
    /// The mirror's `main`; `None` if the mirror has none yet.
    ///
    /// # Errors
    /// A [`GitError`] if libgit2 fails.
    pub fn main(&self) -> Result<Option<MainBranch>, GitError> {
        let repository = self.repository()?;
        let commit = match repository.refname_to_id(MAIN_REF) {
            Ok(id) => id,
            Err(error) if error.code() == ErrorCode::NotFound => return Ok(None),
            Err(source) => return Err(GitError::Git { operation: "read the mirror's main".to_owned(), source }),
        };
        // Its objects may be lost with a damaged disk.
        if repository.find_commit(commit).is_err() {
            return Ok(None);
        }
        let stand_in = stand_ins(&repository)?.into_iter().find(|(_, target)| *target == commit);
        let recorded = stand_in.map_or_else(|| commit.to_string(), |(recorded, _)| recorded);
        Ok(Some(MainBranch { recorded, commit: commit.to_string() }))
    }

    /// The first parent of a main branch's commit: the branch before its last merge. `None` if there is none.
    ///
    /// # Errors
    /// A [`GitError`] if libgit2 fails.
    pub fn main_before(&self, main: &MainBranch) -> Result<Option<MainBranch>, GitError> {
        let repository = self.repository()?;
        let commit = git_context("read the mirror's main", repository.find_commit(parse_oid(&main.commit)?))?;
        Ok(commit.parent_ids().next().map(|parent| MainBranch::at(&parent.to_string())))
    }

    /// Points `main` at a commit; it is on disk when this returns.
    ///
    /// # Errors
    /// A [`GitError`] if an id is invalid, the lock cannot be taken or libgit2 fails.
    pub fn set_main(&self, main: &MainBranch) -> Result<(), GitError> {
        let repository = self.repository()?;
        let _lock = self.lock("cfq-merge.lock")?;
        let commit = parse_oid(&main.commit)?;
        let stand_in = format!("{STAND_IN_REFS}/{}", main.recorded);
        if main.recorded != main.commit {
            git_context("record a stand-in", repository.reference(&stand_in, commit, true, "cfq: stand-in"))?;
            sync_ref(&repository, &stand_in)?;
        }
        let set = repository.reference(MAIN_REF, commit, true, "cfq: merge");
        git_context("update the mirror's main", set)?;
        sync_ref(&repository, MAIN_REF)?;
        for (recorded, _) in stand_ins(&repository)?.into_iter().filter(|(recorded, _)| *recorded != main.recorded) {
            let old = repository.find_reference(&format!("{STAND_IN_REFS}/{recorded}"));
            git_context("remove an old stand-in", old.and_then(|mut reference| reference.delete()))?;
        }
        Ok(())
    }

    /// Applies recorded merges, oldest first, to `main`, and returns the new `main`. Without a `main`, the first merge
    /// is applied to the commit that it was planned on, or to `base` if that is unknown. `fetch` copies a commit from the
    /// user's repository into this mirror.
    ///
    /// # Errors
    /// A [`GitError`] if libgit2 or `fetch` fails. A merge that cannot be rebuilt is skipped.
    pub fn replay(
        &self,
        main: Option<MainBranch>,
        merges: &[RecordedMerge],
        base: &str,
        fetch: &dyn Fn(&str) -> Result<(), GitError>,
    ) -> Result<MainBranch, GitError> {
        let repository = self.repository()?;
        let has = |commit: &str| parse_oid(commit).is_ok_and(|id| repository.find_commit(id).is_ok());
        let mut at = main.map(|main| main.commit);
        let mut recorded = at.clone().unwrap_or_default();
        for merge in merges {
            recorded.clone_from(&merge.new);
            if !has(&merge.new) {
                match self.apply(&repository, at.as_deref(), merge, fetch) {
                    Ok(commit) => at = Some(commit),
                    Err(error) if is_lost(&error) => {
                        let error = error.with_causes();
                        tracing::warn!(merge = merge.new, error, "an earlier merge cannot be rebuilt, skipping it");
                    }
                    Err(error) => return Err(error),
                }
            } else {
                at = Some(merge.new.clone());
            }
        }
        let main = MainBranch { recorded, commit: at.unwrap_or_else(|| base.to_owned()) };
        self.set_main(&main)?;
        Ok(main)
    }

    /// Creates the commits of one recorded merge on top of `main`, and returns the merge's commit.
    fn apply(
        &self,
        repository: &Repository,
        main: Option<&str>,
        merge: &RecordedMerge,
        fetch: &dyn Fn(&str) -> Result<(), GitError>,
    ) -> Result<String, GitError> {
        fetch(&merge.base)?;
        let head = rebuild(repository, &merge.base, &merge.artifacts)?;
        let known = parse_oid(&merge.old).is_ok_and(|old| repository.find_commit(old).is_ok());
        let start = main.unwrap_or(if known { &merge.old } else { &merge.base });
        let request = MergeRequest {
            main: &MainBranch::at(start),
            base: &merge.base,
            head: &head,
            has_base: false,
            message: &merge.message,
            time: merge.commit_time,
        };
        match self.plan_merge(&request)? {
            MergeOutcome::Planned(plan) => Ok(plan.new),
            MergeOutcome::Conflict { .. } => Err(GitError::NotReproduced {
                rebuilt: "none, because of a conflict".to_owned(),
                recorded: merge.new.clone(),
            }),
        }
    }
}

/// True if the records and the user's repository no longer have what a merge consists of.
fn is_lost(error: &GitError) -> bool {
    match error {
        GitError::CommitNotFound { .. } | GitError::InvalidCommitId { .. } | GitError::NotReproduced { .. } => true,
        GitError::AccessFailed { kind, .. } => *kind == FailureKind::CommitNotFound,
        _ => false,
    }
}

/// Recorded commit and target of every stand-in.
fn stand_ins(repository: &Repository) -> Result<Vec<(String, Oid)>, GitError> {
    let references = repository.references_glob(&format!("{STAND_IN_REFS}/*"));
    let references = git_context("list the stand-ins of main", references)?;
    let entry = |reference: git2::Reference<'_>| {
        let recorded = reference.name().ok()?.rsplit('/').next()?.to_owned();
        Some((recorded, reference.target()?))
    };
    Ok(references.flatten().filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, artifact, file};

    /// A user's repository, and recorded merges of tasks that each create a file.
    fn recorded(data: &std::path::Path, paths: &[&str]) -> (UserRepo, Vec<RecordedMerge>) {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let mirror = Mirror::open(data, &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let repository = mirror.repository().unwrap();
        let mut main = MainBranch::at(&user.base);
        let mut merges = Vec::new();
        for path in paths {
            let made = artifact(&repository, &user.base, &user.base, 1, vec![file(path, path)]);
            let head = made.commit.clone().unwrap();
            let (base, message, time) = (user.base.as_str(), "Merge\n", 9);
            let request = MergeRequest { main: &main, base, head: &head, has_base: false, message, time };
            let MergeOutcome::Planned(plan) = mirror.plan_merge(&request).unwrap() else { panic!("a conflict") };
            main = MainBranch::at(&plan.new);
            merges.push(RecordedMerge {
                old: plan.old,
                new: plan.new,
                commit_time: time,
                message: message.into(),
                base: base.into(),
                artifacts: vec![made],
            });
        }
        (user, merges)
    }

    #[test]
    fn removed_mirror_is_rebuilt_with_the_recorded_ids() {
        let data = tempfile::tempdir().unwrap();
        let (user, merges) = recorded(data.path(), &["b.py", "c.py", "d.py"]);
        std::fs::remove_dir_all(data.path().join("mirrors")).unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        assert_eq!(mirror.main().unwrap(), None);
        let fetch = |commit: &str| mirror.fetch_base(commit);
        let half = mirror.replay(None, &merges[..2], &user.base, &fetch).unwrap();
        assert_eq!(half, MainBranch::at(&merges[1].new));
        let main = mirror.replay(Some(half.clone()), &merges[2..], &user.base, &fetch).unwrap();
        assert_eq!(main, MainBranch::at(&merges[2].new));
        assert_eq!(mirror.main().unwrap(), Some(main.clone()));
        assert_eq!(mirror.main_before(&main).unwrap(), Some(half));
    }

    #[test]
    fn lost_merge_is_skipped_and_the_stand_in_is_kept() {
        let data = tempfile::tempdir().unwrap();
        let (user, mut merges) = recorded(data.path(), &["b.py", "c.py"]);
        std::fs::remove_dir_all(data.path().join("mirrors")).unwrap();
        merges[0].base = "12".repeat(20);
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let main = mirror.replay(None, &merges, &user.base, &|commit| mirror.fetch_base(commit)).unwrap();
        assert!(main.recorded == merges[1].new && main.commit != main.recorded, "{main:?}");
        assert_eq!(mirror.main().unwrap(), Some(main.clone()));
        let repository = mirror.repository().unwrap();
        let snapshot = crate::workstream::Snapshot::of(&repository, &main.commit).unwrap();
        assert!(snapshot.read("c.py").is_some() && snapshot.read("b.py").is_none());
        // The next merge is recorded as a successor of the recorded commit.
        let next = artifact(&repository, &user.base, &user.base, 2, vec![file("d.py", "d")]);
        let head = next.commit.unwrap();
        let request =
            MergeRequest { main: &main, base: &user.base, head: &head, has_base: true, message: "Merge\n", time: 9 };
        let MergeOutcome::Planned(plan) = mirror.plan_merge(&request).unwrap() else { panic!("a conflict") };
        assert_eq!(plan.old, merges[1].new);
        mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        assert_eq!(mirror.main().unwrap(), Some(MainBranch::at(&plan.new)));
        assert!(stand_ins(&repository).unwrap().is_empty());
    }
}
