//! Reads objects of a user's repository. libgit2 reads an object into memory as a whole, and a few compressed bytes can
//! expand to many gigabytes, so the size in the object's header is checked first.

use git2::{Commit, ErrorCode, ObjectType, Odb, Oid, Repository, Tree};

use super::error::{GitError, ObjectLimit, SizeLimit, git_context};
use super::size_limits::SizeLimits;

/// Reader of the objects of one repository.
pub(super) struct ObjectReader<'r> {
    repository: &'r Repository,
    odb: Odb<'r>,
    limits: &'r SizeLimits,
}

impl<'r> ObjectReader<'r> {
    /// A reader with these limits.
    ///
    /// # Errors
    /// [`GitError::Git`] if the folder of objects cannot be opened.
    pub(super) fn new(repository: &'r Repository, limits: &'r SizeLimits) -> Result<Self, GitError> {
        let odb = git_context(format!("open the objects of {}", repository.path().display()), repository.odb())?;
        Ok(Self { repository, odb, limits })
    }

    /// Reads a commit.
    ///
    /// # Errors
    /// [`GitError::TooLarge`] if it exceeds its limit, [`GitError::Git`] if it is missing or invalid.
    pub(super) fn commit(&self, id: Oid) -> Result<Commit<'r>, GitError> {
        self.check(ObjectType::Commit, id, self.limits.commit_bytes)?;
        git_context(format!("read the commit {id}"), self.repository.find_commit(id))
    }

    /// Reads a commit; `None` if the repository does not contain it.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub(super) fn commit_if_present(&self, id: Oid) -> Result<Option<Commit<'r>>, GitError> {
        match self.commit(id) {
            Ok(commit) => Ok(Some(commit)),
            Err(GitError::Git { source, .. }) if source.code() == ErrorCode::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a tree.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub(super) fn tree(&self, id: Oid) -> Result<Tree<'r>, GitError> {
        self.check(ObjectType::Tree, id, self.limits.tree_bytes)?;
        git_context(format!("read the tree {id}"), self.repository.find_tree(id))
    }

    /// Returns the size of a file without reading it, in bytes.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub(super) fn file_bytes(&self, id: Oid) -> Result<u64, GitError> {
        self.check(ObjectType::Blob, id, self.limits.file_bytes)
    }

    fn check(&self, kind: ObjectType, id: Oid, max_bytes: u64) -> Result<u64, GitError> {
        let (bytes, _) = git_context(format!("read the {kind} {id}"), self.odb.read_header(id))?;
        if bytes as u64 <= max_bytes {
            return Ok(bytes as u64);
        }
        let limit = SizeLimit::Object(ObjectLimit { kind, id, max_bytes });
        Err(GitError::TooLarge { path: self.repository.path().to_owned(), limit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;
    use crate::workstream::{Mirror, StopCondition};

    #[test]
    fn object_over_its_limit_is_refused_before_it_is_read() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let large = "x = 1\n".repeat(1000);
        let in_history = user.commit_files(&repository, &[("large.py", large.as_str())]);
        let blob = repository.blob(large.as_bytes()).unwrap();
        // The file is in an earlier commit only.
        let base = repository.find_commit(Oid::from_str(&user.base).unwrap()).unwrap();
        let earlier = repository.find_commit(Oid::from_str(&in_history).unwrap()).unwrap();
        let (author, tree) = (base.author(), base.tree().unwrap());
        let later = repository.commit(None, &author, &author, "later", &tree, &[&earlier]).unwrap();
        let long_message = repository.commit(None, &author, &author, &large, &tree, &[&base]).unwrap();
        let mut builder = repository.treebuilder(None).unwrap();
        for n in 0..200 {
            builder.insert(format!("f{n}.py"), tree.get(0).unwrap().id(), git2::FileMode::Blob.into()).unwrap();
        }
        let wide_tree = builder.write().unwrap();
        let wide_tree = repository.find_tree(wide_tree).unwrap();
        let wide = repository.commit(None, &author, &author, "wide", &wide_tree, &[&base]).unwrap();

        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        let limits = SizeLimits { file_bytes: 5000, tree_bytes: 5000, commit_bytes: 5000, ..SizeLimits::default() };
        for (commit, id, kind) in [
            (earlier.id(), blob, ObjectType::Blob),
            (later, blob, ObjectType::Blob),
            (long_message, long_message, ObjectType::Commit),
            (wide, wide_tree.id(), ObjectType::Tree),
        ] {
            let fetched = mirror.fetch_base_within(&commit.to_string(), &limits, &StopCondition::default());
            let error = fetched.unwrap_err();
            let limit = ObjectLimit { kind, id, max_bytes: 5000 };
            match &error {
                GitError::TooLarge { limit: SizeLimit::Object(found), .. } => assert_eq!(*found, limit, "{error}"),
                other => panic!("{kind}: {other:?}"),
            }
            assert!(error.is_invalid_request() && error.to_string().contains(&id.to_string()), "{error}");
        }
        mirror.fetch_base_within(&user.base, &limits, &StopCondition::default()).unwrap();
        mirror.fetch_base(&later.to_string()).unwrap();
    }
}
