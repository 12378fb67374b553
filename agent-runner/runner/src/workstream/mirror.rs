//! A bare mirror of the user's repository in cfq's data folder, shared by all tasks of that repository.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use git2::{Repository, RepositoryInitOptions};
use sha2::{Digest, Sha256};

use super::commit::{CommitPlan, create_commit};
use super::commit_size::check_size;
use super::copy_objects::ObjectCopy;
use super::durable::{enable_fsync, sync_all, sync_ref};
use super::error::{GitError, git_context, io_context, parse_oid};
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};
use super::source::open_source_within;

/// Prefix of the refs that keep fetched bases from being garbage-collected.
const BASE_REFS: &str = "refs/cfq/bases";
/// Maximum wait for a lock that is held for the time of a few file operations.
pub(super) const MAX_SHORT_WAIT: Duration = Duration::from_secs(60);

/// A bare repository that holds the fetched bases and the commits of all tasks.
#[derive(Debug, Clone)]
pub struct Mirror {
    path: PathBuf,
    /// The user's repository.
    source: PathBuf,
    /// Path of the user's repository without symbolic links.
    canonical: PathBuf,
}

/// For each mirror that this process uses: held by the task that merges into it.
static MERGE_TURNS: Mutex<BTreeMap<PathBuf, Arc<tokio::sync::Mutex<()>>>> = Mutex::new(BTreeMap::new());
/// For each mirror that this process uses: held by the task that makes a map of it.
static MAP_TURNS: Mutex<BTreeMap<PathBuf, Arc<tokio::sync::Mutex<()>>>> = Mutex::new(BTreeMap::new());

impl Mirror {
    /// Opens the mirror of `source` in `data_dir`, or creates it. The mirror's folder name is a hash of the canonical
    /// path of `source`, so two spellings of one path share a mirror.
    ///
    /// # Errors
    /// A [`GitError`] if the mirror cannot be created.
    pub fn open(data_dir: &Path, source: &Path) -> Result<Self, GitError> {
        enable_fsync();
        let canonical = std::fs::canonicalize(source).unwrap_or_else(|_| source.to_owned());
        let digest = Sha256::digest(canonical.as_os_str().as_encoded_bytes());
        let hash: String = digest.iter().take(12).map(|b| format!("{b:02x}")).collect();
        let path = data_dir.join("mirrors").join(format!("{hash}.git"));
        let mirror = Self { path, source: source.to_owned(), canonical };
        if Repository::open_bare(&mirror.path).is_err() {
            mirror.create()?;
        }
        Ok(mirror)
    }

    fn create(&self) -> Result<(), GitError> {
        let operation = || format!("create the mirror {}", self.path.display());
        io_context(operation(), std::fs::create_dir_all(&self.path))?;
        let _lock = self.lock("cfq-create.lock")?;
        let mut options = RepositoryInitOptions::new();
        // No template folder: the user's template may contain hooks and settings, which the mirror must not have.
        options.bare(true).mkpath(true).external_template(false).initial_head("main");
        let repository = git_context(operation(), Repository::init_opts(&self.path, &options))?;
        let mut config = git_context(operation(), repository.config())?;
        for (key, value) in [("core.autocrlf", "false"), ("core.hooksPath", "/dev/null"), ("gc.auto", "0")] {
            git_context(operation(), config.set_str(key, value))?;
        }
        Ok(())
    }

    /// Path of the user's repository.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Checks that the path of the user's repository contains no symbolic link and no `..`.
    ///
    /// # Errors
    /// [`GitError::PathIsALink`] if it does.
    pub fn check_path(&self) -> Result<(), GitError> {
        if self.canonical == self.source {
            return Ok(());
        }
        Err(GitError::PathIsALink { path: self.source.clone(), target: self.canonical.clone() })
    }

    /// Name of the user's repository in the records of its main branch: its path, without symbolic links.
    pub fn repository_id(&self) -> String {
        match self.canonical.to_str() {
            Some(path) => path.to_owned(),
            None => format!("{:?}", self.canonical),
        }
    }

    /// Lock of the mirror for one task of this process that merges.
    pub(crate) fn merge_turn(&self) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = MERGE_TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(self.path.clone()).or_default().clone()
    }

    /// Lock of the mirror for one task of this process that makes a map. The others then find the symbols in the cache.
    pub(crate) fn map_turn(&self) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = MAP_TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(self.path.clone()).or_default().clone()
    }

    /// Opens the mirror with libgit2.
    ///
    /// # Errors
    /// A [`GitError`] if libgit2 cannot open it.
    pub fn repository(&self) -> Result<Repository, GitError> {
        git_context(format!("open the mirror {}", self.path.display()), Repository::open_bare(&self.path))
    }

    /// Folder of the mirror.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Copies `commit` and its history from the user's repository, unless the mirror has it.
    ///
    /// # Errors
    /// [`GitError::ShallowClone`] or [`GitError::CommitNotFound`] if the history or the commit is missing, and other
    /// [`GitError`]s if a repository cannot be opened, read or written.
    pub fn fetch_base(&self, commit: &str) -> Result<(), GitError> {
        self.fetch_base_within(commit, &SizeLimits::default(), &StopCondition::default())
    }

    /// Like [`Self::fetch_base`], with limits on the size of the repository and on the time.
    ///
    /// # Errors
    /// As [`Self::fetch_base`], and [`GitError::TooLarge`], [`GitError::TimeLimit`] or [`GitError::Cancelled`].
    pub fn fetch_base_within(&self, commit: &str, limits: &SizeLimits, stop: &StopCondition) -> Result<(), GitError> {
        let (wait, _guard) = StopCondition::after(MAX_SHORT_WAIT);
        match self.lock_for_fetch(commit, &wait)? {
            Some(_lock) => self.copy_base(commit, limits, stop),
            None => Ok(()),
        }
    }

    /// True if `commit` was copied from the user's repository.
    pub(super) fn has_base(&self, commit: &str) -> Result<bool, GitError> {
        Ok(self.repository()?.find_reference(&format!("{BASE_REFS}/{commit}")).is_ok())
    }

    /// Copies `commit` and its history. The caller holds the lock of [`Self::lock_for_fetch`].
    pub(super) fn copy_base(&self, commit: &str, limits: &SizeLimits, stop: &StopCondition) -> Result<(), GitError> {
        let repository = self.repository()?;
        let name = format!("{BASE_REFS}/{commit}");
        let id = parse_oid(commit)?;
        let source = open_source_within(&self.source, limits, stop)?;
        if source.is_shallow() {
            return Err(GitError::ShallowClone { path: self.source.clone() });
        }
        if ObjectReader::new(&source, limits)?.commit_if_present(id)?.is_none() {
            return Err(GitError::CommitNotFound { path: self.source.clone(), commit: commit.to_owned() });
        }
        check_size(&source, id, limits, stop)?;
        ObjectCopy { source: &source, mirror: &repository, limits, stop }.run(id)?;
        git_context(format!("find {commit} in the mirror"), repository.find_commit(id))?;
        let created = repository.reference(&name, id, true, "cfq: base");
        git_context(format!("create a ref for commit {commit}"), created)?;
        sync_ref(&repository, &name)?;
        self.sync_folders()
    }

    /// Syncs the files and folders that the creation of the mirror wrote.
    fn sync_folders(&self) -> Result<(), GitError> {
        let files = ["config", "HEAD", "objects/pack", "objects", "refs"].map(|name| self.path.join(name));
        sync_all(files.into_iter().chain(self.path.ancestors().take(3).map(Path::to_owned)))
    }

    /// True if the mirror contains the commit.
    ///
    /// # Errors
    /// A [`GitError`] if the mirror cannot be opened or the id is invalid.
    pub fn has_commit(&self, commit: &str) -> Result<bool, GitError> {
        Ok(self.repository()?.find_commit(parse_oid(commit)?).is_ok())
    }

    /// Writes the commit's objects to disk and returns its id; no ref is updated.
    ///
    /// # Errors
    /// A [`GitError`] if the base or the parent is missing, or libgit2 fails.
    pub fn commit(&self, plan: &CommitPlan<'_>) -> Result<String, GitError> {
        create_commit(&self.repository()?, plan)
    }

    /// Points the task's branch at `commit`. Only the lease holder writes this branch, so no compare-and-swap is
    /// needed.
    ///
    /// # Errors
    /// A [`GitError`] if the id is invalid or the ref cannot be written.
    pub fn set_branch(&self, branch: &str, commit: &str) -> Result<(), GitError> {
        let repository = self.repository()?;
        let set = repository.reference(&format!("refs/heads/{branch}"), parse_oid(commit)?, true, "cfq: workstream");
        git_context(format!("move the branch {branch}"), set).map(drop)
    }
}

/// Opens a lock file in a mirror's folder, without locking it.
pub(super) fn lock_file(mirror: &Path, name: &str) -> Result<File, GitError> {
    let path = mirror.join(name);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    io_context(format!("open {}", path.display()), file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, commit_tree, file, nested_tree};

    #[test]
    fn fetch_base_copies_the_base_and_leaves_the_source_unchanged() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        user.make_dirty();
        let before = user.capture_state();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let files = [file("a.py", "x = 2\n")];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 5 };
        let made = mirror.commit(&plan).unwrap();
        mirror.set_branch("worker-1/task-1", &made).unwrap();
        assert_eq!(user.capture_state(), before);
        let repository = mirror.repository().unwrap();
        assert!(repository.is_bare());
        let head = repository.find_reference("refs/heads/worker-1/task-1").unwrap().target().unwrap().to_string();
        assert_eq!(head, made);
    }

    #[test]
    fn base_that_no_branch_reaches_is_fetched() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let unreachable = user.commit_files(&repository, &[("a.py", "x = 2\n")]);
        let base = git2::Oid::from_str(&user.base).unwrap();
        repository.find_reference("refs/heads/trunk").unwrap().set_target(base, "back").unwrap();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        mirror.fetch_base(&unreachable).unwrap();
        let repository = mirror.repository().unwrap();
        let snapshot = crate::workstream::Snapshot::of(&repository, &unreachable).unwrap();
        assert_eq!(snapshot.read_text("a.py").unwrap(), "x = 2\n");
        assert!(matches!(mirror.fetch_base(&"12".repeat(20)), Err(GitError::CommitNotFound { .. })));
    }

    #[test]
    fn shallow_clone_is_refused_with_the_next_step() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        std::fs::write(user.path().join(".git/shallow"), format!("{}\n", user.base)).unwrap();
        let data = tempfile::tempdir().unwrap();
        let error = Mirror::open(data.path(), &user.path()).unwrap().fetch_base(&user.base).unwrap_err();
        assert!(error.to_string().contains("--unshallow"), "{error}");
    }

    #[test]
    fn too_large_repository_is_refused_before_it_is_copied() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let nested = commit_tree(&repository, nested_tree(&repository, 300)).to_string();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        let error = mirror.fetch_base(&nested).unwrap_err();
        assert!(error.is_invalid_request() && error.to_string().contains("levels deep"), "{error}");
        // The same folders in an earlier commit only.
        let nested = repository.find_commit(parse_oid(&nested).unwrap()).unwrap();
        let base = repository.find_commit(parse_oid(&user.base).unwrap()).unwrap();
        let (author, tree) = (base.author(), base.tree().unwrap());
        let later = repository.commit(None, &author, &author, "later", &tree, &[&nested]).unwrap();
        assert!(matches!(mirror.fetch_base(&later.to_string()), Err(GitError::TooLarge { .. })));
        let limits = SizeLimits { objects: 2, ..SizeLimits::default() };
        let fetched = mirror.fetch_base_within(&user.base, &limits, &StopCondition::default());
        assert!(fetched.unwrap_err().to_string().contains("more than 2 objects"));
        let (late, _guard) = StopCondition::after(std::time::Duration::ZERO);
        let fetched = mirror.fetch_base_within(&user.base, &SizeLimits::default(), &late);
        assert!(matches!(fetched, Err(GitError::TimeLimit { .. })));
        assert_eq!(std::fs::read_dir(mirror.path.join("objects/pack")).unwrap().count(), 0, "nothing was copied");
        mirror.fetch_base(&user.base).unwrap();
    }

    #[test]
    fn large_file_and_several_bases_are_copied_completely() {
        let large = "x = 1\n".repeat(4 << 20);
        let user = UserRepo::new(&[("large.txt", large.as_str()), ("d/a.py", "x = 1\n")]);
        let second = user.commit_files(&user.repo(), &[("d/b.py", "y = 1\n")]);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        for commit in [&user.base, &second] {
            mirror.fetch_base(commit).unwrap();
            let (repository, copy) = (user.repo(), mirror.repository().unwrap());
            let mut walk = copy.revwalk().unwrap();
            walk.push(parse_oid(commit).unwrap()).unwrap();
            for id in walk {
                let tree = copy.find_commit(id.unwrap()).unwrap().tree().unwrap();
                tree.walk(git2::TreeWalkMode::PreOrder, |_, entry| {
                    let copied = copy.odb().unwrap().read(entry.id()).unwrap().data().to_vec();
                    assert_eq!(copied, repository.odb().unwrap().read(entry.id()).unwrap().data());
                    git2::TreeWalkResult::Ok
                })
                .unwrap();
            }
        }
        assert!(mirror.repository().unwrap().find_commit(parse_oid(&second).unwrap()).is_ok());
    }

    #[test]
    fn two_spellings_of_one_path_share_a_mirror() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let data = tempfile::tempdir().unwrap();
        let one = Mirror::open(data.path(), &user.path()).unwrap();
        let two = Mirror::open(data.path(), &user.path().join("../user")).unwrap();
        assert_eq!(one.path, two.path);
    }
}
