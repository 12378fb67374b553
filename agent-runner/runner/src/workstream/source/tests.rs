//! Tests of repositories that are opened or refused.

mod rights;

use std::os::unix::fs::symlink;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use git2::RepositoryInitOptions;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::workstream::testing::{UserRepo, artifact, commit_tree, file};
use crate::workstream::{DeliveredBranch, Mirror, UnsafeGitPathReason, deliver};

#[test]
fn unusable_repositories_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(head_commit(&folder.path().join("none")), Err(GitError::PathNotFound { .. })));
    assert!(matches!(head_commit(folder.path()), Err(GitError::NotARepository { .. })));
    let empty = folder.path().join("empty");
    Repository::init(&empty).unwrap();
    let error = head_commit(&empty).unwrap_err();
    assert!(error.to_string().contains("no commits yet"), "{error}");
    // A plain folder inside a repository is not the repository.
    let inner = empty.join("inner");
    std::fs::create_dir(&inner).unwrap();
    assert!(matches!(head_commit(&inner), Err(GitError::NotARepository { .. })));
}

#[test]
fn detached_head_and_bare_repository_are_accepted() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let commit = head_commit(&user.path()).unwrap();
    assert_eq!(commit, user.base);
    user.repo().set_head_detached(git2::Oid::from_str(&commit).unwrap()).unwrap();
    assert_eq!(head_commit(&user.path()).unwrap(), commit);
    let bare = user.folder.path().join("bare.git");
    git2::build::RepoBuilder::new().bare(true).clone(user.path().to_str().unwrap(), &bare).unwrap();
    assert_eq!(head_commit(&bare).unwrap(), commit);
}

/// Maximum wait for an operation that a FIFO would block for ever.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Runs an operation on a thread of its own, which a failed test leaves behind.
fn bounded<T: Send + 'static>(operation: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, result) = sync_channel(1);
    std::thread::spawn(move || sender.send(operation()).ok());
    result.recv_timeout(MAX_WAIT).expect("the operation is blocked")
}

fn fetch(user: &UserRepo, path: &Path) -> Result<(), GitError> {
    let (data, path, base) = (user.folder.path().join("data"), path.to_owned(), user.base.clone());
    bounded(move || Mirror::open(&data, &path).unwrap().fetch_base(&base))
}

fn deliver_to(user: &UserRepo, path: &Path) -> Result<DeliveredBranch, GitError> {
    let made = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("b.py", "y = 1\n")]);
    let (path, base) = (path.to_owned(), user.base.clone());
    bounded(move || deliver(&path, "cfq/t1", &base, &[made]))
}

fn make_fifo(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::remove_file(path).ok();
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn loose_object(user: &UserRepo, id: &str) -> PathBuf {
    user.path().join(".git/objects").join(&id[..2]).join(&id[2..])
}

/// The files that libgit2 opens in the repository, relative to its git folder.
fn opened_files(user: &UserRepo) -> Vec<PathBuf> {
    let repository = user.repo();
    let commit = repository.find_commit(Oid::from_str(&user.base).unwrap()).unwrap();
    let tree = commit.tree().unwrap();
    let objects = [commit.id(), tree.id(), tree.get_name("a.py").unwrap().id()];
    let loose = objects.map(|id| loose_object(user, &id.to_string()));
    let pack = format!("objects/pack/pack-{}", "12".repeat(20));
    let names = [
        "HEAD",
        "config",
        "packed-refs",
        "index",
        "shallow",
        "commondir",
        "info/grafts",
        "refs/heads/trunk",
        "refs/heads/deep/other",
        "refs/tags/v1",
        "objects/info/alternates",
        "objects/info/commit-graph",
    ];
    let git_dir = user.path().join(".git");
    let packs = ["idx", "pack"].map(|extension| git_dir.join(&pack).with_extension(extension));
    names.into_iter().map(|name| git_dir.join(name)).chain(packs).chain(loose).collect()
}

#[test]
fn fifo_in_the_git_folder_is_refused_and_the_next_fetch_works() {
    let count = opened_files(&UserRepo::new(&[("a.py", "x = 1\n")])).len();
    for n in 0..count {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let path = opened_files(&user).swap_remove(n);
        let kept = std::fs::read(&path).ok();
        make_fifo(&path);
        let error = fetch(&user, &user.path()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains("neither a file nor a folder"), "{text}");
        assert!(error.is_invalid_request() && !error.is_transient(), "{text}");
        let repository = user.path();
        assert!(bounded(move || head_commit(&repository)).is_err(), "{}", path.display());
        let (repository, base) = (user.path(), user.base.clone());
        assert!(bounded(move || deliver(&repository, "cfq/t1", &base, &[])).is_err(), "{}", path.display());
        // The refused fetch has released its lock.
        std::fs::remove_file(&path).unwrap();
        kept.map_or(Ok(()), |kept| std::fs::write(&path, kept)).unwrap();
        fetch(&user, &user.path()).unwrap();
    }
}

#[test]
fn socket_that_libgit2_does_not_open_is_ignored() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    // git's file system monitor creates it.
    let _socket = std::os::unix::net::UnixListener::bind(user.path().join(".git/fsmonitor--daemon.ipc")).unwrap();
    fetch(&user, &user.path()).unwrap();
}

#[test]
fn huge_file_in_the_git_folder_is_refused_before_it_is_read() {
    for name in ["HEAD", "config", "packed-refs", "refs/heads/other", "objects/info/alternates", "loose"] {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let path = match name {
            "loose" => loose_object(&user, &user.base),
            name => user.path().join(".git").join(name),
        };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::remove_file(&path).ok();
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let error = fetch(&user, &user.path()).unwrap_err();
        let reason = match &error {
            GitError::UnsafeGitPath { path: found, reason } if *found == path => *reason,
            other => panic!("{name}: {other:?}"),
        };
        assert!(matches!(reason, UnsafeGitPathReason::LargeFile(_)), "{error}");
    }
}

#[test]
fn number_of_files_in_the_git_folder_is_limited() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let limits = SizeLimits { git_files: 100, ..SizeLimits::default() };
    let open = || open_source_within(&user.path(), &limits, &StopCondition::default()).map(drop);
    open().unwrap();
    for n in 0..100 {
        std::fs::write(user.path().join(format!(".git/refs/heads/b{n}")), format!("{}\n", user.base)).unwrap();
    }
    let error = open().unwrap_err();
    assert!(error.is_invalid_request() && error.to_string().contains("git gc"), "{error}");
}

#[test]
fn linked_worktree_and_submodule_are_accepted() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let linked = user.folder.path().join("linked");
    user.repo().worktree("linked", &linked, None).unwrap();
    assert_eq!(head_commit(&linked).unwrap(), user.base);
    fetch(&user, &linked).unwrap();
    let delivered = deliver_to(&user, &linked).unwrap();
    assert!(user.repo().find_branch(&delivered.branch, git2::BranchType::Local).is_ok());

    let (module, sub) = (user.path().join(".git/modules/sub"), user.path().join("sub"));
    let mut options = RepositoryInitOptions::new();
    options.workdir_path(&sub).no_dotgit_dir(true).external_template(false).mkpath(true);
    let repository = Repository::init_opts(&module, &options).unwrap();
    assert!(sub.join(".git").is_file());
    let tree = repository.treebuilder(None).unwrap().write().unwrap();
    let commit = commit_tree(&repository, tree);
    repository.reference("refs/heads/main", commit, true, "").unwrap();
    repository.set_head("refs/heads/main").unwrap();
    assert_eq!(head_commit(&sub).unwrap(), commit.to_string());
    // The same with a relative path, as git writes it.
    let config = std::fs::read_to_string(module.join("config")).unwrap();
    let absolute = sub.canonicalize().unwrap();
    let config = config.replace(absolute.to_str().unwrap(), "../../../sub");
    assert!(config.contains("../../../sub"), "{config}");
    std::fs::write(module.join("config"), config).unwrap();
    std::fs::write(sub.join(".git"), "gitdir: ../.git/modules/sub\n").unwrap();
    assert_eq!(head_commit(&sub).unwrap(), commit.to_string());
}

#[test]
fn pointer_to_the_repository_of_another_working_tree_is_refused() {
    let private = UserRepo::new(&[("secret.py", "x = 1\n")]);
    let target = private.path().join(".git");
    let refused = |path: &Path, pointer: &Path| {
        for result in [fetch(&private, path).map(drop), deliver_to(&private, path).map(drop)] {
            match result.unwrap_err() {
                GitError::ForeignGitFolder { path, .. } => assert_eq!(path, pointer),
                other => panic!("{}: {other}", pointer.display()),
            }
        }
    };
    // A file, a link, and a file that leads to a worktree of the repository.
    let hostile = private.folder.path().join("hostile");
    std::fs::create_dir(&hostile).unwrap();
    let git = hostile.join(".git");
    std::fs::write(&git, format!("gitdir: {}\n", target.display())).unwrap();
    refused(&hostile, &git);
    std::fs::remove_file(&git).unwrap();
    symlink(&target, &git).unwrap();
    refused(&hostile, &git);
    std::fs::remove_file(&git).unwrap();
    private.repo().worktree("linked", &private.folder.path().join("linked"), None).unwrap();
    std::fs::write(&git, format!("gitdir: {}\n", target.join("worktrees/linked").display())).unwrap();
    refused(&hostile, &git);
    // The user confirms that the git folder is that of this working tree, as the reason says.
    std::fs::write(&git, format!("gitdir: {}\n", target.display())).unwrap();
    private.repo().config().unwrap().set_str("core.worktree", hostile.to_str().unwrap()).unwrap();
    assert_eq!(head_commit(&hostile).unwrap(), private.base);
    private.repo().config().unwrap().remove("core.worktree").unwrap();
    // A git folder of its own, whose common folder is that of the private repository.
    let other = UserRepo::new(&[("a.py", "x = 1\n")]);
    let pointer = other.path().join(".git/commondir");
    std::fs::write(&pointer, format!("{}\n", target.display())).unwrap();
    refused(&other.path(), &pointer);
    assert!(private.repo().branches(None).unwrap().all(|branch| branch.unwrap().0.name().unwrap() != Some("cfq/t1")));
}

#[test]
fn refs_behind_a_link_out_of_the_repository_are_refused() {
    let private = UserRepo::new(&[("secret.py", "x = 1\n")]);
    for name in ["HEAD", "packed-refs", "refs", "refs/heads", "refs/heads/trunk", "config"] {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let link = user.path().join(".git").join(name);
        std::fs::rename(&link, user.folder.path().join("moved")).ok();
        let target = private.path().join(".git").join(name);
        if name == "packed-refs" {
            std::fs::write(&target, "").unwrap();
        }
        symlink(target, &link).unwrap();
        let error = fetch(&user, &user.path()).unwrap_err();
        assert!(matches!(error, GitError::UnsafeGitPath { .. }) && error.to_string().contains(name), "{error}");
    }
    // Old versions of git create such links inside the repository.
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let head = user.path().join(".git/HEAD");
    std::fs::remove_file(&head).unwrap();
    symlink("refs/heads/trunk", &head).unwrap();
    fetch(&user, &user.path()).unwrap();
}

/// A second repository that has no objects of its own and shares those of `user`.
fn sharing_repository(user: &UserRepo, line: &str) -> PathBuf {
    let path = user.folder.path().join("sharing");
    let mut options = RepositoryInitOptions::new();
    Repository::init_opts(&path, options.initial_head("trunk").external_template(false)).unwrap();
    std::fs::write(path.join(".git/objects/info/alternates"), format!("# shared\n{line}\n")).unwrap();
    std::fs::write(path.join(".git/refs/heads/trunk"), format!("{}\n", user.base)).unwrap();
    path
}

#[test]
fn repository_is_found_from_a_folder_in_it() {
    let user = UserRepo::new(&[("d/a.py", "x = 1\n")]);
    for dir in ["", "d", ".git", ".git/refs"] {
        let found = find_source_repository(&user.path().join(dir)).unwrap();
        assert_eq!(found.workdir().unwrap(), user.path().canonicalize().unwrap(), "{dir:?}");
    }
    let outside = find_source_repository(user.folder.path());
    assert!(matches!(outside.map(drop), Err(GitError::NotARepository { path }) if path == user.folder.path()));
    make_fifo(&user.path().join(".git/config"));
    let dir = user.path().join("d");
    assert!(matches!(bounded(move || find_source_repository(&dir).map(drop)), Err(GitError::UnsafeGitPath { .. })));
}

#[test]
fn alternates_are_used_and_checked() {
    for line in ["absolute", "../../../user/.git/objects"] {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let absolute = user.path().join(".git/objects");
        let line = if line == "absolute" { absolute.to_str().unwrap() } else { line };
        let sharing = sharing_repository(&user, line);
        assert_eq!(head_commit(&sharing).unwrap(), user.base);
        fetch(&user, &sharing).unwrap();
        make_fifo(&loose_object(&user, &user.base));
        let error = bounded(move || head_commit(&sharing)).unwrap_err();
        assert!(matches!(error, GitError::UnsafeGitPath { .. }), "{error}");
    }
}

#[test]
fn alternates_that_cannot_be_checked_are_refused() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let objects = user.path().join(".git/objects");
    let sharing = sharing_repository(&user, objects.to_str().unwrap());
    let list = sharing.join(".git/objects/info/alternates");
    let refused = |content: &[u8]| {
        std::fs::write(&list, content).unwrap();
        let sharing = sharing.clone();
        let error = bounded(move || head_commit(&sharing)).unwrap_err();
        assert!(error.is_invalid_request() && error.to_string().contains("git repack -a -d"), "{error}");
        match error {
            GitError::UnsafeGitPath { path, reason } if path.canonicalize().unwrap() == list => reason,
            other => panic!("{other:?}"),
        }
    };
    // libgit2 reads the path up to the NUL, and the file at its end would block it.
    let blocked = user.folder.path().join("blocked");
    make_fifo(&blocked.join("info/alternates"));
    let line = |end: &[u8]| [blocked.as_os_str().as_encoded_bytes(), end].concat();
    assert_eq!(refused(&line(b"\0x\n")), UnsafeGitPathReason::InvalidAlternate);
    assert_eq!(refused(&line(b"/\xff\n")), UnsafeGitPathReason::InvalidAlternate);
    assert_eq!(refused(b"/etc\n"), UnsafeGitPathReason::InvalidAlternate, "no folder of objects");
    let mut lines = Vec::new();
    for n in 0..65 {
        let folder = user.folder.path().join(format!("alternate{n}/objects"));
        std::fs::create_dir_all(&folder).unwrap();
        lines.extend([folder.as_os_str().as_encoded_bytes(), b"\n"].concat());
    }
    assert_eq!(refused(&lines), UnsafeGitPathReason::TooManyAlternates(64));
    std::fs::write(&list, format!("{}\n", objects.display())).unwrap();
    assert_eq!(head_commit(&sharing).unwrap(), user.base);
}

#[test]
fn files_that_the_configuration_includes_are_checked() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let config = user.path().join(".git/config");
    let original = std::fs::read_to_string(&config).unwrap();
    let target = user.path().join("included");
    let open = || {
        let path = user.path();
        bounded(move || head_commit(&path))
    };
    let refused = || match open().unwrap_err() {
        GitError::UnsafeGitPath { path, reason } => (path.file_name().unwrap().to_owned(), reason),
        other => panic!("{other:?}"),
    };
    for section in ["include", "includeIf \"gitdir:/**\""] {
        std::fs::write(&config, format!("{original}[{section}]\n\tpath = ../included\n")).unwrap();
        std::fs::write(&target, "[user]\n\tname = me\n").unwrap();
        assert_eq!(open().unwrap(), user.base);
        make_fifo(&target);
        assert_eq!(refused(), ("included".into(), UnsafeGitPathReason::SpecialFile));
        // The same in a file that the included file includes.
        std::fs::remove_file(&target).unwrap();
        make_fifo(&user.path().join("nested"));
        std::fs::write(&target, "[include]\n\tpath = nested\n").unwrap();
        assert_eq!(refused(), ("nested".into(), UnsafeGitPathReason::SpecialFile));
        std::fs::remove_file(&target).unwrap();
        symlink("/dev/zero", &target).unwrap();
        assert_eq!(refused(), ("included".into(), UnsafeGitPathReason::SpecialFile));
        std::fs::remove_file(&target).unwrap();
        std::fs::File::create(&target).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(refused().1, UnsafeGitPathReason::LargeFile(_)));
        std::fs::remove_file(&target).unwrap();
        assert_eq!(open().unwrap(), user.base, "a file that does not exist is ignored");
    }
    make_fifo(&target);
    std::fs::write(&config, format!("{original}[include] path = ../included\n")).unwrap();
    assert_eq!(refused(), ("config".into(), UnsafeGitPathReason::UnclearInclude));
}
