//! The one thing cfq writes into the user's repository: a new branch with the result.

use std::path::Path;

use cfq_proto::ids::TaskNumber;
use cfq_proto::looping::Artifact;
use git2::{ErrorCode, Repository};

use super::commit::rebuild;
use super::error::{GitError, oid};
use super::source::open_source;

/// Longest slug, in bytes: branch names are typed.
const SLUG: usize = 40;
/// Variants of a taken branch name that are tried.
const VARIANTS: u32 = 50;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    pub branch: String,
    pub commit: String,
}

/// `cfq/t42-add-a-parser`, from the first words of the description.
pub fn branch_name(number: TaskNumber, description: &str) -> String {
    let mut slug = String::new();
    for c in description.chars() {
        if c.is_ascii_alphanumeric() {
            slug.push(c.to_ascii_lowercase());
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
        if slug.len() >= SLUG {
            // Not in the middle of a word, if a word ends in the last third.
            if let Some(end) = slug.rfind('-').filter(|end| *end > SLUG * 2 / 3) {
                slug.truncate(end);
            }
            break;
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() { format!("cfq/{number}") } else { format!("cfq/{number}-{slug}") }
}

/// Puts the commits of `artifacts` (oldest first) on a new branch. HEAD, the index and the working tree are not touched.
/// May be called again: a branch of that name that already stands there is the delivery, and needs no leave to write;
/// another's gets a number.
pub fn deliver(repository: &Path, branch: &str, base: &str, artifacts: &[Artifact]) -> Result<Delivery, GitError> {
    let opened = open_source(repository)?;
    let recorded = artifacts.last().and_then(|a| a.commit.clone());
    let mut rebuilt = None;
    for n in 1..=VARIANTS {
        let branch = if n == 1 { branch.to_owned() } else { format!("{branch}-{n}") };
        match tip(&opened, &branch)? {
            Some(there) if Some(&there) == recorded.as_ref() => return Ok(Delivery { branch, commit: there }),
            Some(_) => continue,
            None => {}
        }
        let commit = match &rebuilt {
            Some(commit) => String::clone(commit),
            None => rebuilt.insert(rebuild(&opened, base, artifacts)?).clone(),
        };
        if claim(repository, &opened, &branch, &commit)? {
            return Ok(Delivery { branch, commit });
        }
    }
    Err(GitError::NamesTaken { path: repository.to_owned(), branch: branch.to_owned() })
}

/// Where a branch stands, if there is one.
fn tip(repository: &Repository, branch: &str) -> Result<Option<String>, GitError> {
    match repository.refname_to_id(&format!("refs/heads/{branch}")) {
        Ok(id) => Ok(Some(id.to_string())),
        Err(error) if error.code() == ErrorCode::NotFound => Ok(None),
        Err(source) => Err(GitError::Git { doing: format!("read {branch}"), source }),
    }
}

/// True if the branch stands at `commit`, now or already before; false if it is taken.
fn claim(path: &Path, repository: &Repository, branch: &str, commit: &str) -> Result<bool, GitError> {
    match repository.reference(&format!("refs/heads/{branch}"), oid(commit)?, false, "cfq: deliver") {
        Ok(_) => Ok(true),
        Err(source) => {
            if let Some(there) = tip(repository, branch)? {
                return Ok(there == commit);
            }
            // A branch cannot be where another needs a folder.
            for (end, _) in branch.match_indices('/') {
                let other = &branch[..end];
                if tip(repository, other)?.is_some() {
                    let (path, branch, other) = (path.to_owned(), branch.to_owned(), other.to_owned());
                    return Err(GitError::InTheWay { path, branch, other });
                }
            }
            Err(GitError::Git { doing: format!("make the branch {branch}"), source })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, artifact, file};
    use crate::workstream::{CommitPlan, Mirror};

    #[test]
    fn the_branch_is_named_after_the_task() {
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
    fn one_new_branch_and_nothing_else() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        user.make_dirty();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let made = artifact(&mirror.repository().unwrap(), &user.base, &user.base, 1, vec![file("b.py", "y = 1\n")]);
        let before = user.photograph();
        let delivery = deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap();
        assert_eq!(delivery, Delivery { branch: "cfq/t1-b".into(), commit: made.commit.clone().unwrap() });
        assert_eq!(deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap(), delivery);
        let mut after = user.photograph();
        assert_eq!(after.remove("refs/heads/cfq/t1-b").unwrap(), delivery.commit.into_bytes());
        assert_eq!(after, before);
    }

    #[test]
    fn a_taken_name_gets_a_number() {
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
    fn what_is_there_already_is_found_without_writing() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let mut made = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
        let first = deliver(&user.path(), "cfq/t1", &user.base, std::slice::from_ref(&made)).unwrap();
        // What would have to be written could not be.
        made.parent = "0".repeat(40);
        assert_eq!(deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap(), first);
    }

    #[test]
    fn a_branch_in_the_way_is_named() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        repository.reference("refs/heads/cfq", oid(&user.base).unwrap(), false, "mine").unwrap();
        let made = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
        let error = deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap_err();
        assert!(!error.may_pass() && error.to_string().contains("git branch -m cfq "), "{error}");
    }

    #[test]
    fn a_base_that_is_gone_is_said() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let plan = CommitPlan { base: &user.base, files: &[], parent: &user.base, message: "m", time: 1 };
        assert!(crate::workstream::commit::create(&user.repo(), &plan).is_ok());
        let error = deliver(&user.path(), "cfq/t1", &"12".repeat(20), &[]).unwrap_err();
        assert!(!error.may_pass() && error.to_string().contains("has no commit"), "{error}");
    }
}
