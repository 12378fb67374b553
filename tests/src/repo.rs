//! A user's git repository for tests, and a fingerprint of everything that cfq must not change in it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use git2::{IndexAddOption, Repository, Signature};

/// A repository in a temporary folder.
pub struct UserRepo {
    pub dir: tempfile::TempDir,
}

impl UserRepo {
    /// Creates a repository with one commit and three uncommitted changes: a modified file, a staged one and an
    /// untracked one.
    pub fn with_uncommitted_changes() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let repo = Repository::init(dir.path()).unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("README.md", "# sample\n");
        write("math.py", "def sub(a, b):\n    return a - b\n");
        let mut index = repo.index().unwrap();
        index.add_all(["*"], IndexAddOption::DEFAULT, None).unwrap();
        index.write().unwrap();
        let tree = repo.find_tree(index.write_tree().unwrap()).unwrap();
        let author = Signature::now("A User", "user@example.org").unwrap();
        repo.commit(Some("HEAD"), &author, &author, "first", &tree, &[]).unwrap();
        write("README.md", "# sample, being edited\n");
        write("staged.txt", "staged\n");
        write("untracked.txt", "untracked\n");
        index.add_path(Path::new("staged.txt")).unwrap();
        index.write().unwrap();
        drop(tree);
        Self { dir }
    }

    /// Commits files at HEAD, as the user would.
    pub fn commit(&self, files: &[(&str, &str)]) {
        let files: Vec<_> = files.iter().map(|(path, text)| (*path, text.as_bytes(), false)).collect();
        self.commit_bytes(&files);
    }

    /// Commits files of any bytes, each with its path and whether it is executable.
    pub fn commit_bytes(&self, files: &[(&str, &[u8], bool)]) {
        let repo = self.open();
        let mut index = repo.index().unwrap();
        for (path, bytes, executable) in files {
            let file = self.dir.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, bytes).unwrap();
            let mode = if *executable { 0o755 } else { 0o644 };
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            index.add_path(Path::new(path)).unwrap();
        }
        index.write().unwrap();
        let tree = repo.find_tree(index.write_tree().unwrap()).unwrap();
        let parent = repo.head().unwrap().peel_to_commit().unwrap();
        let author = Signature::now("A User", "user@example.org").unwrap();
        repo.commit(Some("HEAD"), &author, &author, "more", &tree, &[&parent]).unwrap();
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap()
    }

    pub fn open(&self) -> Repository {
        Repository::open(self.dir.path()).unwrap()
    }

    /// Fingerprint of HEAD, index and working tree, to compare before and after a task.
    pub fn fingerprint(&self) -> Fingerprint {
        let repo = self.open();
        let head = std::fs::read_to_string(repo.path().join("HEAD")).unwrap();
        let commit = repo.head().unwrap().peel_to_commit().unwrap().id().to_string();
        let index = std::fs::read(repo.path().join("index")).unwrap();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                files.push((entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).unwrap()));
            }
        }
        files.sort();
        Fingerprint { head, commit, index, files }
    }

    /// Names of all branches, sorted.
    pub fn branches(&self) -> Vec<String> {
        let repo = self.open();
        let mut names: Vec<String> =
            repo.branches(None).unwrap().map(|b| b.unwrap().0.name().unwrap().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    /// Creates a branch at HEAD, as the user would.
    pub fn branch(&self, name: &str) {
        let repo = self.open();
        let commit = repo.head().unwrap().peel_to_commit().unwrap();
        repo.branch(name, &commit, false).unwrap();
    }

    /// A file's text on a branch; `None` if the branch or the file does not exist.
    pub fn show(&self, branch: &str, path: &str) -> Option<String> {
        String::from_utf8(self.file(branch, path)?.0).ok()
    }

    /// Bytes of a file on a branch, and whether it is executable.
    pub fn file(&self, branch: &str, path: &str) -> Option<(Vec<u8>, bool)> {
        let repo = self.open();
        let commit = repo.find_branch(branch, git2::BranchType::Local).ok()?.get().peel_to_commit().ok()?;
        let entry = commit.tree().ok()?.get_path(Path::new(path)).ok()?;
        let blob = repo.find_blob(entry.id()).ok()?;
        Some((blob.content().to_vec(), entry.filemode() == i32::from(git2::FileMode::BlobExecutable)))
    }

    /// Commits of a branch that are not on `base`, oldest first.
    pub fn history(&self, branch: &str, base: &str) -> Vec<String> {
        let repo = self.open();
        let tip = repo.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_commit().unwrap().id();
        let mut walk = repo.revwalk().unwrap();
        walk.set_sorting(git2::Sort::TOPOLOGICAL | git2::Sort::REVERSE).unwrap();
        walk.push(tip).unwrap();
        walk.hide(git2::Oid::from_str(base).unwrap()).unwrap();
        walk.map(|id| id.unwrap().to_string()).collect()
    }

    /// Path and text of every file that a branch adds or changes relative to `base`.
    pub fn changed(&self, branch: &str, base: &str) -> Vec<(String, String)> {
        let repo = self.open();
        let tip = repo.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_tree().unwrap();
        let base = repo.find_commit(git2::Oid::from_str(base).unwrap()).unwrap().tree().unwrap();
        let diff = repo.diff_tree_to_tree(Some(&base), Some(&tip), None).unwrap();
        let paths = diff.deltas().map(|d| d.new_file().path().unwrap().to_str().unwrap().to_owned());
        paths.filter_map(|path| self.show(branch, &path).map(|text| (path, text))).collect()
    }
}

/// State that cfq must not change: HEAD, its commit, the index bytes and the files at the top level with their content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    pub head: String,
    pub commit: String,
    pub index: Vec<u8>,
    pub files: Vec<(String, Vec<u8>)>,
}
