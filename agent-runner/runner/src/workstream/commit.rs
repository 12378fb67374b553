//! Commits that come out the same whenever and wherever they are made.

use cfq_proto::looping::Artifact;
use cfq_proto::looping::ArtifactFile;
use git2::{Repository, Signature, Time};

use super::error::{GitError, git, oid};
use super::tree::Snapshot;

/// Author and committer of every commit cfq makes. Fixed, because a name of the machine or the user would make the
/// same step another commit elsewhere.
const NAME: &str = "cfq";
const EMAIL: &str = "cfq@localhost";

/// Everything a commit is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitPlan<'a> {
    /// The commit the files are against.
    pub base: &'a str,
    pub files: &'a [ArtifactFile],
    pub parent: &'a str,
    pub message: &'a str,
    /// Seconds since 1970.
    pub time: i64,
}

pub(crate) fn signature(time: i64) -> Result<Signature<'static>, GitError> {
    git("sign a commit", Signature::new(NAME, EMAIL, &Time::new(time, 0)))
}

/// Writes the commit's objects and returns its id. No reference moves.
pub(crate) fn create(repository: &Repository, plan: &CommitPlan<'_>) -> Result<String, GitError> {
    let tree = Snapshot::of(repository, plan.base)?.with(plan.files)?;
    let tree = git("read the new tree", repository.find_tree(tree))?;
    let parent = git(format!("find commit {}", plan.parent), repository.find_commit(oid(plan.parent)?))?;
    let me = signature(plan.time)?;
    let commit = git("write a commit", repository.commit(None, &me, &me, plan.message, &tree, &[&parent]))?;
    Ok(commit.to_string())
}

/// Makes the commits of `artifacts` again (oldest first, each the next one's parent) in a repository that has `base`,
/// and returns the last one's id. Only objects are added. Fails if an id comes out other than recorded.
pub fn rebuild(repository: &Repository, base: &str, artifacts: &[Artifact]) -> Result<String, GitError> {
    let base_id = oid(base)?;
    if repository.find_commit(base_id).is_err() {
        return Err(GitError::NoCommit { path: repository.path().to_owned(), commit: base.to_owned() });
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
        let made = create(repository, &plan)?;
        if made != *recorded {
            return Err(GitError::NotReproduced { made, recorded: recorded.clone() });
        }
        head = made;
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, artifact, file};

    #[test]
    fn the_same_plan_gives_the_same_id_in_any_repository_with_the_base() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("d/b.py", "y = 2\n")]);
        let other = user.folder.path().join("other");
        Repository::clone(user.path().to_str().unwrap(), &other).unwrap();
        let files =
            [file("a.py", "x = 2\n"), ArtifactFile { path: "d/b.py".into(), content: None }, file("n/c.py", "z\n")];
        let plan =
            CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 1_700_000_000 };
        let here = create(&user.repo(), &plan).unwrap();
        let there = create(&Repository::open(&other).unwrap(), &plan).unwrap();
        assert_eq!(here, there);
        assert_ne!(here, create(&user.repo(), &CommitPlan { time: 1, ..plan }).unwrap());
    }

    #[test]
    fn a_chain_is_made_again_from_its_artifacts() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let one = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("a.py", "x = 2\n")]);
        let two = artifact(&user.repo(), &user.base, one.commit.as_ref().unwrap(), 2, vec![file("a.py", "x = 3\n")]);
        let fresh = user.folder.path().join("fresh");
        let fresh = Repository::clone(user.path().to_str().unwrap(), fresh).unwrap();
        assert_eq!(rebuild(&fresh, &user.base, &[one.clone(), two.clone()]).unwrap(), two.commit.clone().unwrap());
        let forged = Artifact { files: vec![file("a.py", "x = 4\n")], ..two };
        assert!(matches!(rebuild(&fresh, &user.base, &[one, forged]), Err(GitError::NotReproduced { .. })));
        let nowhere = "1".repeat(40);
        assert!(matches!(rebuild(&fresh, &nowhere, &[]), Err(GitError::NoCommit { .. })));
    }
}
