//! Limits of the process that opens a repository, which it sets itself before libgit2 opens anything of the user: memory,
//! no core dumps, no processes. On Linux also:
//! - The process ends with the runner.
//! - Landlock: it reads only the repository with its alternates and git's configuration, and writes only the mirror, or
//!   for a delivery the objects, refs and logs of the repository. It opens no TCP port.
//! - seccomp: it can start no program, process or thread and open no socket, among other things.
//!
//! An old kernel, or a container, may not offer all of the Linux limits. The process works without them, and the runner
//! logs which are missing.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::messages::Request;
use crate::workstream::error::GitError;
use crate::workstream::mirror::Mirror;
use crate::workstream::source::{SourcePaths, find_source_paths, git_settings_files, source_paths, user_ignore_files};

/// Maximum memory of the process, in bytes: enough for the object ids of the largest public repositories.
const MAX_MEMORY_BYTES: u64 = 8 << 30;
/// Files of the system that libgit2 and the C library read.
const SYSTEM_FILES: [&str; 3] = ["/etc/localtime", "/dev/urandom", "/dev/null"];

/// What the process may open.
#[derive(Debug, Default)]
struct AllowedPaths {
    /// Files, and folders with everything below them, that may be read.
    read: Vec<PathBuf>,
    /// Folders below which only names may be listed.
    list: Vec<PathBuf>,
    /// Folders below which everything may be changed.
    write: Vec<PathBuf>,
    /// Folders below which folders may be created.
    create_folders: Vec<PathBuf>,
}

/// Sets the limits that need no request. Must be called before any thread is started.
///
/// # Errors
/// If a limit is refused.
pub(super) fn limit_resources() -> io::Result<()> {
    limit(Resource::Data, MAX_MEMORY_BYTES)?;
    limit(Resource::Core, 0)?;
    // A process of a dead runner must not create a branch, or hold its lock, while another runner delivers.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    Ok(())
}

/// Restricts the files that this thread, and threads that it starts, may open. Returns false if the kernel does not
/// offer this.
///
/// # Errors
/// A [`GitError`] if the paths of the request cannot be found; then nothing is restricted.
pub(super) fn restrict_files(request: &Request) -> Result<bool, GitError> {
    let paths = allowed_paths(request)?;
    #[cfg(target_os = "linux")]
    let is_restricted = linux::restrict_files(&paths);
    #[cfg(not(target_os = "linux"))]
    let is_restricted = {
        drop(paths);
        false
    };
    Ok(is_restricted)
}

/// Forbids this process to start threads, processes and programs, and system calls that it does not need. Returns false
/// if the kernel does not offer this.
///
/// # Errors
/// If a resource limit is refused.
pub(super) fn forbid_system_calls() -> io::Result<bool> {
    limit(Resource::Nproc, 0)?;
    #[cfg(target_os = "linux")]
    let is_restricted = linux::forbid_system_calls().is_some();
    #[cfg(not(target_os = "linux"))]
    let is_restricted = false;
    Ok(is_restricted)
}

/// Sets a resource limit, or keeps a lower one.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

fn allowed_paths(request: &Request) -> Result<AllowedPaths, GitError> {
    let mut allowed = AllowedPaths::default();
    allowed.read.extend(SYSTEM_FILES.map(PathBuf::from));
    allowed.read.extend(git_settings_files());
    let source = match request {
        Request::Head { repository } | Request::Copy { repository, .. } => source_paths(repository)?,
        Request::Deliver { request, .. } => source_paths(&request.repository)?,
        Request::StartPoint(request) => find_source_paths(&request.dir)?,
        Request::ReviewRange(request) => find_source_paths(&request.start.dir)?,
        Request::RepoMap(request) => find_source_paths(&request.start.dir)?,
        Request::Folder(request) => find_source_paths(&request.start.dir)?,
        Request::Uncommitted(request) => find_source_paths(&request.dir)?,
    };
    let SourcePaths { top, common_dir, read, .. } = source;
    allowed.list.push(top.clone());
    allowed.read.extend(read);
    match request {
        Request::Copy { repository, data_dir, .. } => {
            allowed.write.push(Mirror::open(data_dir, repository)?.path().to_owned());
            allowed.list.push(data_dir.clone());
        }
        Request::Deliver { .. } => {
            // A rule applies to an existing folder. A folder that cannot be created is reported by the delivery.
            drop(std::fs::create_dir(common_dir.join("logs")));
            // A link could lead out of the repository.
            let folders = ["objects", "refs", "logs"].map(|name| common_dir.join(name));
            allowed.write.extend(folders.into_iter().filter(|folder| is_real_folder(folder)));
            allowed.create_folders.push(common_dir);
        }
        Request::RepoMap(request) => allowed.write.push(request.create_cache_folder(&common_dir)?),
        // The files of the working tree are compared.
        Request::Uncommitted(_) => {
            allowed.read.push(top);
            allowed.read.extend(user_ignore_files());
        }
        Request::Head { .. } | Request::StartPoint(_) | Request::ReviewRange(_) | Request::Folder(_) => {}
    }
    Ok(allowed)
}

fn is_real_folder(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::BTreeMap;

    use landlock::{
        ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
        RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    };
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
        apply_filter_all_threads,
    };

    use super::AllowedPaths;

    /// Version of Landlock up to which its restrictions are used.
    const LANDLOCK: ABI = ABI::V6;

    pub(super) fn restrict_files(paths: &AllowedPaths) -> bool {
        try_restrict_files(paths).is_ok_and(|status| status != RulesetStatus::NotEnforced)
    }

    fn try_restrict_files(paths: &AllowedPaths) -> Result<RulesetStatus, RulesetError> {
        let mut rules = Ruleset::default()
            // The first version of Landlock forbids to move a file to another folder, as libgit2 does with objects.
            .set_compatibility(CompatLevel::SoftRequirement)
            .handle_access(AccessFs::Refer)?
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(LANDLOCK))?
            .handle_access(AccessNet::from_all(LANDLOCK))?
            .scope(Scope::from_all(LANDLOCK))?
            .create()?;
        let all: BitFlags<AccessFs> = AccessFs::from_all(LANDLOCK);
        let rights = [
            (&paths.read, AccessFs::ReadFile | AccessFs::ReadDir),
            (&paths.list, AccessFs::ReadDir.into()),
            (&paths.write, all & !(AccessFs::Execute | AccessFs::MakeSym | AccessFs::MakeFifo | AccessFs::MakeSock)),
            (&paths.create_folders, AccessFs::MakeDir.into()),
        ];
        for (paths, access) in rights {
            for path in paths {
                // A path that cannot be opened here cannot be opened later either.
                let Ok(metadata) = std::fs::metadata(path) else { continue };
                let Ok(opened) = PathFd::new(path) else { continue };
                let access = if metadata.is_dir() { access } else { access & AccessFs::ReadFile };
                if !access.is_empty() {
                    rules = rules.add_rule(PathBeneath::new(opened, access))?;
                }
            }
        }
        Ok(rules.restrict_self()?.ruleset)
    }

    pub(super) fn forbid_system_calls() -> Option<()> {
        apply_filter_all_threads(&filter()?).ok()
    }

    /// The filter; `None` if it does not exist for this processor.
    fn filter() -> Option<BpfProgram> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            FORBIDDEN_CALLS.iter().map(|call| (*call, Vec::new())).collect();
        #[cfg(target_arch = "x86_64")]
        rules.extend(FORBIDDEN_OLD_CALLS.map(|call| (call, Vec::new())));
        // A process ends itself with this call when memory is exhausted.
        let own = u64::from(std::process::id());
        rules.insert(libc::SYS_tgkill, vec![first_argument_is_not(own)?]);
        // The owner of a descriptor gets signals.
        let owner_or_signal = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX].map(|command| second_argument_is(command as u64));
        rules.insert(libc::SYS_fcntl, owner_or_signal.into_iter().collect::<Option<_>>()?);
        // The limits of other processes.
        rules.insert(libc::SYS_prlimit64, vec![first_argument_is_not(0)?]);
        let denied = SeccompAction::Errno(libc::EPERM as u32);
        let architecture = std::env::consts::ARCH.try_into().ok()?;
        SeccompFilter::new(rules, SeccompAction::Allow, denied, architecture).ok()?.try_into().ok()
    }

    fn second_argument_is(value: u64) -> Option<SeccompRule> {
        let condition = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).ok()?;
        SeccompRule::new(vec![condition]).ok()
    }

    fn first_argument_is_not(value: u64) -> Option<SeccompRule> {
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value).ok()?;
        SeccompRule::new(vec![condition]).ok()
    }

    /// Commands of fcntl(2) that are not in the libc crate for every system.
    const F_SETSIG: libc::c_int = 10;
    const F_SETOWN_EX: libc::c_int = 15;

    /// Calls that start programs, processes or threads, reach other processes, the terminal or the network, change owners
    /// or modes of files, or change the system.
    const FORBIDDEN_CALLS: [libc::c_long; 56] = [
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
        libc::SYS_memfd_create,
        libc::SYS_shmget,
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
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_setpriority,
        libc::SYS_sched_setscheduler,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setattr,
        libc::SYS_sched_setaffinity,
        libc::SYS_process_madvise,
        libc::SYS_kcmp,
        libc::SYS_open_tree,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fchmod,
        libc::SYS_fchmodat,
        libc::SYS_fchown,
        libc::SYS_fchownat,
        libc::SYS_setxattr,
        libc::SYS_lsetxattr,
        libc::SYS_fsetxattr,
        libc::SYS_removexattr,
        libc::SYS_lremovexattr,
        libc::SYS_fremovexattr,
        libc::SYS_mknodat,
        // A terminal accepts input through this call.
        libc::SYS_ioctl,
    ];

    /// Older forms of forbidden calls, which exist on x86-64 only.
    #[cfg(target_arch = "x86_64")]
    const FORBIDDEN_OLD_CALLS: [libc::c_long; 6] =
        [libc::SYS_fork, libc::SYS_vfork, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_mknod];
}
