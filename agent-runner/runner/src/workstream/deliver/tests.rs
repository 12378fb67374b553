//! Tests of deliveries into a real repository.

use super::*;
use crate::workstream::testing::{UserRepo, artifact, file};
use crate::workstream::{CommitPlan, Mirror};

#[test]
fn deliver_creates_one_branch_and_changes_nothing_else() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    user.make_dirty();
    let data = tempfile::tempdir().unwrap();
    let mirror = Mirror::open(data.path(), &user.path()).unwrap();
    mirror.fetch_base(&user.base).unwrap();
    let made = artifact(&mirror.repository().unwrap(), &user.base, &user.base, 1, vec![file("b.py", "y = 1\n")]);
    let before = user.capture_state();
    let delivered = deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap();
    assert_eq!(delivered, DeliveredBranch { branch: "cfq/t1-b".into(), commit: made.commit.clone().unwrap() });
    assert_eq!(deliver(&user.path(), "cfq/t1-b", &user.base, std::slice::from_ref(&made)).unwrap(), delivered);
    let mut after = user.capture_state();
    assert_eq!(after.remove("refs/heads/cfq/t1-b").unwrap(), delivered.commit.into_bytes());
    assert_eq!(after, before);
}

#[test]
fn taken_branch_name_gets_a_numeric_suffix() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let repository = user.repo();
    let one = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
    let two = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "2\n")]);
    let deliver = |a: &Artifact| deliver(&user.path(), "cfq/t1", &user.base, std::slice::from_ref(a)).unwrap().branch;
    assert_eq!(deliver(&one), "cfq/t1");
    assert_eq!(deliver(&two), "cfq/t1-2");
    assert_eq!(deliver(&two), "cfq/t1-2");
    assert_eq!(deliver(&one), "cfq/t1");
}

#[test]
fn existing_delivery_is_found_without_a_write() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let mut made = artifact(&user.repo(), &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
    let first = deliver(&user.path(), "cfq/t1", &user.base, std::slice::from_ref(&made)).unwrap();
    // This artifact cannot be rebuilt, so a write would fail.
    made.parent = "0".repeat(40);
    assert_eq!(deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap(), first);
}

#[test]
fn conflicting_branch_is_named_in_the_error() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let repository = user.repo();
    repository.reference("refs/heads/cfq", parse_oid(&user.base).unwrap(), false, "mine").unwrap();
    let made = artifact(&repository, &user.base, &user.base, 1, vec![file("b.py", "1\n")]);
    let error = deliver(&user.path(), "cfq/t1", &user.base, &[made]).unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("git branch -m cfq "), "{error}");
}

#[test]
fn missing_base_is_reported() {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let plan = CommitPlan { base: &user.base, files: &[], parent: &user.base, message: "m", time: 1 };
    assert!(crate::workstream::commit::create_commit(&user.repo(), &plan).is_ok());
    let error = deliver(&user.path(), "cfq/t1", &"12".repeat(20), &[]).unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("has no commit"), "{error}");
}

/// A user's repository with one artifact, and the record file of its task.
struct Fixture {
    user: UserRepo,
    made: Artifact,
    data: tempfile::TempDir,
    record: DeliveryRecordFile,
}

const BRANCH: &str = "cfq/t1-b";

fn fixture() -> Fixture {
    let user = UserRepo::new(&[("a.py", "x = 1\n")]);
    let data = tempfile::tempdir().unwrap();
    let mirror = Mirror::open(data.path(), &user.path()).unwrap();
    mirror.fetch_base(&user.base).unwrap();
    let made = artifact(&mirror.repository().unwrap(), &user.base, &user.base, 1, vec![file("b.py", "y = 1\n")]);
    let record = DeliveryRecordFile::new(data.path(), cfq_proto::ids::TaskId::fresh());
    Fixture { user, made, data, record }
}

impl Fixture {
    fn deliver(&self) -> Result<DeliveredBranch, GitError> {
        let artifacts = std::slice::from_ref(&self.made);
        deliver_recorded(&self.record, &self.user.path(), BRANCH, &self.user.base, artifacts)
    }

    fn commit(&self) -> &str {
        self.made.commit.as_deref().unwrap()
    }

    fn git_path(&self, path: &str) -> std::path::PathBuf {
        self.user.path().join(".git").join(path)
    }

    fn lock(&self) -> std::path::PathBuf {
        self.git_path(&format!("refs/heads/{BRANCH}.lock"))
    }

    fn write_lock(&self, content: &str) {
        std::fs::create_dir_all(self.lock().parent().unwrap()).unwrap();
        std::fs::write(self.lock(), content).unwrap();
    }

    /// Writes the record that a process leaves which is killed before it has created the branch.
    fn write_record(&self, process: Option<ProcessIdentity>) {
        let git_dir = self.user.repo().commondir().to_string_lossy().into_owned();
        let (branch, commit) = (BRANCH.to_owned(), self.commit().to_owned());
        self.record.write(&DeliveryRecord { git_dir, branch, commit, process, created: false }).unwrap();
    }

    /// Moves the branch to a new commit whose parent is `parent`, as the user would.
    fn move_branch(&self, parent: &str) -> String {
        let repository = self.user.repo();
        let parent = repository.find_commit(parse_oid(parent).unwrap()).unwrap();
        let author = Signature::now("user", "user@example.org").unwrap();
        let tree = parent.tree().unwrap();
        let moved = repository.commit(None, &author, &author, "mine", &tree, &[&parent]).unwrap();
        let mut branch = repository.find_reference(&branch_ref(BRANCH)).unwrap();
        branch.set_target(moved, "moved").unwrap();
        moved.to_string()
    }

    fn branches(&self) -> Vec<String> {
        let repository = self.user.repo();
        let branches = repository.references_glob("refs/heads/cfq/*").unwrap();
        branches.map(|b| b.unwrap().shorthand().unwrap().to_owned()).collect()
    }
}

/// Returns the identity of a process that has ended.
fn dead_process() -> Option<ProcessIdentity> {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let identity = ProcessIdentity::of(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    identity
}

#[test]
fn lock_of_a_dead_runner_process_is_removed() {
    for written in [false, true] {
        let f = fixture();
        f.write_record(dead_process());
        f.write_lock(&if written { format!("{}\n", f.commit()) } else { String::new() });
        assert_eq!(f.deliver().unwrap(), DeliveredBranch { branch: BRANCH.into(), commit: f.commit().into() });
        assert!(!f.lock().exists());
    }
}

#[test]
fn lock_left_beside_the_created_branch_is_removed() {
    // libgit2 creates the branch as a hard link to the lock and then removes the lock.
    let f = fixture();
    let delivered = f.deliver().unwrap();
    f.write_record(dead_process());
    let branch = f.git_path(&branch_ref(BRANCH));
    std::fs::hard_link(&branch, f.lock()).unwrap();
    std::fs::File::open(&branch).unwrap().set_modified(f.record.read().unwrap().unwrap().written_at).unwrap();
    assert_eq!(f.deliver().unwrap(), delivered);
    assert!(!f.lock().exists());
}

#[test]
fn lock_that_may_be_foreign_is_kept_and_reported() {
    let refused = |f: &Fixture, why: &str| {
        let error = f.deliver().unwrap_err();
        assert!(matches!(error, GitError::BranchLocked { .. }), "{why}: {error}");
        assert!(error.to_string().contains(f.lock().to_str().unwrap()), "{error}");
        assert!(f.lock().exists() && f.branches().is_empty(), "{why}");
    };
    let f = fixture();
    f.write_lock("");
    refused(&f, "no record");
    let f = fixture();
    f.write_record(ProcessIdentity::of(std::process::id()));
    f.write_lock("");
    refused(&f, "the recorded process lives");
    let f = fixture();
    f.write_record(dead_process());
    f.write_lock(&"12".repeat(20));
    refused(&f, "another content");
    let f = fixture();
    f.write_lock("");
    let older = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
    std::fs::File::options().write(true).open(f.lock()).unwrap().set_modified(older).unwrap();
    f.write_record(dead_process());
    refused(&f, "the lock is older than the record");
    // A lock that the user removed does not stop the next try.
    std::fs::remove_file(f.lock()).unwrap();
    assert_eq!(f.deliver().unwrap().branch, BRANCH);
}

#[test]
fn locks_of_other_refs_do_not_stop_a_delivery() {
    let f = fixture();
    for lock in ["packed-refs.lock", "HEAD.lock", "config.lock", "refs/heads/trunk.lock"] {
        std::fs::write(f.git_path(lock), "").unwrap();
    }
    assert_eq!(f.deliver().unwrap().branch, BRANCH);
}

#[test]
fn moved_branch_is_recognised_as_delivered() {
    let with_reflog = |record: bool, parent: &dyn Fn(&Fixture) -> String| {
        let f = fixture();
        let delivered = f.deliver().unwrap();
        let moved = f.move_branch(&parent(&f));
        if !record {
            f.record.remove();
        }
        assert_eq!(f.deliver().unwrap(), delivered);
        assert_eq!(f.branches(), [BRANCH]);
        assert_eq!(branch_tip(&f.user.repo(), BRANCH).unwrap(), Some(moved), "the user's branch was moved");
    };
    for record in [true, false] {
        with_reflog(record, &|f: &Fixture| f.commit().to_owned());
        with_reflog(record, &|f: &Fixture| f.user.base.clone());
    }
}

#[test]
fn moved_branch_without_reflog_is_recognised_by_the_record() {
    for created in [true, false] {
        let f = fixture();
        f.user.repo().config().unwrap().set_bool("core.logAllRefUpdates", false).unwrap();
        let delivered = f.deliver().unwrap();
        if !created {
            f.write_record(dead_process());
        }
        // If only the intent is recorded, the branch must contain the commit.
        f.move_branch(if created { &f.user.base } else { f.commit() });
        assert!(!f.git_path(&format!("logs/refs/heads/{BRANCH}")).exists());
        assert_eq!(f.deliver().unwrap(), delivered);
        assert_eq!(f.branches(), [BRANCH]);
    }
}

#[test]
fn deleted_branch_is_delivered_again_under_its_name() {
    let f = fixture();
    let repository = f.user.repo();
    // Another branch has the first name at the delivery, but not afterwards.
    repository.reference(&branch_ref(BRANCH), parse_oid(&f.user.base).unwrap(), false, "mine").unwrap();
    let delivered = f.deliver().unwrap();
    assert_eq!(delivered.branch, format!("{BRANCH}-2"));
    for name in [BRANCH, &delivered.branch] {
        repository.find_reference(&branch_ref(name)).unwrap().delete().unwrap();
    }
    assert_eq!(f.deliver().unwrap(), delivered);
    assert_eq!(f.branches(), [delivered.branch]);
}

#[test]
fn branch_that_the_user_checked_out_stays_delivered() {
    let f = fixture();
    let delivered = f.deliver().unwrap();
    f.user.repo().set_head(&branch_ref(BRANCH)).unwrap();
    assert_eq!(f.deliver().unwrap(), delivered);
    assert_eq!(f.branches(), [BRANCH]);
}

#[test]
fn unborn_branch_of_head_is_not_created() {
    let f = fixture();
    f.user.repo().set_head(&branch_ref(BRANCH)).unwrap();
    assert_eq!(f.deliver().unwrap().branch, format!("{BRANCH}-2"));
}

#[test]
fn other_result_of_the_task_is_no_earlier_delivery() {
    let mut f = fixture();
    f.deliver().unwrap();
    f.made = artifact(&f.user.repo(), &f.user.base, &f.user.base, 2, vec![file("b.py", "y = 2\n")]);
    assert_eq!(f.deliver().unwrap().branch, format!("{BRANCH}-2"));
}

/// Content of all files below `folder`.
fn content_of(folder: &Path) -> std::collections::BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut files = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(content_of(&path));
        } else {
            files.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    files
}

#[test]
fn links_in_the_git_folder_redirect_no_write() {
    use std::os::unix::fs::symlink;
    let name = BRANCH.strip_prefix("cfq/").unwrap();
    // The id of the commit is the same in every fixture.
    let commit_folder = format!("objects/{}", &fixture().commit()[..2]);
    let (branch, reflog) = (format!("refs/heads/cfq/{name}"), format!("logs/refs/heads/cfq/{name}"));
    let folders = ["logs/refs/heads/cfq", "logs/refs/heads", "logs/refs", "logs", "refs/heads/cfq", "objects"];
    let files = ["packed-refs", "logs/HEAD", &branch, &reflog];
    let folders = folders.into_iter().chain([commit_folder.as_str()]);
    for (path, is_folder) in folders.map(|path| (path, true)).chain(files.map(|path| (path, false))) {
        for exists in [true, false] {
            let f = fixture();
            f.user.repo().config().unwrap().set_str("user.name", "$(payload)").unwrap();
            let outside = f.data.path().join("outside");
            std::fs::create_dir(&outside).unwrap();
            let link = f.git_path(path);
            let target = outside.join("target");
            match (link.is_dir(), is_folder) {
                // The repository works as before, through the link.
                (true, _) => std::fs::rename(&link, &target).unwrap(),
                (false, true) if exists => std::fs::create_dir(&target).unwrap(),
                (false, false) if exists => std::fs::write(&target, "").unwrap(),
                (false, _) => {}
            }
            std::fs::remove_file(&link).ok();
            std::fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(&target, &link).unwrap();
            let before = content_of(&outside);
            let error = f.deliver().unwrap_err();
            assert!(matches!(error, GitError::UnsafeGitPath { .. }) && !error.is_transient(), "{link:?}: {error}");
            assert!(error.to_string().contains("is a symbolic link"), "{error}");
            assert_eq!(content_of(&outside), before, "{link:?}");
        }
    }
}

#[test]
fn hard_linked_reflog_and_special_files_are_refused() {
    let f = fixture();
    let log = f.git_path(&format!("logs/refs/heads/{BRANCH}"));
    std::fs::create_dir_all(log.parent().unwrap()).unwrap();
    let outside = f.data.path().join("outside");
    std::fs::write(&outside, "mine\n").unwrap();
    std::fs::hard_link(&outside, &log).unwrap();
    assert!(f.deliver().unwrap_err().to_string().contains("hard-linked"));
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "mine\n");
    std::fs::remove_file(&log).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&log).unwrap();
    assert!(f.deliver().unwrap_err().to_string().contains("neither a file nor a folder"));
    drop(socket);
}

#[test]
fn reflog_names_cfq_and_not_the_configured_user() {
    let f = fixture();
    f.user.repo().config().unwrap().set_str("user.name", "$(payload)").unwrap();
    f.deliver().unwrap();
    let log = std::fs::read_to_string(f.git_path(&format!("logs/refs/heads/{BRANCH}"))).unwrap();
    assert!(log.contains("cfq <cfq@localhost>") && !log.contains("payload"), "{log}");
}
