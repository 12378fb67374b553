//! Trees without a working folder: what the base holds, and the base with an artifact's files laid over it.

use cfq_proto::looping::ArtifactFile;
use git2::{FileMode, ObjectType, Oid, Repository, Tree, build::TreeUpdateBuilder};
use sha2::{Digest, Sha256};

use super::error::{GitError, git, oid};

/// Every Git LFS pointer begins with this line.
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Why a file cannot be written where the reply wants it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {why}")]
pub struct FileProblem {
    pub path: String,
    pub why: &'static str,
}

/// SHA-256 over the files in path order: equal content has equal hashes, whatever the commit.
pub fn content_hash(files: &[ArtifactFile]) -> String {
    let mut files: Vec<&ArtifactFile> = files.iter().collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut hash = Sha256::new();
    for file in files {
        let content = file.content.as_deref();
        hash.update((file.path.len() as u64).to_le_bytes());
        hash.update(file.path.as_bytes());
        hash.update([u8::from(content.is_some())]);
        hash.update((content.map_or(0, str::len) as u64).to_le_bytes());
        hash.update(content.unwrap_or_default().as_bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// The tree of one commit, to read from and to build on.
pub struct Snapshot<'r> {
    repository: &'r Repository,
    tree: Tree<'r>,
}

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("tree", &self.tree.id()).finish()
    }
}

impl<'r> Snapshot<'r> {
    pub(crate) fn of(repository: &'r Repository, commit: &str) -> Result<Self, GitError> {
        let commit = git(format!("find commit {commit}"), repository.find_commit(oid(commit)?))?;
        Ok(Self { repository, tree: git("read its tree", commit.tree())? })
    }

    pub(crate) fn tree(&self) -> &Tree<'r> {
        &self.tree
    }

    /// A file's bytes; `None` for what is not there or not a plain file.
    pub fn read(&self, path: &str) -> Option<Vec<u8>> {
        let entry = self.tree.get_path(path.as_ref()).ok()?;
        if entry.kind() != Some(ObjectType::Blob) || entry.filemode() == i32::from(FileMode::Link) {
            return None;
        }
        Some(self.repository.find_blob(entry.id()).ok()?.content().to_vec())
    }

    /// A file as text; `None` also for what is not UTF-8.
    pub fn read_text(&self, path: &str) -> Option<String> {
        String::from_utf8(self.read(path)?).ok()
    }

    /// Whether a file may be written or removed at `path`, a [`super::repo_path`].
    pub fn may_write(&self, path: &str) -> Result<(), FileProblem> {
        let refuse = |why| Err(FileProblem { path: path.to_owned(), why });
        let parts: Vec<&str> = path.split('/').collect();
        for end in 1..parts.len() {
            match self.tree.get_path(parts[..end].join("/").as_ref()) {
                Ok(entry) if entry.kind() == Some(ObjectType::Tree) => {}
                Ok(entry) if entry.kind() == Some(ObjectType::Commit) => return refuse("lies in a submodule"),
                Ok(entry) if entry.filemode() == i32::from(FileMode::Link) => {
                    return refuse("goes through a symbolic link");
                }
                Ok(_) => return refuse("treats a file as a folder"),
                Err(_) => return Ok(()),
            }
        }
        match self.tree.get_path(path.as_ref()) {
            Ok(entry) if entry.kind() == Some(ObjectType::Tree) => refuse("is a folder"),
            Ok(entry) if entry.kind() == Some(ObjectType::Commit) => refuse("is a submodule"),
            Ok(entry) if entry.filemode() == i32::from(FileMode::Link) => refuse("is a symbolic link"),
            Ok(_) if self.read(path).is_some_and(|b| b.starts_with(LFS)) => refuse("is kept in Git LFS"),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// The tree with `files` laid over it. A replaced file keeps its mode, a new one is a plain file.
    pub(crate) fn with(&self, files: &[ArtifactFile]) -> Result<Oid, GitError> {
        let mut update = TreeUpdateBuilder::new();
        for file in files {
            let existing = self.tree.get_path(file.path.as_ref()).ok();
            match &file.content {
                Some(content) => {
                    let blob = git(format!("store {}", file.path), self.repository.blob(content.as_bytes()))?;
                    let executable = existing.is_some_and(|e| e.filemode() == i32::from(FileMode::BlobExecutable));
                    let mode = if executable { FileMode::BlobExecutable } else { FileMode::Blob };
                    update.upsert(file.path.as_str(), blob, mode);
                }
                None if existing.is_some() => {
                    update.remove(file.path.as_str());
                }
                None => {}
            }
        }
        git("build a tree", update.create_updated(self.repository, &self.tree))
    }

    /// The files that really differ from this tree, in path order.
    pub fn changes(&self, files: Vec<ArtifactFile>) -> Vec<ArtifactFile> {
        let mut changed: Vec<_> = files
            .into_iter()
            .filter(|f| self.read(&f.path).as_deref() != f.content.as_deref().map(str::as_bytes))
            .collect();
        changed.sort_by(|a, b| a.path.cmp(&b.path));
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn the_hash_is_of_content_not_of_order() {
        let (a, b) = (file("a", "1"), file("b", "2"));
        assert_eq!(content_hash(&[a.clone(), b.clone()]), content_hash(&[b.clone(), a.clone()]));
        assert_ne!(content_hash(std::slice::from_ref(&a)), content_hash(&[a.clone(), b]));
        assert_ne!(content_hash(&[file("a", "")]), content_hash(&[ArtifactFile { path: "a".into(), content: None }]));
    }

    #[test]
    fn links_submodules_and_lfs_pointers_are_left_alone() {
        let user =
            UserRepo::new(&[("big.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), ("dir/a", "x")]);
        let repository = user.repo();
        let base = repository.find_commit(git2::Oid::from_str(&user.base).unwrap()).unwrap();
        let link = repository.blob(b"/etc").unwrap();
        let mut update = TreeUpdateBuilder::new();
        update.upsert("link", link, FileMode::Link).upsert("sub", base.id(), FileMode::Commit);
        let tree = update.create_updated(&repository, &base.tree().unwrap()).unwrap();
        let tree = repository.find_tree(tree).unwrap();
        let me = git2::Signature::now("t", "t@t").unwrap();
        let commit = repository.commit(None, &me, &me, "m", &tree, &[&base]).unwrap().to_string();
        let snapshot = Snapshot::of(&repository, &commit).unwrap();
        for (path, why) in [
            ("link", "symbolic link"),
            ("link/passwd", "through a symbolic link"),
            ("sub", "submodule"),
            ("sub/x", "in a submodule"),
            ("big.bin", "LFS"),
            ("dir", "a folder"),
            ("dir/a/b", "as a folder"),
        ] {
            let problem = snapshot.may_write(path).unwrap_err();
            assert!(problem.to_string().contains(why), "{path}: {problem}");
        }
        for path in ["new", "dir/new", "dir/a", "deep/er/new"] {
            snapshot.may_write(path).unwrap();
        }
        assert_eq!(snapshot.read("link"), None);
        // What is not edited is as it was.
        let new = repository.find_tree(snapshot.with(&[file("dir/a", "y")]).unwrap()).unwrap();
        assert_eq!(new.get_name("sub").unwrap().id(), base.id());
        assert_eq!(new.get_name("link").unwrap().id(), link);
    }
}
