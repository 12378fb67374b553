//! Tests that commits, merges and deliveries are on disk when they are reported, and that no ref gets to disk before
//! its objects.
//!
//! This program defines `fsync`, `rename` and `link` itself. The linker prefers these definitions to those of the C
//! library, for libgit2 and for Rust's standard library, so they record each call in order and then make the system
//! call.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::cell::RefCell;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cfq_agent_runner::workstream::{CommitPlan, MainBranch, MergeOutcome, MergeRequest, Mirror, deliver};
use cfq_proto::loop_step::{Artifact, ArtifactFile};
use git2::{Oid, Repository, Signature};

#[derive(Debug, Clone, PartialEq)]
enum Call {
    Sync(PathBuf),
    /// A file got its final name.
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
}

thread_local! {
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
}

fn record(call: Call) {
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

/// Returns the calls since the last call of this function.
fn take_calls() -> Vec<Call> {
    CALLS.take()
}

// SAFETY of the three definitions: they have the signatures of the C library and the same effect, by the system calls
// with the same arguments; the paths are valid C strings, because the C library's functions require that too.
#[allow(unsafe_code)]
mod interposed {
    use super::*;

    unsafe fn path(text: *const c_char) -> PathBuf {
        PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(text) }.to_bytes()))
    }

    #[unsafe(no_mangle)]
    extern "C" fn fsync(fd: c_int) -> c_int {
        record(Call::Sync(std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default()));
        unsafe { libc::syscall(libc::SYS_fsync, fd) as c_int }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
        record(unsafe { Call::Rename { from: path(from), to: path(to) } });
        unsafe { libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) as c_int }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn link(from: *const c_char, to: *const c_char) -> c_int {
        record(unsafe { Call::Rename { from: path(from), to: path(to) } });
        unsafe { libc::syscall(libc::SYS_linkat, libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) as c_int }
    }
}

/// Asserts that a file and all folders between it and `root` are on disk after `calls`: its content was synced before
/// it got its name, and the folders after that.
fn assert_on_disk(calls: &[Call], path: &Path, root: &Path) {
    let renamed = calls.iter().rposition(|call| matches!(call, Call::Rename { to, .. } if to == path));
    let Some(renamed) = renamed else { panic!("{} was not written: {calls:#?}", path.display()) };
    let Call::Rename { from, .. } = &calls[renamed] else { unreachable!() };
    let content = calls[..renamed].contains(&Call::Sync(from.clone()));
    assert!(content, "{} is renamed before its content is synced: {calls:#?}", path.display());
    for folder in path.ancestors().skip(1).take_while(|folder| folder.starts_with(root)) {
        let synced = calls[renamed..].contains(&Call::Sync(folder.to_owned()));
        assert!(synced, "{} is not synced after {}: {calls:#?}", folder.display(), path.display());
    }
}

/// Index of the call that gave a file its name.
fn written_at(calls: &[Call], path: &Path) -> usize {
    let found = calls.iter().position(|call| matches!(call, Call::Rename { to, .. } if to == path));
    found.unwrap_or_else(|| panic!("{} was not written: {calls:#?}", path.display()))
}

fn object(git_dir: &Path, id: Oid) -> PathBuf {
    let hex = id.to_string();
    git_dir.join("objects").join(&hex[..2]).join(&hex[2..])
}

/// Paths of the loose objects of a commit: itself, its trees and its files, without those of `base`.
fn new_objects(repository: &Repository, commit: &str, base: &str) -> Vec<PathBuf> {
    let commit = repository.find_commit(Oid::from_str(commit).unwrap()).unwrap();
    let base = repository.find_commit(Oid::from_str(base).unwrap()).unwrap();
    let mut ids = vec![commit.id(), commit.tree_id()];
    let diff = repository.diff_tree_to_tree(Some(&base.tree().unwrap()), Some(&commit.tree().unwrap()), None).unwrap();
    for delta in diff.deltas() {
        ids.push(delta.new_file().id());
        for folder in delta.new_file().path().unwrap().ancestors().skip(1).filter(|f| *f != Path::new("")) {
            ids.push(commit.tree().unwrap().get_path(folder).unwrap().id());
        }
    }
    assert!(ids.len() > 3, "{ids:?}");
    ids.into_iter().map(|id| object(repository.path(), id)).collect()
}

struct Fixture {
    folder: tempfile::TempDir,
    base: String,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let repository = Repository::init(folder.path().join("user")).unwrap();
    let blob = repository.blob(b"x = 1\n").unwrap();
    let mut tree = repository.treebuilder(None).unwrap();
    tree.insert("a.py", blob, 0o100_644).unwrap();
    let tree = repository.find_tree(tree.write().unwrap()).unwrap();
    let author = Signature::now("user", "user@example.org").unwrap();
    let base = repository.commit(Some("HEAD"), &author, &author, "first", &tree, &[]).unwrap().to_string();
    drop(tree);
    Fixture { folder, base }
}

impl Fixture {
    fn user(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join("user")
    }

    fn data(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join("data")
    }

    fn mirror(&self) -> Mirror {
        let mirror = Mirror::open(&self.data(), &self.user()).unwrap();
        mirror.fetch_base(&self.base).unwrap();
        mirror
    }
}

fn commit(mirror: &Mirror, base: &str, path: &str) -> (String, Vec<ArtifactFile>) {
    let files = vec![ArtifactFile::text(path, "y = 1\n")];
    let plan = CommitPlan { base, files: &files, parent: base, message: "m", time: 7 };
    (mirror.commit(&plan).unwrap(), files)
}

#[test]
fn delivery_is_on_disk_and_its_objects_before_its_branch() {
    let f = fixture();
    let (commit, files) = commit(&f.mirror(), &f.base, "d/b.py");
    let artifact: Artifact = serde_json::from_value(serde_json::json!({
        "id": cfq_proto::ids::ArtifactId::fresh(), "iteration": 1, "content_hash": "", "commit": commit,
        "parent": f.base, "commit_time": 7, "commit_message": "m", "files": files, "diff": "",
        "job": cfq_proto::ids::JobId::fresh(), "model": "m", "prompt_tokens": 0, "output_tokens": 0,
    }))
    .unwrap();
    take_calls();
    deliver(&f.user(), "cfq/t1-b", &f.base, &[artifact]).unwrap();
    let calls = take_calls();
    let git_dir = f.user().join(".git");
    let branch = git_dir.join("refs/heads/cfq/t1-b");
    let before_branch = &calls[..written_at(&calls, &branch)];
    for object in new_objects(&Repository::open(f.user()).unwrap(), &commit, &f.base) {
        assert_on_disk(before_branch, &object, &git_dir.join("objects"));
    }
    assert_on_disk(&calls, &branch, &git_dir.join("refs"));
    let reflog = git_dir.join("logs/refs/heads/cfq/t1-b");
    for path in reflog.ancestors().take_while(|path| *path != git_dir) {
        assert!(calls.contains(&Call::Sync(path.to_owned())), "{} is not synced: {calls:#?}", path.display());
    }
}

#[test]
fn commit_and_merge_are_on_disk_and_objects_before_the_ref() {
    let f = fixture();
    let mirror = f.mirror();
    let git_dir = mirror.repository().unwrap().path().canonicalize().unwrap();
    take_calls();
    let (first, _) = commit(&mirror, &f.base, "d/b.py");
    let (second, _) = commit(&mirror, &f.base, "d/c.py");
    let calls = take_calls();
    for commit in [&first, &second] {
        for object in new_objects(&mirror.repository().unwrap(), commit, &f.base) {
            // The two commits share the object of their equal files.
            if calls.iter().any(|call| matches!(call, Call::Rename { to, .. } if *to == object)) {
                assert_on_disk(&calls, &object, &git_dir.join("objects"));
            }
        }
        assert_on_disk(&calls, &object(&git_dir, Oid::from_str(commit).unwrap()), &git_dir.join("objects"));
    }
    let main = git_dir.join("refs/heads/main");
    for (head, is_merge_commit) in [(&first, false), (&second, true)] {
        let current = mirror.main().unwrap().unwrap_or_else(|| MainBranch::at(&f.base));
        let request =
            MergeRequest { main: &current, base: &f.base, head, has_base: is_merge_commit, message: "Merge", time: 9 };
        take_calls();
        let MergeOutcome::Planned(plan) = mirror.plan_merge(&request).unwrap() else { panic!() };
        let planned = take_calls();
        assert_eq!(plan.new != *head, is_merge_commit);
        if is_merge_commit {
            let repository = mirror.repository().unwrap();
            for object in new_objects(&repository, &plan.new, &plan.old) {
                if planned.iter().any(|call| matches!(call, Call::Rename { to, .. } if *to == object)) {
                    assert_on_disk(&planned, &object, &git_dir.join("objects"));
                }
            }
            let merge_commit = object(&git_dir, Oid::from_str(&plan.new).unwrap());
            assert_on_disk(&planned, &merge_commit, &git_dir.join("objects"));
        }
        mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        assert_on_disk(&take_calls(), &main, &git_dir.join("refs"));
    }
}

#[test]
fn fetched_base_is_on_disk_before_its_ref() {
    let f = fixture();
    take_calls();
    let mirror = f.mirror();
    let calls = take_calls();
    let git_dir = mirror.repository().unwrap().path().canonicalize().unwrap();
    let base = git_dir.join("refs/cfq/bases").join(&f.base);
    let before_ref = &calls[..written_at(&calls, &base)];
    let packs: Vec<PathBuf> =
        std::fs::read_dir(git_dir.join("objects/pack")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(packs.len(), 2, "a pack and its index: {packs:?}");
    for pack in packs {
        assert_on_disk(before_ref, &pack, &git_dir.join("objects/pack"));
    }
    assert_on_disk(&calls, &base, &git_dir.join("refs"));
    // The mirror's folder itself is new.
    for path in [git_dir.join("objects"), git_dir.clone(), f.data().join("mirrors"), f.data()] {
        assert!(calls.contains(&Call::Sync(path.clone())), "{} is not synced: {calls:#?}", path.display());
    }
}
