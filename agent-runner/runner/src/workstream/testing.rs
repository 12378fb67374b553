//! Test fixture: a user's repository in a temporary folder, whose complete state can be compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cfq_proto::ids::{ArtifactId, JobId};
use cfq_proto::loop_step::{Artifact, ArtifactFile};
use git2::{Repository, Signature};

use super::commit::{CommitPlan, create_commit};
use super::content_hash;

/// A repository with one commit on branch `trunk`.
pub struct UserRepo {
    pub folder: tempfile::TempDir,
    /// Id of the first commit.
    pub base: String,
}

pub fn file(path: &str, content: &str) -> ArtifactFile {
    ArtifactFile::text(path, content)
}

/// An artifact whose commit objects are written to `repository`.
pub fn artifact(
    repository: &Repository,
    base: &str,
    parent: &str,
    iteration: u32,
    files: Vec<ArtifactFile>,
) -> Artifact {
    let message = format!("iteration {iteration}");
    let time = 1_700_000_000 + i64::from(iteration);
    let plan = CommitPlan { base, files: &files, parent, message: &message, time };
    Artifact {
        id: ArtifactId::fresh(),
        iteration,
        content_hash: content_hash(&files),
        commit: Some(create_commit(repository, &plan).unwrap()),
        parent: parent.into(),
        commit_time: time,
        commit_message: message,
        files,
        diff: String::new(),
        windows_1252_in_diff: Vec::new(),
        job: JobId::fresh(),
        model: "m".into(),
        prompt_tokens: 0,
        output_tokens: 0,
    }
}

/// Commits a tree without a parent; no ref is updated.
pub fn commit_tree(repository: &Repository, tree: git2::Oid) -> git2::Oid {
    let author = Signature::new("user", "user@example.org", &git2::Time::new(1_600_000_000, 0)).unwrap();
    repository.commit(None, &author, &author, "tree", &repository.find_tree(tree).unwrap(), &[]).unwrap()
}

/// Writes a tree with one file below `depth` nested folders.
pub fn nested_tree(repository: &Repository, depth: usize) -> git2::Oid {
    let blob = repository.blob(b"x = 1\n").unwrap();
    let mut builder = repository.treebuilder(None).unwrap();
    builder.insert("a.py", blob, git2::FileMode::Blob.into()).unwrap();
    let mut tree = builder.write().unwrap();
    for _ in 0..depth {
        let mut above = repository.treebuilder(None).unwrap();
        above.insert("d", tree, git2::FileMode::Tree.into()).unwrap();
        tree = above.write().unwrap();
    }
    tree
}

impl UserRepo {
    pub fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("user");
        let mut options = git2::RepositoryInitOptions::new();
        options.initial_head("trunk").external_template(false);
        let repository = Repository::init_opts(&path, &options).unwrap();
        let mut user = Self { folder, base: String::new() };
        user.base = user.commit_files(&repository, files);
        user
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("user")
    }

    pub fn repo(&self) -> Repository {
        Repository::open(self.path()).unwrap()
    }

    /// Commits files through the working tree and the index, as a user does.
    pub fn commit_files(&self, repository: &Repository, files: &[(&str, &str)]) -> String {
        let mut index = repository.index().unwrap();
        for (path, content) in files {
            let full = self.path().join(path);
            std::fs::create_dir_all(full.parent().unwrap()).unwrap();
            std::fs::write(&full, content).unwrap();
            index.add_path(Path::new(path)).unwrap();
        }
        index.write().unwrap();
        let tree = repository.find_tree(index.write_tree().unwrap()).unwrap();
        let author = Signature::new("user", "user@example.org", &git2::Time::new(1_600_000_000, 0)).unwrap();
        let parent = repository.head().ok().and_then(|h| h.peel_to_commit().ok());
        let parents: Vec<_> = parent.iter().collect();
        repository.commit(Some("HEAD"), &author, &author, "work", &tree, &parents).unwrap().to_string()
    }

    /// Leaves a staged change, an unstaged one and an untracked file.
    pub fn make_dirty(&self) {
        std::fs::write(self.path().join("staged.txt"), "staged\n").unwrap();
        let repository = self.repo();
        let mut index = repository.index().unwrap();
        index.add_path(Path::new("staged.txt")).unwrap();
        index.write().unwrap();
        std::fs::write(self.path().join("staged.txt"), "and changed again\n").unwrap();
        std::fs::write(self.path().join("untracked.txt"), "mine\n").unwrap();
    }

    /// Returns the content of HEAD, the index, the configuration, every ref and every file outside `.git`.
    pub fn capture_state(&self) -> BTreeMap<String, Vec<u8>> {
        let mut state = BTreeMap::new();
        let git = self.path().join(".git");
        for name in ["HEAD", "index", "config"] {
            state.insert(format!(".git/{name}"), std::fs::read(git.join(name)).unwrap());
        }
        state.insert("FETCH_HEAD".into(), std::fs::read(git.join("FETCH_HEAD")).unwrap_or_default());
        for reference in self.repo().references().unwrap() {
            let reference = reference.unwrap();
            let target = reference.target().map(|t| t.to_string()).unwrap_or_default();
            state.insert(reference.name().unwrap().to_owned(), target.into_bytes());
        }
        let mut folders = vec![self.path()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path == git {
                    continue;
                }
                if path.is_dir() {
                    folders.push(path);
                } else {
                    state.insert(path.display().to_string(), std::fs::read(&path).unwrap());
                }
            }
        }
        state
    }
}
