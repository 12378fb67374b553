//! Start of the program: its folders, environment and limits.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use landlock::RulesetCreated;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit, setsid};
use seccompiler::{BpfProgram, apply_filter};

use crate::protocol::{FailedStep, LaunchReply};
use crate::{CommandLimits, SandboxedCommand};

/// `PATH` of a program whose command has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/run/current-system/sw/bin";
/// Niceness of programs, so that they do not slow down the rest of the machine.
const NICENESS: i32 = 10;
/// Value of `/proc/self/oom_score_adj` with which the kernel ends a process first if the machine's memory is exhausted.
const MAX_OOM_SCORE_ADJ: &str = "1000";
/// Processor time between the signal that ends a process by default and SIGKILL.
const CPU_GRACE: Duration = Duration::from_secs(5);

/// Folders for temporary files.
pub(super) struct Folders {
    /// The scratch folder, without symbolic links.
    pub(super) scratch: PathBuf,
    /// Folder for temporary files, in the scratch folder.
    pub(super) tmp: PathBuf,
    /// Value of `TMPDIR`.
    tmp_inside: PathBuf,
    home: PathBuf,
}

impl Folders {
    /// Creates the folders. `has_own_tmp` if the program sees the temporary folder as `/tmp`.
    pub(super) fn create(command: &SandboxedCommand, has_own_tmp: bool) -> Result<Self, FailedStep> {
        let create = || -> io::Result<Self> {
            let scratch = fs::canonicalize(&command.scratch_dir)?;
            let (tmp, home) = (scratch.join("tmp"), scratch.join("home"));
            for folder in [&tmp, &home] {
                match fs::create_dir(folder) {
                    // An earlier program with the same scratch folder could have replaced it by a link.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists && folder.symlink_metadata()?.is_dir() => {}
                    created => created?,
                }
            }
            let tmp_inside = if has_own_tmp { PathBuf::from("/tmp") } else { tmp.clone() };
            Ok(Self { scratch, tmp, tmp_inside, home })
        };
        create().map_err(|error| FailedStep::new(format!("create folders in {}", command.scratch_dir.display()), error))
    }
}

impl Folders {
    /// Creates the folders in which the changes of a mount are stored: `upper` and `work`, as overlayfs needs them.
    pub(super) fn create_changes(&self, index: usize) -> Result<PathBuf, FailedStep> {
        // An earlier program with the same scratch folder could have created a link: the folder must not exist.
        let folder = self.scratch.join(format!("changes-{index}"));
        let all = [folder.clone(), folder.join("upper"), folder.join("work")];
        let created = all.iter().try_for_each(fs::create_dir);
        let step = |error| FailedStep::new(format!("create folders in {}", self.scratch.display()), error);
        created.map(|()| folder).map_err(step)
    }
}

/// What a process forbids itself before it executes the program.
pub(super) struct Restrictions {
    pub(super) filters: Vec<BpfProgram>,
    /// Rules of Landlock.
    pub(super) files: Option<RulesetCreated>,
    /// Number of the user's other processes and threads, if the kernel counts them too.
    pub(super) other_tasks: u64,
    /// True if the end of the launcher does not end the program anyway.
    pub(super) ends_with_launcher: bool,
}

impl Restrictions {
    /// Applies the restrictions to this process, which executes nothing.
    pub(super) fn probe(mut self) -> Result<LaunchReply, FailedStep> {
        self.limit_files().map_err(|error| FailedStep::new("use Landlock", error))?;
        self.limit_system_calls().map_err(|error| FailedStep::new("use seccomp", error))?;
        Ok(LaunchReply::Works)
    }

    fn limit_files(&mut self) -> io::Result<()> {
        self.files.take().map_or(Ok(()), |files| files.restrict_self().map(drop).map_err(io::Error::other))
    }

    fn limit_system_calls(&self) -> io::Result<()> {
        self.filters.iter().try_for_each(|filter| apply_filter(filter).map_err(io::Error::other))
    }

    /// Applies everything to this process, which executes the program next.
    fn apply(&mut self, limits: &CommandLimits) -> io::Result<()> {
        if self.ends_with_launcher {
            set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        // Before the program may open only its own files.
        if self.files.is_some() {
            end_first();
        }
        // Its signals do not reach the launcher, and it has no terminal.
        setsid()?;
        // A user whose processes must not be nicer is no reason to fail.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        let seconds = |time: Duration| time.as_secs().max(1);
        for (resource, current, maximum) in [
            (Resource::Core, 0, 0),
            (Resource::Cpu, seconds(limits.cpu), seconds(limits.cpu + CPU_GRACE)),
            (Resource::Data, limits.memory_bytes, limits.memory_bytes),
            (Resource::Fsize, limits.file_bytes, limits.file_bytes),
            (Resource::Nice, 0, 0),
            (Resource::Rtprio, 0, 0),
            (Resource::Nofile, limits.open_files, limits.open_files),
            (Resource::Nproc, self.other_tasks + limits.tasks, self.other_tasks + limits.tasks),
        ] {
            limit(resource, current, maximum)?;
        }
        self.limit_files()?;
        self.limit_system_calls()
    }
}

/// Sets a resource limit, or keeps a lower one.
fn limit(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let lower = |value: u64| getrlimit(resource).maximum.map_or(value, |kept| kept.min(value));
    let (current, maximum) = (lower(current), lower(maximum));
    Ok(setrlimit(resource, Rlimit { current: Some(current), maximum: Some(maximum) })?)
}

/// Lets the kernel end this process, and those that it starts, before others if the machine's memory is exhausted.
pub(super) fn end_first() {
    // Without it, the kernel may end another process first, which is no reason to fail.
    let _ = fs::write("/proc/self/oom_score_adj", MAX_OOM_SCORE_ADJ);
}

/// Prepares the start of the program of `command`.
pub(super) fn prepare(command: &SandboxedCommand, folders: &Folders, mut restrictions: Restrictions) -> Command {
    let mut program = Command::new(&command.program);
    program.args(&command.args).env_clear().envs(environment(command, folders)).current_dir(&command.work_dir);
    program.stdin(Stdio::null());
    let limits = command.limits.clone();
    // SAFETY: the launcher has one thread when it starts the program, so the closure may also allocate memory.
    #[allow(unsafe_code)]
    unsafe {
        program.pre_exec(move || restrictions.apply(&limits));
    }
    program
}

/// Home folder of the program.
pub(super) fn home(command: &SandboxedCommand, folders: &Folders) -> OsString {
    let mut variables = environment(command, folders).into_iter().rev();
    variables.find(|(name, _)| name == "HOME").map(|(_, home)| home).unwrap_or_default()
}

fn environment(command: &SandboxedCommand, folders: &Folders) -> Vec<(OsString, OsString)> {
    let default = |name: &str, value: &Path| (OsString::from(name), value.as_os_str().to_owned());
    let mut environment = vec![
        default("HOME", &folders.home),
        default("TMPDIR", &folders.tmp_inside),
        default("PATH", Path::new(DEFAULT_PATH)),
        default("LANG", Path::new("C.UTF-8")),
    ];
    // The last value of a name counts.
    environment.extend(command.env.iter().cloned());
    environment
}
