//! Opening the user's repository, and saying clearly why it cannot be used.

use std::path::Path;

use git2::{ErrorCode, Repository, RepositoryOpenFlags};

use super::error::{GitError, git};

/// Opens exactly `path` (a working tree's top folder, its `.git`, or a bare repository), not a parent of it.
pub fn open_source(path: &Path) -> Result<Repository, GitError> {
    let owned = || path.to_owned();
    match std::fs::metadata(path) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(GitError::Missing { path: owned() }),
        Err(source) => return Err(GitError::Unreadable { path: owned(), source }),
    }
    // libgit2 answers "not found" also where it is not allowed to look.
    if let Err(source) = std::fs::read_dir(path) {
        return Err(GitError::Unreadable { path: owned(), source });
    }
    let none: [&Path; 0] = [];
    match Repository::open_ext(path, RepositoryOpenFlags::NO_SEARCH, none) {
        Ok(repository) => Ok(repository),
        Err(error) => Err(match error.code() {
            ErrorCode::NotFound => GitError::NotARepository { path: owned() },
            ErrorCode::Owner => GitError::Owner { path: owned() },
            _ => GitError::Git { doing: format!("open {}", path.display()), source: error },
        }),
    }
}

/// The commit HEAD stands on, on a branch or detached.
pub fn head_commit(path: &Path) -> Result<String, GitError> {
    let repository = open_source(path)?;
    match repository.head() {
        Ok(head) => {
            let commit = git("find HEAD's commit", head.peel_to_commit())?;
            Ok(commit.id().to_string())
        }
        Err(error) => match error.code() {
            ErrorCode::UnbornBranch | ErrorCode::NotFound => Err(GitError::Empty { path: path.to_owned() }),
            _ => Err(GitError::Git { doing: format!("read HEAD of {}", path.display()), source: error }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn each_kind_of_repository_has_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(head_commit(&folder.path().join("none")), Err(GitError::Missing { .. })));
        assert!(matches!(head_commit(folder.path()), Err(GitError::NotARepository { .. })));
        let empty = folder.path().join("empty");
        Repository::init(&empty).unwrap();
        let error = head_commit(&empty).unwrap_err();
        assert!(error.to_string().contains("no commits yet"), "{error}");
        // A plain folder inside a repository is not taken for it.
        let inner = empty.join("inner");
        std::fs::create_dir(&inner).unwrap();
        assert!(matches!(head_commit(&inner), Err(GitError::NotARepository { .. })));
    }

    #[test]
    fn a_detached_head_and_a_bare_repository_are_fine() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let commit = head_commit(&user.path()).unwrap();
        assert_eq!(commit, user.base);
        user.repo().set_head_detached(git2::Oid::from_str(&commit).unwrap()).unwrap();
        assert_eq!(head_commit(&user.path()).unwrap(), commit);
        let bare = user.folder.path().join("bare.git");
        git2::build::RepoBuilder::new().bare(true).clone(user.path().to_str().unwrap(), &bare).unwrap();
        assert_eq!(head_commit(&bare).unwrap(), commit);
    }
}
