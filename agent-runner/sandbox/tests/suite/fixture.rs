//! Folders and launcher of a test, and the program that tries to escape.
//!
//! A program in a sandbox never runs as root. If the tests do, the programs run as `nobody`, which must be able to execute
//! the launcher and this test program; so both are copied to a folder that every user may read.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use cfq_sandbox::{
    CommandEnd, CommandLimits, CommandOutcome, LaunchError, SandboxAccount, SandboxLauncher, SandboxLevel,
    SandboxedCommand, remove_folder,
};
use tempfile::TempDir;

/// User and group of programs if the tests run as root.
const NOBODY: SandboxAccount = SandboxAccount { uid: 65534, gid: 65534 };
/// Variable with the attempt that this test program makes, instead of running tests.
pub const ATTEMPT: &str = "CFQ_TEST_ATTEMPT";

/// Copies of the launcher and of this test program.
struct Programs {
    folder: TempDir,
}

impl Programs {
    fn get() -> &'static Self {
        static PROGRAMS: OnceLock<Programs> = OnceLock::new();
        PROGRAMS.get_or_init(|| {
            let folder = public_folder();
            for (name, path) in [
                ("launcher", PathBuf::from(env!("CARGO_BIN_EXE_cfq-sandbox-launcher"))),
                ("test", std::env::current_exe().unwrap()),
            ] {
                let copy = folder.path().join(name);
                fs::copy(path, &copy).unwrap();
                fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
            }
            Self { folder }
        })
    }
}

fn public_folder() -> TempDir {
    let folder = tempfile::Builder::new().prefix("cfq-sandbox-test").tempdir_in("/var/tmp").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// The account that programs run as.
pub fn account() -> Option<SandboxAccount> {
    (fs::metadata("/proc/self").unwrap().uid() == 0).then_some(NOBODY)
}

fn give(path: &Path) {
    if let Some(SandboxAccount { uid, gid }) = account() {
        chown(path, Some(uid), Some(gid)).unwrap();
    }
}

/// A command that runs outside of the sandbox, as the account of the programs inside.
pub fn outside(program: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program);
    if let Some(SandboxAccount { uid, gid }) = account() {
        command.uid(uid).gid(gid);
    }
    command
}

/// Launcher of the tests.
pub fn launcher() -> SandboxLauncher {
    let program = Programs::get().folder.path().join("launcher");
    SandboxLauncher { program, args: Vec::new(), account: account() }
}

/// The copy of this test program.
pub fn test_program() -> PathBuf {
    Programs::get().folder.path().join("test")
}

/// Arguments with which the test program makes the attempt of [`ATTEMPT`].
pub fn attempt_args() -> [OsString; 3] {
    ["attempts::attempt", "--exact", "--nocapture"].map(OsString::from)
}

/// The levels that this machine offers. Reports those that it does not.
pub fn levels(test: &str) -> Vec<SandboxLevel> {
    let works = |level: &SandboxLevel| {
        let fixture = Fixture::new(*level);
        match fixture.try_run(&fixture.shell("true")) {
            Ok(_) => true,
            Err(error @ LaunchError::NoSandbox { .. }) => {
                cfq_test_skip::skip(&format!("{test}/{level}"), &error.to_string());
                false
            }
            Err(error) => panic!("{level}: {error:?}"),
        }
    };
    SandboxLevel::ALL.into_iter().filter(works).collect()
}

/// Folders of one test, and a level.
pub struct Fixture {
    pub level: SandboxLevel,
    folder: TempDir,
}

impl Fixture {
    pub fn new(level: SandboxLevel) -> Self {
        let fixture = Self { level, folder: public_folder() };
        for path in [fixture.work(), fixture.scratch(), fixture.outside()] {
            fs::create_dir(&path).unwrap();
            give(&path);
        }
        fixture
    }

    /// The writable folder.
    pub fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    pub fn scratch(&self) -> PathBuf {
        self.folder.path().join("scratch")
    }

    /// A folder of the same account that the command does not name.
    pub fn outside(&self) -> PathBuf {
        self.folder.path().join("outside")
    }

    /// Creates a file of the account.
    pub fn file(&self, path: &Path, content: &str) -> PathBuf {
        fs::write(path, content).unwrap();
        give(path);
        path.to_owned()
    }

    /// A command that runs a shell script in the work folder.
    pub fn shell(&self, script: &str) -> SandboxedCommand {
        self.command("/bin/sh", ["-c", script])
    }

    pub fn command<A: Into<OsString>>(&self, program: &str, args: impl IntoIterator<Item = A>) -> SandboxedCommand {
        SandboxedCommand {
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            work_dir: self.work(),
            readable: Vec::new(),
            writable: vec![self.work()],
            mounts: Vec::new(),
            scratch_dir: self.scratch(),
            listener_port: None,
            limits: CommandLimits { wall: Duration::from_secs(120), tasks: 128, ..CommandLimits::default() },
        }
    }

    /// A command that runs one of the attempts.
    pub fn attempt(&self, attempt: &str) -> SandboxedCommand {
        let program = test_program();
        let mut command = self.command(program.to_str().unwrap(), attempt_args());
        command.readable.push(program);
        command.env.push((ATTEMPT.into(), attempt.into()));
        command
    }

    pub fn try_run(&self, command: &SandboxedCommand) -> Result<CommandOutcome, LaunchError> {
        launcher().run(self.level, command, &AtomicBool::new(false))
    }

    pub fn run(&self, command: &SandboxedCommand) -> CommandOutcome {
        self.try_run(command).unwrap_or_else(|error| panic!("{}: {error:?}", self.level))
    }

    /// Runs a shell script that must succeed. Returns its stdout.
    pub fn output(&self, script: &str) -> String {
        let outcome = self.run(&self.shell(script));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(outcome.end, CommandEnd::Exited(0), "{}: {script}: {}", self.level, text(&outcome.stderr.bytes));
        text(&outcome.stdout.bytes)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        remove_folder(self.folder.path()).unwrap();
    }
}

/// Ids of the processes whose command line contains `marker`, except zombies.
pub fn processes_with(marker: &str) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has_marker = |id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(marker)
    };
    ids.filter(|id| *id != std::process::id()).filter(has_marker).collect()
}

/// Waits until no process has `marker` in its command line.
pub fn wait_until_gone(marker: &str) {
    let start = std::time::Instant::now();
    loop {
        let left = processes_with(marker);
        if left.is_empty() {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "still running: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
