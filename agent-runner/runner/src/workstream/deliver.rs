//! Creates the delivery branch: the only write of cfq into the user's repository.

use std::path::Path;

use cfq_proto::ids::TaskNumber;
use cfq_proto::loop_step::Artifact;
use git2::{ErrorCode, Repository};

use super::commit::rebuild;
use super::error::{GitError, parse_oid};
use super::source::open_source_repository;

/// Maximum length of the slug in a branch name, in bytes. Short, because users type branch names.
const MAX_SLUG_BYTES: usize = 40;
/// Number of names tried if the branch name is taken: the name itself, then with the suffixes `-2`, `-3`, ...
const MAX_BRANCH_NAMES: u32 = 50;

/// A branch that was created in the user's repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveredBranch {
    /// Short branch name, without `refs/heads/`.
    pub branch: String,
    /// Id of the commit that the branch points at.
    pub commit: String,
}

/// Name of a task's delivery branch, such as `cfq/t42-add-a-parser`: the task number and the first words of the
/// description.
pub fn branch_name(number: TaskNumber, description: &str) -> String {
    let mut slug = String::new();
    for c in description.chars() {
        if c.is_ascii_alphanumeric() {
            slug.push(c.to_ascii_lowercase());
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
        if slug.len() >= MAX_SLUG_BYTES {
            // Cut at the end of a word, if one ends in the last third.
            if let Some(end) = slug.rfind('-').filter(|end| *end > MAX_SLUG_BYTES * 2 / 3) {
                slug.truncate(end);
            }
            break;
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() { format!("cfq/{number}") } else { format!("cfq/{number}-{slug}") }
}

/// Creates the branch `branch` with the commits of `artifacts` (oldest first). HEAD, the index and the working tree are
/// not changed. Idempotent: if the branch already points at the recorded commit, it is returned, and no write access is
/// needed. If it points at another commit, a numeric suffix is added to the name.
///
/// # Errors
/// A [`GitError`] if the repository cannot be opened or written, if the commits cannot be rebuilt
/// (see [`rebuild`]), or if no branch name is free.
pub fn deliver(
    repository: &Path,
    branch: &str,
    base: &str,
    artifacts: &[Artifact],
) -> Result<DeliveredBranch, GitError> {
    let opened = open_source_repository(repository)?;
    let recorded = artifacts.last().and_then(|a| a.commit.clone());
    let mut rebuilt = None;
    for n in 1..=MAX_BRANCH_NAMES {
        let branch = if n == 1 { branch.to_owned() } else { format!("{branch}-{n}") };
        match branch_tip(&opened, &branch)? {
            Some(tip) if Some(&tip) == recorded.as_ref() => return Ok(DeliveredBranch { branch, commit: tip }),
            Some(_) => continue,
            None => {}
        }
        let commit = match &rebuilt {
            Some(commit) => String::clone(commit),
            None => rebuilt.insert(rebuild(&opened, base, artifacts)?).clone(),
        };
        if create_branch(repository, &opened, &branch, &commit)? {
            return Ok(DeliveredBranch { branch, commit });
        }
    }
    Err(GitError::BranchNamesTaken { path: repository.to_owned(), branch: branch.to_owned() })
}

/// Commit id that a branch points at; `None` if the branch does not exist.
fn branch_tip(repository: &Repository, branch: &str) -> Result<Option<String>, GitError> {
    match repository.refname_to_id(&format!("refs/heads/{branch}")) {
        Ok(id) => Ok(Some(id.to_string())),
        Err(error) if error.code() == ErrorCode::NotFound => Ok(None),
        Err(source) => Err(GitError::Git { operation: format!("read the branch {branch}"), source }),
    }
}

/// Creates the branch. Returns true if the branch points at `commit`, whether it was created now or before, and false
/// if it points at another commit.
fn create_branch(path: &Path, repository: &Repository, branch: &str, commit: &str) -> Result<bool, GitError> {
    match repository.reference(&format!("refs/heads/{branch}"), parse_oid(commit)?, false, "cfq: deliver") {
        Ok(_) => Ok(true),
        Err(source) => {
            if let Some(tip) = branch_tip(repository, branch)? {
                return Ok(tip == commit);
            }
            // Git stores a ref as a file, so the branches `a` and `a/b` cannot both exist.
            for (end, _) in branch.match_indices('/') {
                let existing = &branch[..end];
                if branch_tip(repository, existing)?.is_some() {
                    let (path, branch, existing) = (path.to_owned(), branch.to_owned(), existing.to_owned());
                    return Err(GitError::BranchConflict { path, branch, existing });
                }
            }
            Err(GitError::Git { operation: format!("create the branch {branch}"), source })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, artifact, file};
    use crate::workstream::{CommitPlan, Mirror};

    #[test]
    fn branch_name_has_the_task_number_and_a_slug() {
        let name = |text| branch_name(TaskNumber(42), text);
        assert_eq!(name("Add a parser!"), "cfq/t42-add-a-parser");
        assert_eq!(name("…"), "cfq/t42");
        assert_eq!(name("../../etc: HEAD"), "cfq/t42-etc-head");
        let long = name("Write a function that returns the sum of the two largest numbers of a list");
        assert_eq!(long, "cfq/t42-write-a-function-that-returns-the-sum");
        for text in ["a.lock", "@{x", "a..b", "-x"] {
            assert!(git2::Reference::is_valid_name(&format!("refs/heads/{}", name(text))), "{text}");
        }
    }

    #[test]
    fn deliver_creates_one_branch_and_changes_nothing_else() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        user.make_dirty();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let made = artifact(&mirror.repository().unwrap(), &user.base, &user.base, 1, vec![file("b.py", "y = 1\n")]);
        let before = user.capture_state();
        let delivered = deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap();
        assert_eq!(delivered, DeliveredBranch { branch: "cfq/t1-b".into(), commit: made.commit.clone().unwrap() });
        assert_eq!(deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap(), delivered);
        let mut after = user.capture_state();
        assert_eq!(after.remove("refs/heads/cfq/t1-b").unwrap(), delivered.commit.into_bytes());
        assert_eq!(after, before);
    }

    #[test]
    fn taken_branch_name_gets_a_numeric_suffix() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let one = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
        let two = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "2\n")]);
        let deliver =
            |a: &Artifact| deliver(&user.path(), "cfq/t1", &user.base, std::slice::from_ref(a)).unwrap().branch;
        assert_eq!(deliver(&one), "cfq/t1");
        assert_eq!(deliver(&two), "cfq/t1-2");
        assert_eq!(deliver(&two), "cfq/t1-2");
        assert_eq!(deliver(&one), "cfq/t1");
    }

    #[test]
    fn existing_delivery_is_found_without_a_write() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let mut made = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
        let first = deliver(&user.path(), "cfq/t1", &user.base, std::slice::from_ref(&made)).unwrap();
        // This artifact cannot be rebuilt, so a write would fail.
        made.parent = "0".repeat(40);
        assert_eq!(deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap(), first);
    }

    #[test]
    fn conflicting_branch_is_named_in_the_error() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        repository.reference("refs/heads/cfq", parse_oid(&user.base).unwrap(), false, "mine").unwrap();
        let made = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
        let error = deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap_err();
        assert!(!error.is_transient() && error.to_string().contains("git branch -m cfq "), "{error}");
    }

    #[test]
    fn missing_base_is_reported() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let plan = CommitPlan { base: &user.base, files: &[], parent: &user.base, message: "m", time: 1 };
        assert!(crate::workstream::commit::create_commit(&user.repo(), &plan).is_ok());
        let error = deliver(&user.path(), "cfq/t1", &"12".repeat(20), &[]).unwrap_err();
        assert!(!error.is_transient() && error.to_string().contains("has no commit"), "{error}");
    }
}
