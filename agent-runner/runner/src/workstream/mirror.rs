//! A bare mirror of the user's repository under cfq's data folder. All tasks of one repository share it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use git2::{Oid, Repository, RepositoryInitOptions};
use sha2::{Digest, Sha256};

use super::commit::{CommitPlan, create};
use super::error::{GitError, git, io, oid};
use super::source::open_source;

/// Fetched bases are kept under these names, so that nothing drops them.
const BASES: &str = "refs/cfq/bases";

#[derive(Debug, Clone)]
pub struct Mirror {
    path: PathBuf,
    source: PathBuf,
}

impl Mirror {
    /// Finds or makes the mirror of `source` in `data_dir`. The name is a hash of the real path, so two spellings of one
    /// folder share a mirror.
    pub fn open(data_dir: &Path, source: &Path) -> Result<Self, GitError> {
        let real = std::fs::canonicalize(source).unwrap_or_else(|_| source.to_owned());
        let hash: String =
            Sha256::digest(real.as_os_str().as_encoded_bytes()).iter().take(12).map(|b| format!("{b:02x}")).collect();
        let path = data_dir.join("mirrors").join(format!("{hash}.git"));
        let mirror = Self { path, source: source.to_owned() };
        if Repository::open_bare(&mirror.path).is_err() {
            mirror.create()?;
        }
        Ok(mirror)
    }

    fn create(&self) -> Result<(), GitError> {
        let doing = || format!("make the mirror {}", self.path.display());
        io(doing(), std::fs::create_dir_all(&self.path))?;
        let _alone = self.lock("cfq-create.lock")?;
        let mut options = RepositoryInitOptions::new();
        // The user's template may carry hooks and settings; the mirror has neither.
        options.bare(true).mkpath(true).external_template(false).initial_head("main");
        let repository = git(doing(), Repository::init_opts(&self.path, &options))?;
        let mut config = git(doing(), repository.config())?;
        for (key, value) in [("core.autocrlf", "false"), ("core.hooksPath", "/dev/null"), ("gc.auto", "0")] {
            git(doing(), config.set_str(key, value))?;
        }
        Ok(())
    }

    pub fn source(&self) -> &Path {
        &self.source
    }

    pub fn repository(&self) -> Result<Repository, GitError> {
        git(format!("open the mirror {}", self.path.display()), Repository::open_bare(&self.path))
    }

    /// Waits until this process alone holds the named lock; the operating system frees it if we die.
    pub(crate) fn lock(&self, name: &str) -> Result<File, GitError> {
        let path = self.path.join(name);
        let doing = || format!("lock {}", path.display());
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = io(doing(), file)?;
        io(doing(), file.lock())?;
        Ok(file)
    }

    /// Copies `commit` and what it stands on from the user's repository, unless it is here.
    pub fn fetch_base(&self, commit: &str) -> Result<(), GitError> {
        let repository = self.repository()?;
        let name = format!("{BASES}/{commit}");
        let id = oid(commit)?;
        if repository.find_reference(&name).is_ok() {
            return Ok(());
        }
        let source = open_source(&self.source)?;
        if source.is_shallow() {
            return Err(GitError::Shallow { path: self.source.clone() });
        }
        if source.find_commit(id).is_err() {
            return Err(GitError::NoCommit { path: self.source.clone(), commit: commit.to_owned() });
        }
        let _alone = self.lock("cfq-fetch.lock")?;
        self.copy(&source, &repository, id)?;
        git(format!("find {commit} in the mirror"), repository.find_commit(id))?;
        git(format!("keep {commit}"), repository.reference(&name, id, true, "cfq: base")).map(drop)
    }

    /// One pack with everything `id` stands on that the bases fetched before do not. Not a fetch over libgit2's local
    /// transport, because that finds only what a branch of the source still reaches.
    fn copy(&self, source: &Repository, mirror: &Repository, id: Oid) -> Result<(), GitError> {
        let doing = || format!("copy {id} from {}", self.source.display());
        let mut walk = git(doing(), source.revwalk())?;
        git(doing(), walk.push(id))?;
        for reference in git(doing(), mirror.references_glob(&format!("{BASES}/*")))?.flatten() {
            if let Some(known) = reference.target().filter(|known| source.find_commit(*known).is_ok()) {
                git(doing(), walk.hide(known))?;
            }
        }
        let mut pack = git(doing(), source.packbuilder())?;
        git(doing(), pack.insert_walk(&mut walk))?;
        if pack.object_count() == 0 {
            return Ok(());
        }
        let odb = git(doing(), mirror.odb())?;
        let mut writer = git(doing(), odb.packwriter())?;
        let mut written = Ok(());
        let packed = pack.foreach(|chunk| {
            written = writer.write_all(chunk);
            written.is_ok()
        });
        io(doing(), written)?;
        git(doing(), packed)?;
        git(doing(), writer.commit()).map(drop)
    }

    pub fn has_commit(&self, commit: &str) -> Result<bool, GitError> {
        Ok(self.repository()?.find_commit(oid(commit)?).is_ok())
    }

    /// Writes the commit's objects; no reference moves.
    pub fn commit(&self, plan: &CommitPlan<'_>) -> Result<String, GitError> {
        create(&self.repository()?, plan)
    }

    /// Points the workstream's branch at `commit`. The branch is the lease holder's own, so it is simply set.
    pub fn set_branch(&self, branch: &str, commit: &str) -> Result<(), GitError> {
        let repository = self.repository()?;
        let set = repository.reference(&format!("refs/heads/{branch}"), oid(commit)?, true, "cfq: workstream");
        git(format!("set {branch}"), set).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn fetching_copies_the_base_and_leaves_the_user_alone() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        user.make_dirty();
        let before = user.photograph();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let files = [file("a.py", "x = 2\n")];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 5 };
        let made = mirror.commit(&plan).unwrap();
        mirror.set_branch("worker-1/task-1", &made).unwrap();
        assert_eq!(user.photograph(), before);
        let repository = mirror.repository().unwrap();
        assert!(repository.is_bare());
        let head = repository.find_reference("refs/heads/worker-1/task-1").unwrap().target().unwrap().to_string();
        assert_eq!(head, made);
    }

    #[test]
    fn a_base_that_no_branch_reaches_any_more_is_still_fetched() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let lost = user.commit_files(&repository, &[("a.py", "x = 2\n")]);
        let base = git2::Oid::from_str(&user.base).unwrap();
        repository.find_reference("refs/heads/trunk").unwrap().set_target(base, "back").unwrap();
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        mirror.fetch_base(&lost).unwrap();
        let repository = mirror.repository().unwrap();
        assert_eq!(crate::workstream::Snapshot::of(&repository, &lost).unwrap().read_text("a.py").unwrap(), "x = 2\n");
        assert!(matches!(mirror.fetch_base(&"12".repeat(20)), Err(GitError::NoCommit { .. })));
    }

    #[test]
    fn a_shallow_clone_is_refused_with_the_way_out() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        std::fs::write(user.path().join(".git/shallow"), format!("{}\n", user.base)).unwrap();
        let data = tempfile::tempdir().unwrap();
        let error = Mirror::open(data.path(), &user.path()).unwrap().fetch_base(&user.base).unwrap_err();
        assert!(error.to_string().contains("--unshallow"), "{error}");
    }

    #[test]
    fn two_spellings_share_a_mirror() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let data = tempfile::tempdir().unwrap();
        let one = Mirror::open(data.path(), &user.path()).unwrap();
        let two = Mirror::open(data.path(), &user.path().join("../user")).unwrap();
        assert_eq!(one.path, two.path);
    }
}
