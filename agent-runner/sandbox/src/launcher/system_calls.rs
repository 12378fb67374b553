//! System calls that a program may not make (seccomp).
//!
//! The list names what reaches beyond the sandbox or has often let programs out of one. A list of forbidden calls misses
//! calls that are newer than the list, and on x86-64 the same calls under the numbers of the x32 interface, so a second
//! filter rejects all numbers above the newest known one.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use crate::SandboxLevel;
use crate::protocol::FailedStep;

/// The newest known system call, `mseal`. Numbers from 424 on are the same on all architectures.
const NEWEST_CALL: u32 = 462;
/// Its flags are behind a pointer, which a filter cannot read. The C library uses `clone` if this call does not exist.
const CLONE3: u32 = 435;

/// Operations of a filter: load a word of the call, compare, return.
const LOAD: u16 = 0x20;
const JUMP_IF_GREATER: u16 = 0x25;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const RETURN_ALLOW: u32 = 0x7fff_0000;
const RETURN_ERRNO: u32 = 0x0005_0000;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The filters for `level`, in the order in which they are applied.
pub(super) fn filters(level: SandboxLevel) -> Result<Vec<BpfProgram>, FailedStep> {
    let forbidden = forbidden(level).map_err(|error| FailedStep::new("use seccomp", io::Error::other(error)))?;
    let unsupported = unsupported().map_err(|error| FailedStep::new("use seccomp", io::Error::other(error)))?;
    Ok(vec![missing_calls(), forbidden, unsupported])
}

/// A filter with which the C library writes a file instead of reserving its space at once, so that the supervisor can
/// stop the program.
fn unsupported() -> Result<BpfProgram, BackendError> {
    let rules: Rules = [(libc::SYS_fallocate, Vec::new())].into_iter().collect();
    let missing = SeccompAction::Errno(libc::EOPNOTSUPP.cast_unsigned());
    SeccompFilter::new(rules, SeccompAction::Allow, missing, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// A filter with which calls that are newer than this list, and `clone3`, seem not to exist.
fn missing_calls() -> BpfProgram {
    let missing = RETURN_ERRNO | libc::ENOSYS.cast_unsigned();
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        step(LOAD, 0, 0, 0),
        step(JUMP_IF_GREATER, 2, 0, NEWEST_CALL),
        step(JUMP_IF_EQUAL, 1, 0, CLONE3),
        step(RETURN, 0, 0, RETURN_ALLOW),
        step(RETURN, 0, 0, missing),
    ]
}

/// A filter with which forbidden calls fail with EPERM. A process of another architecture is killed.
fn forbidden(level: SandboxLevel) -> Result<BpfProgram, BackendError> {
    let mut rules: Rules = FORBIDDEN.iter().map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(FORBIDDEN_ON_X86.map(|call| (call, Vec::new())));
    rules.insert(libc::SYS_clone, new_namespace_flags()?);
    rules.insert(libc::SYS_ioctl, forbidden_requests()?);
    let device = |argument| {
        let kinds = [libc::S_IFCHR, libc::S_IFBLK];
        kinds.map(|kind| rule(vec![masked(argument, libc::S_IFMT, kind)?])).into_iter().collect::<Result<Vec<_>, _>>()
    };
    rules.insert(libc::SYS_mknodat, device(2)?);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_mknod, device(1)?);
    match level {
        SandboxLevel::Namespaces => {
            rules.insert(libc::SYS_socket, forbidden_sockets()?);
            rules.insert(libc::SYS_socketpair, vec![rule(vec![is_not(0, libc::AF_UNIX)?])?]);
        }
        SandboxLevel::Landlock => add_rules_of_landlock(&mut rules)?,
    }
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    SeccompFilter::new(rules, SeccompAction::Allow, denied, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// A process in a new user namespace has all capabilities there, and with them a large part of the kernel.
fn new_namespace_flags() -> Result<Vec<SeccompRule>, BackendError> {
    let flags = [
        libc::CLONE_NEWNS,
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
    ];
    let flags = flags.map(|flag| rule(vec![masked(0, flag.cast_unsigned(), flag.cast_unsigned())?]));
    flags.into_iter().collect()
}

/// Requests of ioctl(2) that no filter of paths or sizes sees.
fn forbidden_requests() -> Result<Vec<SeccompRule>, BackendError> {
    /// Bits of a request that name its kind.
    const KIND: u32 = 0xff00;
    const BTRFS: u32 = 0x9400;
    /// `f`: attributes of files, and requests of ext4, of which one exchanges the content of files and leaves their
    /// times as they are.
    const EXT4: u32 = 0x6600;
    /// `X`: attributes of files, and requests of XFS, of which one exchanges the content of files.
    const XFS: u32 = 0x5800;
    /// `FICLONE`, `FICLONERANGE` and `FIDEDUPERANGE` have the kind of btrfs: they copy between two open files.
    const COPIES: [u64; 3] = [0x4004_9409, 0x4020_940d, 0xc018_9436];
    /// `FS_IOC_GETFLAGS` in both sizes, and `FS_IOC_FIEMAP`, which only read.
    const READ_FLAGS: [u64; 3] = [0x8008_6601, 0x8004_6601, 0xc020_660b];
    /// `FS_IOC_FSGETXATTR`, which only reads.
    const READ_ATTRIBUTES: [u64; 1] = [0x801c_581f];
    let requests = [libc::TIOCSTI, TIOCLINUX];
    let mut rules = requests.into_iter().map(|request| rule(vec![is(1, request)?])).collect::<Result<Vec<_>, _>>()?;
    // Subvolumes and snapshots of btrfs appear outside of the permitted folders, or cannot be removed.
    let kinds: [(u32, &[u64]); 3] = [(BTRFS, &COPIES), (EXT4, &READ_FLAGS), (XFS, &READ_ATTRIBUTES)];
    for (kind, permitted) in kinds {
        let mut forbidden = vec![masked(1, KIND, kind)?];
        for request in permitted {
            forbidden.push(SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, *request)?);
        }
        rules.push(rule(forbidden)?);
    }
    Ok(rules)
}

/// Sockets other than those of Unix, TCP and UDP, and of netlink for the list of interfaces.
fn forbidden_sockets() -> Result<Vec<SeccompRule>, BackendError> {
    /// Types other than streams and datagrams: raw, reliable datagrams, sequenced packets, DCCP and whole packets.
    const OTHER_TYPES: [u32; 5] = [3, 4, 5, 6, 10];
    let mut rules = vec![
        rule(vec![
            is_not(0, libc::AF_UNIX)?,
            is_not(0, libc::AF_INET)?,
            is_not(0, libc::AF_INET6)?,
            is_not(0, libc::AF_NETLINK)?,
        ])?,
        rule(vec![is(0, family(libc::AF_NETLINK))?, is_not(2, libc::NETLINK_ROUTE)?])?,
    ];
    for kind in OTHER_TYPES {
        rules.push(rule(vec![is_not(0, libc::AF_UNIX)?, is_not(0, libc::AF_NETLINK)?, masked(1, SOCKET_TYPE, kind)?])?);
    }
    for internet in [libc::AF_INET, libc::AF_INET6] {
        let other_protocols =
            vec![is(0, family(internet))?, is_not(2, 0)?, is_not(2, libc::IPPROTO_TCP)?, is_not(2, libc::IPPROTO_UDP)?];
        rules.push(rule(other_protocols)?);
    }
    Ok(rules)
}

/// Bits of the second argument of socket(2) that name the type.
const SOCKET_TYPE: u32 = 0xf;

fn family(number: libc::c_int) -> u64 {
    u64::from(number.cast_unsigned())
}

/// What namespaces prevent otherwise.
fn add_rules_of_landlock(rules: &mut Rules) -> Result<(), BackendError> {
    rules.extend(FORBIDDEN_WITH_LANDLOCK.iter().map(|call| (*call, Vec::new())));
    #[cfg(target_arch = "x86_64")]
    rules.extend(FORBIDDEN_WITH_LANDLOCK_ON_X86.map(|call| (call, Vec::new())));
    // A socket for datagrams, also one of a pair, can send to every Unix socket of the machine.
    let (datagram, raw) = (libc::SOCK_DGRAM.cast_unsigned(), libc::SOCK_RAW.cast_unsigned());
    rules.insert(
        libc::SYS_socketpair,
        vec![
            rule(vec![is_not(0, libc::AF_UNIX)?])?,
            rule(vec![masked(1, SOCKET_TYPE, datagram)?])?,
            rule(vec![masked(1, SOCKET_TYPE, raw)?])?,
        ],
    );
    // Limits, priority and processors of the user's other processes. Zero names the calling one.
    for (call, argument) in [
        (libc::SYS_prlimit64, 0),
        (libc::SYS_sched_setaffinity, 0),
        (libc::SYS_sched_setattr, 0),
        (libc::SYS_sched_setparam, 0),
        (libc::SYS_sched_setscheduler, 0),
        (libc::SYS_setpriority, 1),
        (libc::SYS_ioprio_set, 1),
    ] {
        rules.insert(call, vec![rule(vec![is_not(argument, 0)?])?]);
    }
    // All processes of the user.
    for (call, user) in [(libc::SYS_setpriority, u64::from(libc::PRIO_USER)), (libc::SYS_ioprio_set, IOPRIO_WHO_USER)] {
        rules.entry(call).or_default().push(rule(vec![is(0, user)?])?);
    }
    Ok(())
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions)
}

fn is(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn is_not(argument: u8, value: i32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u64::from(value.cast_unsigned()))
}

/// The bits of `mask` in the argument have the value.
fn masked(argument: u8, mask: u32, value: u32) -> Result<SeccompCondition, BackendError> {
    let operator = SeccompCmpOp::MaskedEq(u64::from(mask));
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, u64::from(value))
}

/// All processes of a user, for ioprio_set(2); not in the libc crate.
const IOPRIO_WHO_USER: u64 = 3;
/// Request of a virtual console, one of which pastes text; not in the libc crate.
const TIOCLINUX: u64 = 0x541c;

/// Calls that no program in a sandbox makes.
const FORBIDDEN: [libc::c_long; 58] = [
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    // Calls that do the work of others, unseen by filters.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Keys of the user.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Memory that no limit counts.
    libc::SYS_memfd_create,
    libc::SYS_memfd_secret,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_msgget,
    // File systems and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_fanotify_init,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    // The kernel.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    // The clock and the host.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_personality,
];

/// More of them, which exist on x86-64 only.
#[cfg(target_arch = "x86_64")]
const FORBIDDEN_ON_X86: [libc::c_long; 5] =
    [libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_kexec_file_load, libc::SYS__sysctl];

/// Calls that Landlock does not limit to the permitted folders or to the program's own processes.
const FORBIDDEN_WITH_LANDLOCK: [libc::c_long; 27] = [
    // Unix sockets of the user's services, which run programs for those who ask.
    libc::SYS_socket,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // System V objects of the user's other processes, whose numbers can be guessed.
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    // Modes, owners, times and attributes of files, also of those that may only be read.
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    SYS_FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_utimensat,
    // Notices about files that other programs use.
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_name_to_handle_at,
];

const SYS_FCHMODAT2: libc::c_long = 452;

/// Older forms of them, which exist on x86-64 only.
#[cfg(target_arch = "x86_64")]
const FORBIDDEN_WITH_LANDLOCK_ON_X86: [libc::c_long; 7] = [
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_inotify_init,
];
