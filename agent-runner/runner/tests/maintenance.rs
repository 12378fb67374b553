//! Tests that maintenance of a mirror keeps it small, and that neither a kill in the middle nor tasks that work
//! meanwhile lose anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_agent_runner::workstream::{
    CommitPlan, MainBranch, Maintained, MaintenanceLimits, MergeOutcome, MergeRequest, Mirror, maintain,
};
use cfq_proto::loop_step::ArtifactFile;
use git2::{Oid, Repository, Signature};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Variable with the mirror's path, in the process that is killed.
const MIRROR: &str = "CFQ_TEST_MIRROR";
/// The same in the process with a memory limit.
const LIMITED_MIRROR: &str = "CFQ_TEST_LIMITED_MIRROR";
const LIMITS: MaintenanceLimits =
    MaintenanceLimits { loose_objects: 10, small_packs: 2, branch_age: Duration::from_secs(3600) };

/// Memory limit of the process that packs large files, in bytes.
const MAX_MEMORY_BYTES: u64 = 160 << 20;

/// Held by each test. A process that another test starts would inherit the lock of a mirror until it executes its
/// program, and maintenance would be skipped meanwhile.
static ALONE: Mutex<()> = Mutex::new(());

struct Fixture {
    _alone: MutexGuard<'static, ()>,
    _folder: tempfile::TempDir,
    mirror: Mirror,
    base: String,
}

fn fixture() -> Fixture {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let user = folder.path().join("user");
    let repository = Repository::init(&user).unwrap();
    let blob = repository.blob(b"x = 1\n").unwrap();
    let mut tree = repository.treebuilder(None).unwrap();
    tree.insert("a.py", blob, 0o100_644).unwrap();
    let tree = repository.find_tree(tree.write().unwrap()).unwrap();
    let author = Signature::now("user", "user@example.org").unwrap();
    let base = repository.commit(Some("HEAD"), &author, &author, "first", &tree, &[]).unwrap().to_string();
    let mirror = Mirror::open(&folder.path().join("data"), &user).unwrap();
    mirror.fetch_base(&base).unwrap();
    Fixture { _alone: alone, _folder: folder, mirror, base }
}

impl Fixture {
    fn path(&self) -> PathBuf {
        self.mirror.repository().unwrap().path().to_owned()
    }

    /// Commits a new file on a task's branch and merges it; returns the commit of `main`.
    fn merge_task(&self, n: usize) -> String {
        let path = format!("d{}/f{n}.py", n % 3);
        let files = [ArtifactFile::text(path, format!("x = {n}\n"))];
        let (base, message, time) = (self.base.as_str(), "m", 7);
        let head = self.mirror.commit(&CommitPlan { base, files: &files, parent: base, message, time }).unwrap();
        self.mirror.set_branch(&format!("worker-1/task-{n}"), &head).unwrap();
        let main = self.mirror.main().unwrap().unwrap_or_else(|| MainBranch::at(base));
        let request = MergeRequest { main: &main, base, head: &head, has_base: n > 0, message, time };
        let MergeOutcome::Planned(plan) = self.mirror.plan_merge(&request).unwrap() else { panic!("a conflict") };
        self.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        plan.new
    }

    fn maintain(&self) -> Maintained {
        maintain(&self.path(), &LIMITS).unwrap()
    }

    /// Asserts that the mirror is intact and that `main` is `expected`, with one file for each of `tasks` tasks.
    fn assert_intact(&self, expected: &str, tasks: usize) {
        let fsck =
            Command::new("git").arg("-C").arg(self.path()).args(["fsck", "--full", "--strict"]).output().unwrap();
        assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stderr));
        assert_eq!(self.mirror.main().unwrap(), Some(MainBranch::at(expected)));
        let repository = self.mirror.repository().unwrap();
        let tree = repository.find_commit(Oid::from_str(expected).unwrap()).unwrap().tree().unwrap();
        for n in 0..tasks {
            let entry = tree.get_path(Path::new(&format!("d{}/f{n}.py", n % 3))).unwrap();
            assert_eq!(repository.find_blob(entry.id()).unwrap().content(), format!("x = {n}\n").as_bytes());
        }
    }

    /// Number of loose objects, packs, and other entries in the folder of objects.
    fn counts(&self) -> (usize, usize, usize) {
        let (mut loose, mut other) = (0, 0);
        for entry in std::fs::read_dir(self.path().join("objects")).unwrap() {
            let entry = entry.unwrap();
            match entry.file_name().to_str().unwrap() {
                "pack" | "info" => {}
                name if name.len() == 2 => loose += std::fs::read_dir(entry.path()).unwrap().count(),
                _ => other += 1,
            }
        }
        (loose, packs(&self.path()).len(), other)
    }
}

fn packs(mirror: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(mirror.join("objects/pack")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "pack")).collect()
}

#[test]
fn maintenance_bounds_loose_objects_packs_and_branches() {
    let f = fixture();
    let mut main = String::new();
    let mut joined = 0;
    for n in 0..40 {
        main = f.merge_task(n);
        joined += f.maintain().joined_packs;
        let (loose, packs, other) = f.counts();
        assert!(loose < 10 && packs <= 3 && other == 0, "{loose} {packs} {other}");
    }
    assert!(joined > 0);
    f.assert_intact(&main, 40);
    let branches = || f.mirror.repository().unwrap().references_glob("refs/heads/worker-*").unwrap().count();
    assert_eq!(branches(), 40);
    let all = MaintenanceLimits { branch_age: Duration::ZERO, ..LIMITS };
    assert_eq!(maintain(&f.path(), &all).unwrap().removed_branches, 40);
    assert_eq!(branches(), 0);
    f.assert_intact(&main, 40);
}

/// Not a test: the process that [`killed_maintenance_loses_nothing_and_the_next_one_completes`] starts and that is
/// killed.
#[test]
fn killed_process() {
    if let Some(mirror) = std::env::var_os(MIRROR) {
        maintain(Path::new(&mirror), &LIMITS).unwrap();
    }
}

#[test]
fn killed_maintenance_loses_nothing_and_the_next_one_completes() {
    let failpoints = [
        "runner.maintenance.written",
        "runner.maintenance.renaming",
        "runner.maintenance.renaming:2",
        "runner.maintenance.packed",
        "runner.maintenance.removing",
        "runner.maintenance.written:2",
        "runner.maintenance.renaming:3",
        "runner.maintenance.joined",
        "runner.maintenance.removing_packs",
        "runner.maintenance.removing_packs:2",
    ];
    for failpoint in failpoints {
        let f = fixture();
        // Three small packs and loose objects, so that both are packed.
        for n in 0..4 {
            f.merge_task(n);
            let only_loose = MaintenanceLimits { loose_objects: 1, small_packs: 100, ..LIMITS };
            maintain(&f.path(), &only_loose).unwrap();
        }
        for n in 4..8 {
            f.merge_task(n);
        }
        let main = f.mirror.main().unwrap().unwrap().commit;
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "killed_process"]).env(MIRROR, f.path()).env("CFQ_FAILPOINT", failpoint);
        let ended = child.output().unwrap();
        assert!(ended.status.signal().is_some(), "{failpoint}: {ended:?}");
        f.assert_intact(&main, 8);
        // Tasks go on before the next maintenance.
        let main = f.merge_task(8);
        f.assert_intact(&main, 9);
        f.maintain();
        let (loose, packs, other) = f.counts();
        assert!(loose < 10 && packs <= 3 && other == 0, "{failpoint}: {loose} {packs} {other}");
        f.assert_intact(&main, 9);
    }
}

/// Not a test: the process that [`maintenance_of_large_compressible_files_needs_little_memory`] starts.
#[test]
fn limited_process() {
    if let Some(mirror) = std::env::var_os(LIMITED_MIRROR) {
        let limit = Rlimit { current: Some(MAX_MEMORY_BYTES), maximum: Some(MAX_MEMORY_BYTES) };
        setrlimit(Resource::Data, limit).unwrap();
        maintain(Path::new(&mirror), &MaintenanceLimits { loose_objects: 1, ..LIMITS }).unwrap();
    }
}

#[test]
fn maintenance_of_large_compressible_files_needs_little_memory() {
    let f = fixture();
    let repository = f.mirror.repository().unwrap();
    let write = |mib: usize, first: u8| {
        let mut content = vec![b'x'; mib << 20];
        content[0] = first;
        repository.blob(&content).unwrap()
    };
    let large = [0, 1, 2, 3].map(|n| write(40, n));
    let packed = [0, 1, 2, 3, 4, 5, 6, 7].map(|n| write(15, n));
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "limited_process"])
        .env(LIMITED_MIRROR, f.path())
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(f.counts().0, large.len(), "only the large files stay loose");
    let objects = repository.odb().unwrap();
    assert!(large.iter().all(|id| objects.read_header(*id).unwrap().0 == 40 << 20));
    assert!(packed.iter().all(|id| objects.read(*id).unwrap().len() == 15 << 20));
}

#[test]
fn tasks_work_during_maintenance() {
    let f = fixture();
    let stop = AtomicBool::new(false);
    let main = std::thread::scope(|scope| {
        let maintenance = scope.spawn(|| {
            let mut done = 0;
            while !stop.load(Ordering::Relaxed) {
                let Maintained { packed_objects, joined_packs, .. } = f.maintain();
                done += packed_objects + joined_packs;
            }
            done
        });
        let mut main = String::new();
        for n in 0..60 {
            main = f.merge_task(n);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(maintenance.join().unwrap() > 0);
        main
    });
    f.assert_intact(&main, 60);
}
