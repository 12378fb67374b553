//! Reproducible commits: equal plans give equal commit ids, at any time and in any repository that has the base.

use cfq_proto::loop_step::Artifact;
use cfq_proto::loop_step::ArtifactFile;
use git2::{Repository, Signature, Time};

use super::durable::sync_commit;
use super::error::{GitError, git_context, parse_oid};
use super::tree::Snapshot;

/// Author and committer of every commit that cfq creates. Fixed, because the name of a machine or a user would change
/// the commit id of the same step on another machine.
pub(super) const AUTHOR_NAME: &str = "cfq";
pub(super) const AUTHOR_EMAIL: &str = "cfq@localhost";

/// All inputs of a commit; its id is a function of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitPlan<'a> {
    /// Id of the commit to whose tree the files are applied.
    pub base: &'a str,
    /// Files that are added, changed or removed compared with `base`.
    pub files: &'a [ArtifactFile],
    /// Parent commit id.
    pub parent: &'a str,
    /// Commit message.
    pub message: &'a str,
    /// Author and committer time, in seconds since 1970 (UTC).
    pub time: i64,
}

/// Signature of cfq at `time`, in seconds since 1970.
pub(crate) fn signature(time: i64) -> Result<Signature<'static>, GitError> {
    git_context("create the commit signature", Signature::new(AUTHOR_NAME, AUTHOR_EMAIL, &Time::new(time, 0)))
}

/// Writes the commit's objects and returns its id; they are on disk then. No ref is updated.
pub(crate) fn create_commit(repository: &Repository, plan: &CommitPlan<'_>) -> Result<String, GitError> {
    let base = Snapshot::of(repository, plan.base)?;
    let tree = base.write_tree_with(plan.files)?;
    let tree = git_context("read the new tree", repository.find_tree(tree))?;
    let parent = git_context(format!("find commit {}", plan.parent), repository.find_commit(parse_oid(plan.parent)?))?;
    let author = signature(plan.time)?;
    let commit =
        git_context("write a commit", repository.commit(None, &author, &author, plan.message, &tree, &[&parent]))?;
    sync_commit(repository, commit, base.tree())?;
    Ok(commit.to_string())
}

/// Rebuilds the commits of `artifacts` (oldest first, each the parent of the next) in a repository that has `base`, and
/// returns the id of the last one. Only objects are added.
///
/// # Errors
/// [`GitError::CommitNotFound`] if the repository lacks `base`, [`GitError::NotReproduced`] if an id differs from the
/// recorded one, and other [`GitError`]s if libgit2 fails.
pub fn rebuild(repository: &Repository, base: &str, artifacts: &[Artifact]) -> Result<String, GitError> {
    let base_id = parse_oid(base)?;
    if repository.find_commit(base_id).is_err() {
        return Err(GitError::CommitNotFound { path: repository.path().to_owned(), commit: base.to_owned() });
    }
    let mut head = base.to_owned();
    for artifact in artifacts {
        let Some(recorded) = &artifact.commit else { continue };
        let plan = CommitPlan {
            base,
            files: &artifact.files,
            parent: &artifact.parent,
            message: &artifact.commit_message,
            time: artifact.commit_time,
        };
        let rebuilt = create_commit(repository, &plan)?;
        if rebuilt != *recorded {
            return Err(GitError::NotReproduced { rebuilt, recorded: recorded.clone() });
        }
        head = rebuilt;
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, artifact, file};

    #[test]
    fn commit_id_is_equal_in_any_repository_with_the_base() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("d/b.py", "y = 2\n")]);
        let other = user.folder.path().join("other");
        Repository::clone(user.path().to_str().unwrap(), &other).unwrap();
        let files = [file("a.py", "x = 2\n"), ArtifactFile::removed("d/b.py"), file("n/c.py", "z\n")];
        let plan =
            CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 1_700_000_000 };
        let here = create_commit(&user.repo(), &plan).unwrap();
        let there = create_commit(&Repository::open(&other).unwrap(), &plan).unwrap();
        assert_eq!(here, there);
        assert_ne!(here, create_commit(&user.repo(), &CommitPlan { time: 1, ..plan }).unwrap());
    }

    #[test]
    fn rebuild_reproduces_the_recorded_commits() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let one = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("a.py", "x = 2\n")]);
        let two = artifact(&user.repo(), &user.base, one.commit.as_ref().unwrap(), 2, vec![file("a.py", "x = 3\n")]);
        let fresh = user.folder.path().join("fresh");
        let fresh = Repository::clone(user.path().to_str().unwrap(), fresh).unwrap();
        assert_eq!(rebuild(&fresh, &user.base, &[one.clone(), two.clone()]).unwrap(), two.commit.clone().unwrap());
        let forged = Artifact { files: vec![file("a.py", "x = 4\n")], ..two };
        assert!(matches!(rebuild(&fresh, &user.base, &[one, forged]), Err(GitError::NotReproduced { .. })));
        let unknown = "1".repeat(40);
        assert!(matches!(rebuild(&fresh, &unknown, &[]), Err(GitError::CommitNotFound { .. })));
    }
}
