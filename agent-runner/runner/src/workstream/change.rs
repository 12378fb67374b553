//! The change between two commits, as files and as a diff, for a review of work that cfq did not make.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cfq_proto::loop_step::ArtifactFile;
use git2::{FileMode, ObjectType, Repository};

use super::commit_size::check_size;
use super::diff::{UnifiedDiff, unified};
use super::error::{GitError, git_context, parse_oid};
use super::size_limits::{SizeLimits, StopCondition};
use super::tree::Snapshot;
use super::tree_diff::changed_paths;
use super::tree_files::read_text;

/// Maximum number of files of a change that is reviewed.
const MAX_FILES: usize = 500;
/// Maximum size of all changed files of a change that is reviewed, before and after it, in bytes.
const MAX_BYTES: usize = 16 << 20;
/// Maximum size of a file whose content is shown to the critic, in bytes. The diff shows the changes of larger ones.
const MAX_SHOWN_FILE_BYTES: usize = 256 << 10;

/// Maximum size of the message of the commit that is kept, in bytes.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// A change to review.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The changed text files, with the content after the change, in path order.
    pub files: Vec<ArtifactFile>,
    /// Unified diff.
    pub diff: UnifiedDiff,
    /// Message of the last commit.
    pub message: String,
    /// Time of the last commit, in seconds since 1970.
    pub time: i64,
}

impl Change {
    /// Reads the change from the tree of `base` to that of `head`, in a repository that has both. Binary files, files over
    /// 256 KiB, symbolic links and submodules are only in the diff.
    ///
    /// # Errors
    /// [`GitError::NoChange`] if the trees are equal, [`GitError::ChangeTooLarge`] above 500 files or 16 MiB,
    /// [`GitError::TooLarge`], [`GitError::InvalidCommitId`], and [`GitError::Git`] if an object is missing.
    pub fn read(repository: &Repository, base: &str, head: &str) -> Result<Self, GitError> {
        for commit in [base, head] {
            check_size(repository, parse_oid(commit)?, &SizeLimits::default(), &StopCondition::default())?;
        }
        let (old, new) = (Snapshot::of(repository, base)?, Snapshot::of(repository, head)?);
        let mut changed = changed_paths(repository, old.tree(), new.tree())?;
        if changed.is_empty() {
            return Err(GitError::NoChange { base: base.to_owned(), head: head.to_owned() });
        }
        if changed.len() > MAX_FILES {
            return Err(GitError::ChangeTooLarge {
                excess: format!("{} files, more than the limit of {MAX_FILES}", changed.len()),
            });
        }
        changed.sort_by(|a, b| a.path.cmp(&b.path));
        let odb = git_context("open the object database", repository.odb())?;
        let mut bytes = 0_usize;
        let mut files = Vec::new();
        for changed in changed {
            let before = old.tree().get_path(Path::new(OsStr::from_bytes(&changed.path)));
            let before = before.ok().map(|entry| entry.id());
            for id in before.into_iter().chain(changed.new.map(|(id, _)| id)) {
                // A submodule's commit is not in the repository.
                let (size, kind) = odb.read_header(id).unwrap_or((0, ObjectType::Blob));
                bytes = bytes.saturating_add(if kind == ObjectType::Blob { size } else { 0 });
            }
            if bytes > MAX_BYTES {
                let excess = format!("files of more than {} MiB in total", MAX_BYTES >> 20);
                return Err(GitError::ChangeTooLarge { excess });
            }
            // Other names could be read as a part of the prompt.
            let path = String::from_utf8(changed.path).ok();
            let Some(path) = path.filter(|path| !path.contains(|c: char| c.is_control() || c == '`')) else { continue };
            match changed.new {
                None => files.push(ArtifactFile::removed(path)),
                Some((id, mode))
                    if mode == i32::from(FileMode::Blob) || mode == i32::from(FileMode::BlobExecutable) =>
                {
                    let text = git_context(format!("read {path}"), read_text(repository, id, MAX_SHOWN_FILE_BYTES))?;
                    files.extend(text.map(|text| ArtifactFile::text(path, text)));
                }
                Some(_) => {}
            }
        }
        let commit = git_context(format!("find commit {head}"), repository.find_commit(parse_oid(head)?))?;
        let mut message = String::from_utf8_lossy(commit.message_bytes()).into_owned();
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        Ok(Self { files, diff: unified(repository, base, head)?, message, time: commit.time().seconds() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::commit::{CommitPlan, create_commit};
    use crate::workstream::testing::{UserRepo, file};

    fn commit(user: &UserRepo, files: &[ArtifactFile]) -> String {
        let plan = CommitPlan { base: &user.base, files, parent: &user.base, message: "change it", time: 7 };
        create_commit(&user.repo(), &plan).unwrap()
    }

    #[test]
    fn changed_files_and_diff_are_read() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "y\n"), ("c.py", "z\n")]);
        let head = commit(&user, &[file("d/n.py", "n\n"), file("a.py", "x = 2\n"), ArtifactFile::removed("b.py")]);
        let change = Change::read(&user.repo(), &user.base, &head).unwrap();
        let files: Vec<(&str, Option<&str>)> =
            change.files.iter().map(|file| (file.path.as_str(), file.content.as_deref())).collect();
        assert_eq!(files, [("a.py", Some("x = 2\n")), ("b.py", None), ("d/n.py", Some("n\n"))]);
        assert!(change.diff.text.contains("-x = 1\n+x = 2\n"), "{}", change.diff.text);
        assert_eq!((change.message.as_str(), change.time), ("change it", 7));
    }

    #[test]
    fn empty_and_very_large_changes_are_refused() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let same = Change::read(&user.repo(), &user.base, &user.base);
        assert!(matches!(same, Err(GitError::NoChange { .. })), "{same:?}");
        let many: Vec<ArtifactFile> = (0..=MAX_FILES).map(|n| file(&format!("f{n}.py"), "x\n")).collect();
        let many = Change::read(&user.repo(), &user.base, &commit(&user, &many)).unwrap_err();
        assert!(many.to_string().contains("501 files") && many.is_invalid_request(), "{many}");
        let large = commit(&user, &[file("large.txt", &"x".repeat(MAX_BYTES + 1))]);
        let large = Change::read(&user.repo(), &user.base, &large).unwrap_err();
        assert!(large.to_string().contains("files of more than 16 MiB"), "{large}");
    }

    #[test]
    fn only_text_of_a_readable_size_is_shown() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let long = "line\n".repeat(MAX_SHOWN_FILE_BYTES / 5 + 1);
        let odd = "new\nline.py";
        let files = [file("binary", "a\0b"), file("long.txt", &long), file("a.py", "x = 2\n"), file(odd, "y\n")];
        let head = commit(&user, &files);
        let change = Change::read(&user.repo(), &user.base, &head).unwrap();
        let paths: Vec<&str> = change.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["a.py"]);
        assert!(
            change.diff.text.contains("long.txt") && change.diff.text.contains("binary"),
            "{:.300}",
            change.diff.text
        );
    }
}
