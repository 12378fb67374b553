//! Working folders of tasks: plain files of the task branch's head, without a `.git` entry. Each attempt has its own
//! folder, so that a runner that lost its lease cannot write into its successor's folder. No commit is created from
//! these folders; a lost folder is checked out again.

use std::path::{Path, PathBuf};

use cfq_proto::ids::TaskNumber;
use git2::build::CheckoutBuilder;

use super::error::{GitError, git_context, io_context, parse_oid};
use super::mirror::Mirror;
use super::size_limits::{SizeLimits, StopCondition, check_size};

/// The worktree folders of one runner, `worktrees/t<task>-a<attempt>` in its data folder.
#[derive(Debug, Clone)]
pub struct Worktrees {
    root: PathBuf,
}

impl Worktrees {
    /// Worktrees below `data_dir`. Creates no folder.
    pub fn new(data_dir: &Path) -> Self {
        Self { root: data_dir.join("worktrees") }
    }

    /// Folder of one attempt.
    pub fn path(&self, task: TaskNumber, attempt: i32) -> PathBuf {
        self.root.join(format!("{task}-a{attempt}"))
    }

    /// Checks `commit` out into the attempt's folder, replacing the folder's content, and returns the folder's path.
    ///
    /// # Errors
    /// A [`GitError`] if the commit is missing or too large, or the folder cannot be written.
    pub fn checkout(&self, mirror: &Mirror, task: TaskNumber, attempt: i32, commit: &str) -> Result<PathBuf, GitError> {
        let path = self.path(task, attempt);
        let repository = mirror.repository()?;
        check_size(&repository, parse_oid(commit)?, &SizeLimits::default(), &StopCondition::default())?;
        io_context(format!("create {}", path.display()), std::fs::create_dir_all(&path))?;
        let commit = git_context(format!("find commit {commit}"), repository.find_object(parse_oid(commit)?, None))?;
        let mut options = CheckoutBuilder::new();
        options
            .force()
            .remove_untracked(true)
            .remove_ignored(true)
            .disable_filters(true)
            .update_index(false)
            .target_dir(&path);
        let checked_out = repository.checkout_tree(&commit, Some(&mut options));
        git_context(format!("check out into {}", path.display()), checked_out)?;
        Ok(path)
    }

    /// Removes the folder of one attempt, if it exists.
    ///
    /// # Errors
    /// A [`GitError`] if the folder cannot be removed.
    pub fn remove(&self, task: TaskNumber, attempt: i32) -> Result<(), GitError> {
        remove_folder(&self.path(task, attempt))
    }

    /// Removes the folders of other attempts at the task.
    ///
    /// # Errors
    /// A [`GitError`] if a folder cannot be removed.
    pub fn remove_other_attempts(&self, task: TaskNumber, attempt: i32) -> Result<(), GitError> {
        let keep = self.path(task, attempt);
        self.remove_where(|name| parse_folder_name(name).is_some_and(|(number, _)| number == task.0), &keep)
    }

    /// Removes the folders of all attempts. Called when the runner starts, while no lease is held and no folder is in
    /// use.
    ///
    /// # Errors
    /// A [`GitError`] if a folder cannot be removed.
    pub fn remove_all(&self) -> Result<(), GitError> {
        self.remove_where(|name| parse_folder_name(name).is_some(), Path::new(""))
    }

    fn remove_where(&self, matches: impl Fn(&str) -> bool, keep: &Path) -> Result<(), GitError> {
        let entries = match std::fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(GitError::Io { operation: format!("read {}", self.root.display()), source }),
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if path != keep && entry.file_name().to_str().is_some_and(&matches) {
                remove_folder(&path)?;
            }
        }
        Ok(())
    }
}

fn remove_folder(path: &Path) -> Result<(), GitError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(GitError::Io { operation: format!("remove {}", path.display()), source: error })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Task and attempt of a folder name; `None` if it is not the name of a worktree.
fn parse_folder_name(name: &str) -> Option<(i64, i32)> {
    let (number, attempt) = name.strip_prefix('t')?.split_once("-a")?;
    Some((number.parse().ok()?, attempt.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::CommitPlan;
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn checkout_shows_the_commit_and_attempts_have_own_folders() {
        // If git's filters were applied, `eol=crlf` would change the bytes.
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "y\n"), (".gitattributes", "*.py text eol=crlf\n")]);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let files = [
            file("a.py", "x = 2\n"),
            file("n/c.py", "z\n"),
            cfq_proto::loop_step::ArtifactFile { path: "b.py".into(), content: None },
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
        worktrees.remove_other_attempts(task, 2).unwrap();
        assert!(!one.exists() && two.exists() && other.exists());
        worktrees.remove_all().unwrap();
        assert!(!two.exists() && !other.exists() && data.path().join("worktrees/mine").exists());
    }
}
