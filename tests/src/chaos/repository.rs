//! What the user's repository and cfq's mirror must contain after a chaos run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use git2::{Oid, Repository};

/// The bytes of every file of a repository, except git's objects and cfq's branches, to compare before and after a run.
#[derive(PartialEq, Eq)]
pub struct Files(BTreeMap<PathBuf, Vec<u8>>);

impl Files {
    pub fn of(repo: &Path) -> Self {
        let mut files = BTreeMap::new();
        collect(repo, Path::new(""), &mut files);
        Self(files)
    }

    /// Files that differ from those of `before`.
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let paths: BTreeSet<&PathBuf> = self.0.keys().chain(before.0.keys()).collect();
        let changed = paths.into_iter().filter(|path| self.0.get(*path) != before.0.get(*path));
        changed.map(|path| format!("{} in the user's repository changed", path.display())).collect()
    }
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.join(entry.file_name());
        let own = [".git/objects", ".git/refs/heads/cfq", ".git/logs/refs/heads/cfq"];
        if own.iter().any(|own| path == Path::new(own)) {
            collect_locks(root, &path, files);
        } else if entry.file_type().unwrap().is_dir() {
            collect(root, &path, files);
        } else if entry.file_type().unwrap().is_symlink() {
            let target = std::fs::read_link(root.join(&path)).unwrap();
            files.insert(path, target.into_os_string().into_encoded_bytes());
        } else {
            let content = std::fs::read(root.join(&path)).unwrap();
            files.insert(path, content);
        }
    }
}

/// Adds the lock files below a folder that cfq may write to: a lock file left behind blocks the user's own git.
fn collect_locks(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            collect_locks(root, &path, files);
        } else if path.extension().is_some_and(|extension| extension == "lock") {
            files.insert(path, Vec::new());
        }
    }
}

/// Every ref with its target.
pub fn refs(repo: &Repository) -> BTreeMap<String, String> {
    let all = repo.references().unwrap().flatten();
    let target = |r: &git2::Reference<'_>| match r.symbolic_target().unwrap() {
        Some(name) => name.to_owned(),
        None => r.target().unwrap().to_string(),
    };
    all.map(|r| (r.name().unwrap().to_owned(), target(&r))).collect()
}

/// Violations found by `git fsck`.
pub fn fsck(repo: &Path) -> Vec<String> {
    let output =
        Command::new("git").arg("-C").arg(repo).args(["fsck", "--full", "--no-progress", "--no-dangling"]).output();
    let output = output.unwrap();
    match output.status.success() {
        true => Vec::new(),
        false => vec![format!("git fsck {}: {}", repo.display(), String::from_utf8_lossy(&output.stderr))],
    }
}

/// How often each merged task's commit was merged into the mirror's `main`: by merge commits, and as a fast-forward.
pub struct Merges {
    /// Second parent of every merge commit on `main`, with the number of such merge commits.
    merged: BTreeMap<Oid, u64>,
    /// The commits of `main`'s first parents that are not merge commits: the base and the fast-forwarded task.
    first_parents: BTreeSet<Oid>,
}

impl Merges {
    /// Reads the mirror of the only repository in a runner's data folder.
    pub fn of(runner_data: &Path) -> Self {
        let mirrors: Vec<PathBuf> =
            std::fs::read_dir(runner_data.join("mirrors")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(mirrors.len(), 1, "one repository, one mirror: {mirrors:?}");
        let mirror = Repository::open_bare(&mirrors[0]).unwrap();
        let mut this = Self { merged: BTreeMap::new(), first_parents: BTreeSet::new() };
        let mut next = mirror.find_reference("refs/heads/main").unwrap().peel_to_commit().ok();
        while let Some(commit) = next {
            match commit.parent_id(1) {
                Ok(task) => *this.merged.entry(task).or_default() += 1,
                Err(_) => drop(this.first_parents.insert(commit.id())),
            }
            next = commit.parent(0).ok();
        }
        this
    }

    /// How often `commit` was merged.
    pub fn count(&self, commit: &str) -> u64 {
        let id = Oid::from_str(commit).unwrap();
        self.merged.get(&id).copied().unwrap_or(0) + u64::from(self.first_parents.contains(&id))
    }

    /// Commits that were merged but are not among `expected`.
    pub fn unexpected(&self, expected: &BTreeSet<String>) -> Vec<String> {
        self.merged.keys().map(Oid::to_string).filter(|id| !expected.contains(id)).collect()
    }
}
