//! Limits of a child process, which it sets itself before it reads anything from the model's file.
//!
//! On every system: address space, number of open files, no files written, no core dumps. On Linux also:
//! - The child ends with the node, and before other processes if the machine's memory is exhausted.
//! - As root, it continues as the account `nobody`, with the capability to read files.
//! - Landlock: it may open only the model's files, for reading, and no TCP port.
//! - seccomp: it can start no program, process or thread and open no socket, among other things.
//!
//! An old kernel, or a container, may not offer all of the Linux limits. The child works without them; it reports which
//! it has.

use std::io;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Maximum number of open files.
const MAX_OPEN_FILES: u64 = 32;

/// Sets all limits that permit another thread. Must be called before any file is opened or thread is started. Returns
/// the names of the Linux limits that apply.
///
/// # Errors
/// If a resource limit is refused.
pub(super) fn restrict(path: &Path, memory_bytes: u64) -> io::Result<Vec<String>> {
    // The program itself does not count: a build for GPUs maps large libraries.
    let program_bytes = mapped_bytes();
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    #[cfg(target_os = "linux")]
    let protection = linux::restrict(path);
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
    let protection = linux::forbid_system_calls();
    #[cfg(not(target_os = "linux"))]
    let protection = Vec::new();
    Ok(protection)
}

/// Sets a resource limit, or keeps a lower one.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::BTreeMap;
    use std::path::Path;

    use landlock::{
        ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr,
        RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    };
    use rustix::process::{Signal, set_parent_process_death_signal};
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
        apply_filter_all_threads,
    };

    /// User and group of the account `nobody`.
    const NOBODY: libc::uid_t = 65534;
    /// Mask of `CAP_DAC_READ_SEARCH`: reads all files and folders.
    const CAP_DAC_READ_SEARCH: u32 = 1 << 2;
    /// Version 3 of the structures of `capset`.
    const CAPABILITY_VERSION: u32 = 0x2008_0522;
    /// Value of `/proc/self/oom_score_adj` with which the kernel ends a process first.
    const FIRST_TO_END: &str = "1000";
    /// Version of Landlock up to which its restrictions are used.
    const LANDLOCK: ABI = ABI::V6;

    pub(super) fn restrict(path: &Path) -> Vec<String> {
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
        // After the change of the account, which resets it.
        if set_parent_process_death_signal(Some(Signal::KILL)).is_ok() {
            applied.push("parent-death signal".to_owned());
        }
        match restrict_files(path) {
            Ok(status) if status.ruleset != RulesetStatus::NotEnforced => applied.push("Landlock".to_owned()),
            Ok(_) | Err(_) => {}
        }
        applied
    }

    /// Changes the account of a process of root; false if the process does not run as root or may not do this.
    fn become_nobody() -> bool {
        #[repr(C)]
        struct Header {
            version: u32,
            pid: i32,
        }
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Capabilities {
            effective: u32,
            permitted: u32,
            inheritable: u32,
        }
        let header = Header { version: CAPABILITY_VERSION, pid: 0 };
        let low = Capabilities { effective: CAP_DAC_READ_SEARCH, permitted: CAP_DAC_READ_SEARCH, inheritable: 0 };
        let none = Capabilities { effective: 0, permitted: 0, inheritable: 0 };
        let capabilities = [low, none];
        // SAFETY: these calls change only this process's credentials. capset reads a header and two structures, which
        // have the layout of the kernel's `__user_cap_header_struct` and `__user_cap_data_struct`.
        #[allow(unsafe_code)]
        unsafe {
            if libc::geteuid() != 0 || libc::prctl(libc::PR_SET_KEEPCAPS, 1) != 0 {
                return false;
            }
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
                && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
                && libc::syscall(libc::SYS_capset, &raw const header, capabilities.as_ptr()) == 0
        }
    }

    /// Permits only to read the file at `path`; or the files of the folder at `path` or of the one that contains the
    /// safetensors file at `path`, also if they are links to files elsewhere.
    fn restrict_files(path: &Path) -> Result<RestrictionStatus, RulesetError> {
        let mut rules = Ruleset::default()
            .handle_access(AccessFs::from_all(LANDLOCK))?
            .handle_access(AccessNet::from_all(LANDLOCK))?
            .scope(Scope::from_all(LANDLOCK))?
            .create()?;
        let folder = match path.is_dir() {
            true => Some(path),
            // A safetensors file or the index of several.
            false if path.extension().is_some_and(|end| end == "safetensors" || end == "json") => path.parent(),
            false => None,
        };
        let read_file: BitFlags<AccessFs> = AccessFs::ReadFile.into();
        let files = folder.into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let files = files.map(|file| file.path()).filter(|file| file.is_file()).chain([path.to_owned()]);
        let files = files.map(|file| (file, read_file));
        // The rule of a folder applies to everything below it, so it permits only to list names.
        let folders = folder.map(|folder| (folder.to_owned(), AccessFs::ReadDir.into()));
        for (path, access) in files.filter(|(file, _)| !file.is_dir()).chain(folders) {
            // A file that cannot be opened here cannot be opened later either.
            if let Ok(path) = PathFd::new(&path) {
                rules = rules.add_rule(PathBeneath::new(path, access))?;
            }
        }
        rules.restrict_self()
    }

    pub(super) fn forbid_system_calls() -> Vec<String> {
        let Some(filter) = filter() else { return Vec::new() };
        match apply_filter_all_threads(&filter) {
            Ok(()) => vec!["seccomp".to_owned()],
            Err(_) => Vec::new(),
        }
    }

    /// The filter; `None` if it does not exist for this processor.
    fn filter() -> Option<BpfProgram> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            FORBIDDEN_CALLS.iter().map(|call| (*call, Vec::new())).collect();
        #[cfg(target_arch = "x86_64")]
        rules
            .extend([libc::SYS_fork, libc::SYS_vfork, libc::SYS_chmod, libc::SYS_chown].map(|call| (call, Vec::new())));
        // A process ends itself with this call when memory is exhausted.
        let own = u64::from(std::process::id());
        let others = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, own).ok()?;
        rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![others]).ok()?]);
        let denied = SeccompAction::Errno(libc::EPERM as u32);
        let architecture = std::env::consts::ARCH.try_into().ok()?;
        SeccompFilter::new(rules, SeccompAction::Allow, denied, architecture).ok()?.try_into().ok()
    }

    /// Calls that start programs, processes or threads, reach other processes or the network, or change files or the
    /// system.
    const FORBIDDEN_CALLS: [libc::c_long; 46] = [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_kill,
        libc::SYS_tkill,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_pidfd_send_signal,
        libc::SYS_socket,
        libc::SYS_socketpair,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_memfd_create,
        libc::SYS_shmget,
        libc::SYS_fchmod,
        libc::SYS_fchmodat,
        libc::SYS_fchown,
        libc::SYS_fchownat,
        libc::SYS_setxattr,
        libc::SYS_fsetxattr,
        libc::SYS_utimensat,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_chroot,
        libc::SYS_pivot_root,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_kexec_load,
    ];
}
