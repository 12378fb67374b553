//! The commits that a user wants reviewed.

use std::path::PathBuf;

use git2::{Commit, Oid, Repository, Sort};
use serde::{Deserialize, Serialize};

use super::error::GitError;
use super::start_point::StartPointRequest;

/// Maximum number of commits whose messages are read.
const MAX_MESSAGES: usize = 50;
/// Maximum length of the messages together, in bytes.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// Commits that a user names for a review.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReviewRangeRequest {
    /// A folder in the repository, canonical, and the context files. Its base is not read.
    pub start: StartPointRequest,
    /// `BASE..HEAD` or `BASE...HEAD`: what HEAD changed since it left BASE. One commit: what it changed. Branches and
    /// tags are allowed.
    pub range: String,
}

/// A change in a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReviewRange {
    /// Top folder of the repository.
    pub root: PathBuf,
    /// Id of the commit before the change.
    pub base: String,
    /// Id of the commit after the change.
    pub head: String,
    /// The messages of the commits of the change, oldest first.
    pub messages: String,
    /// The context files of the request, with those that its patterns match.
    pub context_files: Vec<String>,
}

impl ReviewRangeRequest {
    /// Finds the repository and both commits. Of a range, the change begins where HEAD left BASE, as in a pull request.
    ///
    /// # Errors
    /// As [`StartPointRequest::find`], [`GitError::BaseNotFound`] for a commit that does not exist, and
    /// [`GitError::NotReviewable`] for one that has no parent, or no ancestor in common with the other.
    pub fn find(&self) -> Result<ReviewRange, GitError> {
        let without_base = StartPointRequest { dir: self.start.dir.clone(), base: None, context_files: Vec::new() };
        let (repository, start) = without_base.open()?;
        let not_found = |name: &str, reason: &str| GitError::BaseNotFound {
            name: name.to_owned(),
            path: start.root.clone(),
            reason: reason.to_owned(),
        };
        let not_reviewable = |reason| {
            let (range, path) = (self.range.clone(), start.root.clone());
            GitError::NotReviewable { range, path, reason }
        };
        let commit = |name: &str| {
            let name = if name.is_empty() { "HEAD" } else { name };
            let commit = repository.revparse_single(name).and_then(|object| object.peel_to_commit());
            commit.map_err(|error| not_found(name, error.message()))
        };
        let (base, head) = match self.range.split_once("...").or_else(|| self.range.split_once("..")) {
            Some((base, head)) => {
                let (base, head) = (commit(base)?, commit(head)?);
                let common = repository.merge_base(base.id(), head.id());
                let common = common.map_err(|_| not_reviewable("the two commits have no common ancestor"))?;
                (common, head)
            }
            None => {
                let head = commit(&self.range)?;
                let parent =
                    head.parent_id(0).map_err(|_| {
                    not_reviewable(
                        "it is the first commit, so there is nothing to compare it with: name a later commit, or a range \
                         BASE..HEAD",
                    )
                })?;
                (parent, head)
            }
        };
        let messages = messages(&repository, base, &head);
        let (base, head) = (base.to_string(), head.id().to_string());
        // The context files are read in the base.
        let of_base = StartPointRequest { base: Some(base.clone()), ..self.start.clone() };
        let context_files = of_base.open()?.1.context_files;
        Ok(ReviewRange { root: start.root, base, head, messages, context_files })
    }
}

/// The messages of the commits after `base` up to `head`, oldest first. What cannot be read is left out: the messages
/// only explain the change.
fn messages(repository: &Repository, base: Oid, head: &Commit<'_>) -> String {
    let commits = || -> Result<Vec<String>, git2::Error> {
        let mut walk = repository.revwalk()?;
        walk.set_sorting(Sort::TOPOLOGICAL)?;
        walk.push(head.id())?;
        walk.hide(base)?;
        walk.take(MAX_MESSAGES)
            .map(|id| Ok(String::from_utf8_lossy(repository.find_commit(id?)?.message_bytes()).trim().to_owned()))
            .collect()
    };
    let mut messages = commits().unwrap_or_default();
    messages.reverse();
    messages.retain(|message| !message.is_empty());
    let mut text = messages.join("\n\n");
    text.truncate(text.floor_char_boundary(MAX_MESSAGE_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};

    fn find(user: &UserRepo, range: &str) -> Result<ReviewRange, GitError> {
        let start = StartPointRequest {
            dir: user.path().canonicalize().unwrap(),
            base: Some("no such branch".into()),
            context_files: vec![],
        };
        ReviewRangeRequest { start, range: range.to_owned() }.find()
    }

    /// A repository whose branch `topic` left `main` two commits before its end; `main` has one more commit.
    fn branched() -> (UserRepo, [String; 3]) {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let commit = |parent: &str, content: &str, message: &str| {
            let files = [file("a.py", content)];
            let plan = crate::workstream::CommitPlan { base: &user.base, files: &files, parent, message, time: 5 };
            crate::workstream::commit::create_commit(&repository, &plan).unwrap()
        };
        let first = commit(&user.base, "x = 2\n", "first\n\nwhy");
        let second = commit(&first, "x = 3\n", "second");
        let main = commit(&user.base, "x = 9\n", "other work");
        for (name, id) in [("topic", &second), ("side", &main)] {
            let commit = repository.find_commit(Oid::from_str(id).unwrap()).unwrap();
            repository.branch(name, &commit, true).unwrap();
        }
        (user, [first, second, main])
    }

    #[test]
    fn range_begins_where_the_branch_left_the_other_one() {
        let (user, [first, second, _]) = branched();
        for range in ["side..topic", "side...topic"] {
            let found = find(&user, range).unwrap();
            assert_eq!((&found.base, &found.head), (&user.base, &second), "{range}");
            assert_eq!(found.messages, "first\n\nwhy\n\nsecond");
        }
        let one = find(&user, "topic").unwrap();
        assert_eq!((&one.base, &one.head, one.messages.as_str()), (&first, &second, "second"));
        assert_eq!(find(&user, "..topic").unwrap().base, user.base, "HEAD is the default of both ends");
    }

    #[test]
    fn unknown_commits_and_commits_without_a_parent_are_named() {
        let (user, _) = branched();
        for (range, words) in
            [("nosuch", "\"nosuch\" names no commit"), ("side..nosuch", "nosuch"), (&user.base, "first commit")]
        {
            let error = find(&user, range).unwrap_err().to_string();
            assert!(error.contains(words), "{range}: {error}");
        }
    }
}
