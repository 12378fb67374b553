//! Tests of repositories that the process may not read, or should not read because they belong to another user.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;

/// A repository of another user, cloned with a strict umask, is not "no repository".
#[test]
fn git_folder_that_cannot_be_read_is_reported() {
    if rustix::process::geteuid().is_root() {
        return cfq_test_skip::skip("git_folder_that_cannot_be_read_is_reported", "root can read every folder");
    }
    let user = UserRepo::new(&[("d/a.py", "x = 1\n")]);
    let git_dir = user.path().canonicalize().unwrap().join(".git");
    let linked = user.folder.path().canonicalize().unwrap().join("linked");
    user.repo().worktree("linked", &linked, None).unwrap();
    let by_link = user.folder.path().canonicalize().unwrap().join("by_link");
    std::fs::create_dir(&by_link).unwrap();
    symlink(&git_dir, by_link.join(".git")).unwrap();
    let dirs = [user.path().canonicalize().unwrap().join("d"), linked, by_link];
    let permissions = |mode| std::fs::set_permissions(&git_dir, std::fs::Permissions::from_mode(mode)).unwrap();
    permissions(0o000);
    let found = dirs.map(|dir| (find_source_paths(&dir).map(drop), dir));
    permissions(0o755);
    for (found, dir) in found {
        let error = found.unwrap_err();
        assert!(
            matches!(&error, GitError::Unreadable { path, .. } if path.starts_with(&git_dir)),
            "{dir:?}: {error:?}"
        );
    }
}

#[test]
fn root_reads_only_folders_of_the_repositorys_owner() {
    let uid = std::fs::metadata("/proc/self").unwrap().uid();
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let top = std::fs::metadata(user.path()).unwrap();
    assert_eq!(Owners::of(&top), if uid == 0 { Owners::Only { uid: 0 } } else { Owners::Any });
    let other = Owners::Only { uid: uid + 1 };
    assert!(matches!(other.check(&user.path()), Err(GitError::ForeignOwner { .. })));
    if uid != 0 {
        return cfq_test_skip::skip(
            "root_reads_only_folders_of_the_repositorys_owner",
            "only root can give files away",
        );
    }
    let give = |path: &Path| std::os::unix::fs::chown(path, Some(4_000_001), None).unwrap();
    let sharing = sharing_repository(&user, user.path().join(".git/objects").to_str().unwrap());
    give(&user.path().join(".git/objects"));
    for path in [user.path(), sharing] {
        let error = head_commit(&path).unwrap_err();
        assert!(matches!(error, GitError::ForeignOwner { found: 4_000_001, expected: 0, .. }), "{error}");
    }
    // libgit2 itself refuses a working tree that belongs to another user, unless git's settings of root allow it.
    let foreign = UserRepo::new(&[("a.py", "x = 1\n")]);
    let mut open = vec![foreign.path()];
    while let Some(path) = open.pop() {
        give(&path);
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    assert!(matches!(head_commit(&foreign.path()), Err(GitError::WrongOwner { .. })));
}
