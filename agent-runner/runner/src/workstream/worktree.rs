//! Working folders of the tasks: plain files of the workstream's head, one folder per attempt, so that a runner that
//! comes late cannot write into its successor's. Nothing is committed from here; a lost folder is checked out again.

use std::path::{Path, PathBuf};

use cfq_proto::ids::TaskNumber;
use git2::build::CheckoutBuilder;

use super::error::{GitError, git, io, oid};
use super::mirror::Mirror;

#[derive(Debug, Clone)]
pub struct Worktrees {
    root: PathBuf,
}

impl Worktrees {
    pub fn new(data_dir: &Path) -> Self {
        Self { root: data_dir.join("worktrees") }
    }

    pub fn path(&self, task: TaskNumber, attempt: i32) -> PathBuf {
        self.root.join(format!("{task}-a{attempt}"))
    }

    /// Makes the folder show `commit`, whatever was in it.
    pub fn checkout(&self, mirror: &Mirror, task: TaskNumber, attempt: i32, commit: &str) -> Result<PathBuf, GitError> {
        let path = self.path(task, attempt);
        io(format!("make {}", path.display()), std::fs::create_dir_all(&path))?;
        let repository = mirror.repository()?;
        let commit = git(format!("find commit {commit}"), repository.find_object(oid(commit)?, None))?;
        let mut options = CheckoutBuilder::new();
        options
            .force()
            .remove_untracked(true)
            .remove_ignored(true)
            .disable_filters(true)
            .update_index(false)
            .target_dir(&path);
        git(format!("check out into {}", path.display()), repository.checkout_tree(&commit, Some(&mut options)))?;
        Ok(path)
    }

    /// Removes the folder of one attempt, if it is there.
    pub fn remove(&self, task: TaskNumber, attempt: i32) -> Result<(), GitError> {
        remove(&self.path(task, attempt))
    }

    /// Removes what other attempts at the task left behind.
    pub fn remove_others(&self, task: TaskNumber, attempt: i32) -> Result<(), GitError> {
        let keep = self.path(task, attempt);
        self.remove_where(|name| attempt_of(name).is_some_and(|(number, _)| number == task.0), &keep)
    }

    /// Removes everything: at start no lease is held, so no folder has an owner.
    pub fn remove_all(&self) -> Result<(), GitError> {
        self.remove_where(|name| attempt_of(name).is_some(), Path::new(""))
    }

    fn remove_where(&self, fits: impl Fn(&str) -> bool, keep: &Path) -> Result<(), GitError> {
        let entries = match std::fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(GitError::Io { doing: format!("read {}", self.root.display()), source }),
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if path != keep && entry.file_name().to_str().is_some_and(&fits) {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

fn remove(path: &Path) -> Result<(), GitError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(GitError::Io { doing: format!("remove {}", path.display()), source: error })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Task and attempt of a folder's name; `None` for what is not ours.
fn attempt_of(name: &str) -> Option<(i64, i32)> {
    let (number, attempt) = name.strip_prefix('t')?.split_once("-a")?;
    Some((number.parse().ok()?, attempt.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::CommitPlan;
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn a_folder_shows_its_commit_and_attempts_do_not_share() {
        // `eol=crlf` would change the bytes if filters were on.
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "y\n"), (".gitattributes", "*.py text eol=crlf\n")]);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let files = [
            file("a.py", "x = 2\n"),
            file("n/c.py", "z\n"),
            cfq_proto::looping::ArtifactFile { path: "b.py".into(), content: None },
        ];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 5 };
        let made = mirror.commit(&plan).unwrap();
        let worktrees = Worktrees::new(data.path());
        let task = TaskNumber(7);
        let one = worktrees.checkout(&mirror, task, 1, &user.base).unwrap();
        std::fs::write(one.join("stray"), "s").unwrap();
        assert_eq!(std::fs::read_to_string(one.join("a.py")).unwrap(), "x = 1\n");
        worktrees.checkout(&mirror, task, 1, &made).unwrap();
        assert_eq!(std::fs::read_to_string(one.join("a.py")).unwrap(), "x = 2\n");
        assert_eq!(std::fs::read_to_string(one.join("n/c.py")).unwrap(), "z\n");
        assert!(!one.join("stray").exists() && !one.join("b.py").exists());
        let two = worktrees.checkout(&mirror, task, 2, &made).unwrap();
        let other = worktrees.checkout(&mirror, TaskNumber(70), 1, &made).unwrap();
        std::fs::create_dir(data.path().join("worktrees/mine")).unwrap();
        worktrees.remove_others(task, 2).unwrap();
        assert!(!one.exists() && two.exists() && other.exists());
        worktrees.remove_all().unwrap();
        assert!(!two.exists() && !other.exists() && data.path().join("worktrees/mine").exists());
    }
}
