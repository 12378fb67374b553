//! Limits of a child process, which it sets itself before it reads anything from the model's file.
//!
//! On every system: address space, number of open files, no files written, no core dumps. On Linux also:
//! - The child ends with the node, and before other processes if the machine's memory is exhausted.
//! - It drops all capabilities, except the one to read all files if the model's files are private and Landlock limits it
//!   to them. If the node itself runs as root, the child continues as the account `nobody`.
//! - Landlock: it may open only the model's files, for reading, and no TCP port.
//! - seccomp: it may make only the system calls that it needs (see `system_calls.rs`).
//!
//! An old kernel, or a container, may not offer all of the Linux limits. The child works without them; it reports which
//! it has.

#[cfg(target_os = "linux")]
mod system_calls;

use std::io;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Maximum number of open files.
const MAX_OPEN_FILES: u64 = 32;

/// Sets all limits that permit another thread. Must be called before any file is opened or thread is started. Returns
/// the names of the Linux limits that apply.
///
/// # Errors
/// If a resource limit, or the change of capabilities, is refused.
pub(super) fn restrict(path: &Path, memory_bytes: u64) -> io::Result<Vec<String>> {
    // The program itself does not count: a build for GPUs maps large libraries.
    let program_bytes = mapped_bytes();
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    #[cfg(target_os = "linux")]
    let protection = linux::restrict(path)?;
    #[cfg(not(target_os = "linux"))]
    let protection = {
        let _ = path;
        Vec::new()
    };
    limit(Resource::Nofile, MAX_OPEN_FILES)?;
    // macOS does not support this limit.
    if cfg!(target_os = "linux") {
        limit(Resource::As, memory_bytes.saturating_add(program_bytes))?;
    }
    Ok(protection)
}

/// Address space that this process uses now, in bytes; zero if the system does not tell it.
fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix("kB"));
    size.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or_default() << 10
}

/// Forbids this process to start threads and processes, and system calls that it does not need. Returns the names of
/// the limits that apply.
///
/// # Errors
/// If a resource limit is refused.
pub(super) fn forbid_system_calls() -> io::Result<Vec<String>> {
    limit(Resource::Nproc, 0)?;
    #[cfg(target_os = "linux")]
    let protection = system_calls::forbid();
    #[cfg(not(target_os = "linux"))]
    let protection = Vec::new();
    Ok(protection)
}

/// Names of the Linux limits that this kernel does not offer, with what they would prevent.
pub(super) fn missing() -> Vec<&'static str> {
    #[cfg(target_os = "linux")]
    return linux::missing();
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}

/// Sets a resource limit, or keeps a lower one.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::io;
    use std::path::{Path, PathBuf};

    use cfq_link::child::{Capabilities, limit_capabilities};
    use landlock::{
        ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr,
        RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    };
    use rustix::process::{Signal, set_parent_process_death_signal};

    /// User and group of the account `nobody`.
    const NOBODY: libc::uid_t = 65534;
    /// Value of `/proc/self/oom_score_adj` with which the kernel ends a process first.
    const FIRST_TO_END: &str = "1000";
    /// Version of Landlock up to which its restrictions are used.
    const LANDLOCK: ABI = ABI::V6;

    pub(super) fn restrict(path: &Path) -> io::Result<Vec<String>> {
        let mut applied = Vec::new();
        // SAFETY: this process has opened no file but stdin, stdout and stderr, so no owner loses its descriptor.
        #[allow(unsafe_code)]
        unsafe {
            libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
        }
        // Without it, the kernel may end another process first.
        let _ = std::fs::write("/proc/self/oom_score_adj", FIRST_TO_END);
        if become_nobody() {
            applied.push("account nobody".to_owned());
        }
        limit_capabilities(Capabilities::DAC_READ_SEARCH, Capabilities::DAC_READ_SEARCH)?;
        // After the change of the account, which resets it.
        if set_parent_process_death_signal(Some(Signal::KILL)).is_ok() {
            applied.push("parent-death signal".to_owned());
        }
        let (folder, files) = model_files(path);
        let landlock = restrict_files(folder, &files).is_ok_and(|status| status.ruleset != RulesetStatus::NotEnforced);
        if landlock {
            applied.push("Landlock".to_owned());
        }
        if drop_capability(&files, landlock)? {
            applied.push("no capabilities".to_owned());
        }
        Ok(applied)
    }

    /// Changes the account of a process of root; false if the process does not run as root or may not do this.
    fn become_nobody() -> bool {
        // SAFETY: these calls change only this process's credentials.
        #[allow(unsafe_code)]
        unsafe {
            libc::geteuid() == 0
                && libc::prctl(libc::PR_SET_KEEPCAPS, 1) == 0
                && libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
                && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
        }
    }

    /// Drops the capability to read all files, unless a model file cannot be opened without it and Landlock permits only
    /// the model's files.
    fn drop_capability(files: &[PathBuf], landlock: bool) -> io::Result<bool> {
        limit_capabilities(Capabilities::DAC_READ_SEARCH, Capabilities::NONE)?;
        let is_private = |file: &PathBuf| File::open(file).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
        let kept = match landlock && files.iter().any(is_private) {
            true => Capabilities::DAC_READ_SEARCH,
            false => Capabilities::NONE,
        };
        limit_capabilities(kept, kept)?;
        Ok(kept.is_empty())
    }

    /// The folder whose names the child may list, and the files that it may open: the file at `path`; or those of the
    /// folder at `path` or of the one that contains the safetensors file at `path`.
    fn model_files(path: &Path) -> (Option<&Path>, Vec<PathBuf>) {
        let folder = match path.is_dir() {
            true => Some(path),
            // A safetensors file or the index of several.
            false if path.extension().is_some_and(|end| end == "safetensors" || end == "json") => path.parent(),
            false => None,
        };
        let entries = folder.into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let files = entries.map(|file| file.path()).chain([path.to_owned()]);
        (folder, files.filter(|file| file.is_file()).collect())
    }

    /// Permits only to read the files, also if they are links to files elsewhere, and to list the folder.
    fn restrict_files(folder: Option<&Path>, files: &[PathBuf]) -> Result<RestrictionStatus, RulesetError> {
        let mut rules = Ruleset::default()
            .handle_access(AccessFs::from_all(LANDLOCK))?
            .handle_access(AccessNet::from_all(LANDLOCK))?
            .scope(Scope::from_all(LANDLOCK))?
            .create()?;
        let read_file: BitFlags<AccessFs> = AccessFs::ReadFile.into();
        let files = files.iter().map(|file| (file.as_path(), read_file));
        // The rule of a folder applies to everything below it, so it permits only to list names.
        let folders = folder.map(|folder| (folder, AccessFs::ReadDir.into()));
        for (path, access) in files.chain(folders) {
            // A file that cannot be opened here cannot be opened later either.
            if let Ok(path) = PathFd::new(path) {
                rules = rules.add_rule(PathBeneath::new(path, access))?;
            }
        }
        rules.restrict_self()
    }

    pub(super) fn missing() -> Vec<&'static str> {
        /// `landlock_create_ruleset` returns the version of Landlock.
        const CREATE_RULESET_VERSION: u32 = 1;
        /// `seccomp` checks whether an action is available.
        const GET_ACTION_AVAIL: u32 = 2;
        let action = libc::SECCOMP_RET_ERRNO;
        // SAFETY: the first call reads no memory; the second one reads one number.
        #[allow(unsafe_code)]
        let (landlock, seccomp) = unsafe {
            (
                libc::syscall(
                    libc::SYS_landlock_create_ruleset,
                    std::ptr::null::<u8>(),
                    0usize,
                    CREATE_RULESET_VERSION,
                ),
                libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0u32, &raw const action),
            )
        };
        let checks = [
            (landlock >= 1, "Landlock (limits it to the model's files)"),
            (seccomp == 0, "seccomp (limits its system calls)"),
        ];
        checks.into_iter().filter(|(available, _)| !available).map(|(_, name)| name).collect()
    }
}
