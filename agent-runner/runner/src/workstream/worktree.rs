//! Working folders of tasks, in which users can look at the work: plain files of the task branch's head, without a
//! `.git` entry. The checkout of a large repository is sparse: it has only the files that the task added or changed,
//! because a complete checkout would cost each task as much as the repository is large. Each attempt has its own folder, so that a runner that lost its lease cannot write into its
//! successor's folder. No commit is created from these folders; a lost folder is written again.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use cfq_proto::ids::TaskNumber;
use git2::build::CheckoutBuilder;
use git2::{FileMode, ObjectType, Repository, Tree};

use super::checked_out::{self, CheckedOut};
use super::commit_size::check_size;
use super::error::{GitError, git_context, io_context, parse_oid};
use super::mirror::Mirror;
use super::size_limits::{SizeLimits, StopCondition};
use super::tree::Snapshot;
use super::tree_diff::changed_paths;
use super::without_submodules::tree_without_submodules;

/// Number of files and folders up to which a commit is checked out completely.
const MAX_COMPLETE_ENTRIES: usize = 500;

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

    /// Checks `commit` out into the attempt's folder, replacing the folder's content, and returns the folder's path. If
    /// the commit has more than [`MAX_COMPLETE_ENTRIES`] files and folders, only the files in which it differs from
    /// `base` are checked out.
    ///
    /// # Errors
    /// A [`GitError`] if a commit is missing or too large, or the folder cannot be written.
    pub fn checkout(
        &self,
        mirror: &Mirror,
        (task, attempt): (TaskNumber, i32),
        base: &str,
        commit: &str,
    ) -> Result<PathBuf, GitError> {
        let root = self.path(task, attempt);
        let repository = mirror.repository()?;
        let (base, head) = (Snapshot::of(&repository, base)?, Snapshot::of(&repository, commit)?);
        if has_at_most(&repository, head.tree(), MAX_COMPLETE_ENTRIES)? {
            check_out_all(&repository, &root, commit)?;
            return Ok(root);
        }
        remove_folder(&root)?;
        io_context(format!("create {}", root.display()), std::fs::create_dir_all(&root))?;
        for changed in changed_paths(&repository, base.tree(), head.tree())? {
            let Some((id, mode)) = changed.new else { continue };
            let executable = mode == i32::from(FileMode::BlobExecutable);
            let is_plain = executable || mode == i32::from(FileMode::Blob);
            // A path of the user's own commits may lead out of the folder; cfq commits no such path.
            let path = Path::new(OsStr::from_bytes(&changed.path));
            if !is_plain || !path.components().all(|part| matches!(part, Component::Normal(_))) {
                continue;
            }
            let path = root.join(path);
            let blob = git_context(format!("read {}", path.display()), repository.find_blob(id))?;
            io_context(format!("write {}", path.display()), write_file(&path, blob.content(), executable))?;
        }
        Ok(root)
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

/// Whether a tree has at most `maximum` files and folders. Reads not much more than that.
fn has_at_most(repository: &Repository, root: &Tree<'_>, maximum: usize) -> Result<bool, GitError> {
    let (mut open, mut entries) = (vec![root.clone()], 0);
    while let Some(tree) = open.pop() {
        entries += tree.len();
        if entries > maximum {
            return Ok(false);
        }
        for folder in tree.iter().filter(|entry| entry.kind() == Some(ObjectType::Tree)) {
            open.push(git_context("read a tree", repository.find_tree(folder.id()))?);
        }
    }
    Ok(true)
}

/// Makes the folder `path` a complete checkout of `commit`, whatever it contains. Files that are in it since the last
/// checkout, which returned `before`, are kept if they are unchanged. Without `before`, the folder is empty or missing,
/// and nothing is known of it afterwards. No program may run in the folder.
///
/// # Errors
/// A [`GitError`] if the commit is missing or too large, or the folder cannot be written.
pub fn check_out(
    mirror: &Mirror,
    path: &Path,
    commit: &str,
    before: Option<CheckedOut>,
) -> Result<CheckedOut, GitError> {
    let repository = mirror.repository()?;
    let Some(before) = before else {
        check_out_all(&repository, path, commit)?;
        return Ok(CheckedOut::default());
    };
    check_size(&repository, parse_oid(commit)?, &SizeLimits::default(), &StopCondition::default())?;
    checked_out::restore(&repository, path, commit, before)
}

fn check_out_all(repository: &Repository, path: &Path, commit: &str) -> Result<(), GitError> {
    check_size(repository, parse_oid(commit)?, &SizeLimits::default(), &StopCondition::default())?;
    io_context(format!("create {}", path.display()), std::fs::create_dir_all(path))?;
    let tree = tree_without_submodules(repository, commit)?;
    let mut options = CheckoutBuilder::new();
    options
        .force()
        .remove_untracked(true)
        .remove_ignored(true)
        .disable_filters(true)
        .update_index(false)
        .target_dir(path);
    let checked_out = repository.checkout_tree(tree.as_object(), Some(&mut options));
    git_context(format!("check out into {}", path.display()), checked_out)
}

fn write_file(path: &Path, content: &[u8], executable: bool) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mode = if executable { 0o777 } else { 0o666 };
    let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)
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
        let files =
            [file("a.py", "x = 2\n"), file("n/c.py", "z\n"), cfq_proto::loop_step::ArtifactFile::removed("b.py")];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 5 };
        let made = mirror.commit(&plan).unwrap();
        let worktrees = Worktrees::new(data.path());
        let task = TaskNumber(7);
        let checkout = |task, commit: &str| worktrees.checkout(&mirror, task, &user.base, commit).unwrap();
        let one = checkout((task, 1), &user.base);
        std::fs::write(one.join("stray"), "s").unwrap();
        assert_eq!(std::fs::read_to_string(one.join("a.py")).unwrap(), "x = 1\n");
        checkout((task, 1), &made);
        assert_eq!(std::fs::read_to_string(one.join("a.py")).unwrap(), "x = 2\n");
        assert_eq!(std::fs::read_to_string(one.join("n/c.py")).unwrap(), "z\n");
        assert!(!one.join("stray").exists() && !one.join("b.py").exists());
        let two = checkout((task, 2), &made);
        let other = checkout((TaskNumber(70), 1), &made);
        std::fs::create_dir(data.path().join("worktrees/mine")).unwrap();
        worktrees.remove_other_attempts(task, 2).unwrap();
        assert!(!one.exists() && two.exists() && other.exists());
        worktrees.remove_all().unwrap();
        assert!(!two.exists() && !other.exists() && data.path().join("worktrees/mine").exists());
    }

    /// libgit2 refuses to check out a submodule that `.gitmodules` describes from a bare repository.
    #[test]
    fn repository_with_a_submodule_is_checked_out_without_it() {
        let modules = "[submodule \"lib\"]\n\tpath = vendor/lib\n\turl = ../lib\n";
        let user = UserRepo::new(&[(".gitmodules", modules), ("a.py", "x = 1\n"), ("vendor/b.py", "y\n")]);
        let repository = user.repo();
        let base = repository.find_commit(parse_oid(&user.base).unwrap()).unwrap();
        let mut builder = git2::build::TreeUpdateBuilder::new();
        builder.upsert("vendor/lib", base.id(), FileMode::Commit);
        let tree = builder.create_updated(&repository, &base.tree().unwrap()).unwrap();
        let author = git2::Signature::now("a", "a@b").unwrap();
        let tree = repository.find_tree(tree).unwrap();
        let head = repository.commit(Some("HEAD"), &author, &author, "add lib", &tree, &[&base]).unwrap().to_string();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&head).unwrap();
        let worktree = Worktrees::new(data.path()).checkout(&mirror, (TaskNumber(1), 1), &head, &head).unwrap();
        let checked = data.path().join("checked");
        for before in [None, Some(CheckedOut::default())] {
            check_out(&mirror, &checked, &head, before).unwrap();
        }
        for folder in [worktree, checked] {
            assert_eq!(std::fs::read_to_string(folder.join("vendor/b.py")).unwrap(), "y\n");
            assert!(folder.join(".gitmodules").exists() && !folder.join("vendor/lib").exists());
        }
    }

    #[test]
    fn large_repository_is_checked_out_sparsely() {
        let names: Vec<String> = (0..MAX_COMPLETE_ENTRIES).map(|n| format!("d/f{n}.py")).collect();
        let all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x = 1\n")).collect();
        let user = UserRepo::new(&all);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let worktrees = Worktrees::new(data.path());
        let mut parent = user.base.clone();
        let removed = cfq_proto::loop_step::ArtifactFile::removed("d/f1.py");
        for (files, shown) in [
            (vec![file("d/f0.py", "x = 2\n"), file("stray.py", "s\n")], ["d", "stray.py"]),
            (vec![file("d/f0.py", "x = 3\n"), file("n/e/new.py", "n\n"), removed], ["d", "n"]),
        ] {
            let plan = CommitPlan { base: &user.base, files: &files, parent: &parent, message: "m", time: 5 };
            parent = mirror.commit(&plan).unwrap();
            let root = worktrees.checkout(&mirror, (TaskNumber(7), 1), &user.base, &parent).unwrap();
            let mut found: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            found.sort();
            assert_eq!(found, shown);
            for file in files.iter().filter(|file| file.content.is_some()) {
                assert_eq!(std::fs::read_to_string(root.join(&file.path)).ok(), file.content);
            }
            assert!(!root.join("d/f1.py").exists() && !root.join("d/f2.py").exists());
        }
    }
}
