//! The system calls that a child process may make (seccomp). Every other call fails with EPERM.
//!
//! A list of forbidden calls would miss new calls, and on x86-64 the same calls under the numbers of the x32 interface.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

/// Applies the filter to all threads of this process. Returns the name of the limit if it applies.
pub(super) fn forbid() -> Vec<String> {
    match filter() {
        Ok(filter) if apply_filter_all_threads(&filter).is_ok() => vec!["seccomp".to_owned()],
        // The filter exists only for some processors.
        Ok(_) | Err(_) => Vec::new(),
    }
}

fn filter() -> Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED_CALLS.iter().map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(ALLOWED_OLD_CALLS.map(|call| (call, Vec::new())));
    let own = u64::from(std::process::id());
    let is = |argument: u8, length: SeccompCmpArgLen, value: u64| {
        SeccompCondition::new(argument, length, SeccompCmpOp::Eq, value)
    };
    let process = |id: u64| is(0, SeccompCmpArgLen::Dword, id);
    // A process ends itself with this call when memory is exhausted.
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![process(own)?])?]);
    // The process opens files to read them only.
    let writes = u64::from((libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC).cast_unsigned());
    let reads = |argument| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(writes), 0);
        condition.and_then(|condition| SeccompRule::new(vec![condition]))
    };
    rules.insert(libc::SYS_openat, vec![reads(2)?]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, vec![reads(1)?]);
    // Descriptors send signals to the owner that these commands name.
    let is_not = |command: libc::c_int| {
        let command = u64::from(command.cast_unsigned());
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, command)
    };
    let commands = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX].map(is_not).into_iter().collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(commands)?]);
    // The C library reads its own limits. The third argument is the pointer to new limits.
    let reads_limit = |id| SeccompRule::new(vec![process(id)?, is(2, SeccompCmpArgLen::Qword, 0)?]);
    rules.insert(libc::SYS_prlimit64, vec![reads_limit(0)?, reads_limit(own)?]);
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, denied, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// Commands of fcntl(2) that the libc crate does not have for every system.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;

/// Calls that read files, use the connection to the node, manage this process's memory and threads that already exist,
/// and read clocks.
const ALLOWED_CALLS: [libc::c_long; 50] = [
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_fadvise64,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Older forms of allowed calls, which exist on x86-64 only.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLD_CALLS: [libc::c_long; 6] =
    [libc::SYS_access, libc::SYS_lstat, libc::SYS_poll, libc::SYS_readlink, libc::SYS_stat, libc::SYS_time];

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use crate::sandbox::limits;

    /// Variable with the process id of the helper, in the process that has a child's limits.
    const HELPER: &str = "CFQ_TEST_SANDBOX_HELPER";
    /// User and group of a child of root.
    const NOBODY: u32 = 65534;

    fn call(number: libc::c_long, arguments: [libc::c_long; 4]) -> Result<libc::c_long, i32> {
        let [a, b, c, d] = arguments;
        // SAFETY: the callers pass numbers, null pointers, and pointers that the kernel refuses.
        #[allow(unsafe_code)]
        let result = unsafe { libc::syscall(number, a, b, c, d, -1 as libc::c_long, -1 as libc::c_long) };
        if result == -1 { Err(io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(result) }
    }

    #[test]
    fn calls_that_reach_other_processes_or_the_system_are_refused() {
        if let Ok(helper) = std::env::var(HELPER) {
            return make_calls(helper.parse().unwrap());
        }
        // The helper has the account of the child, because calls to processes of others are refused anyway.
        let mut sleep = Command::new("sleep");
        sleep.arg("300").stdout(Stdio::null());
        if rustix::process::geteuid().is_root() {
            sleep.uid(NOBODY).gid(NOBODY);
        }
        let mut helper = sleep.spawn().unwrap();
        let name = "sandbox::limits::system_calls::tests::calls_that_reach_other_processes_or_the_system_are_refused";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(HELPER, helper.id().to_string());
        let output = child.output().unwrap();
        helper.kill().unwrap();
        helper.wait().unwrap();
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }

    /// Makes the calls with the limits of a child.
    fn make_calls(helper: libc::c_long) {
        let mut protection = limits::restrict(Path::new("/no/such/model.gguf"), 2 << 30).unwrap();
        protection.extend(limits::forbid_system_calls().unwrap());
        if !protection.iter().any(|name| name == "seccomp") {
            let reason = "this kernel or processor has no seccomp";
            return cfq_test_skip::skip("calls_that_reach_other_processes_or_the_system_are_refused", reason);
        }
        let own = libc::c_long::from(std::process::id());
        let thread = call(libc::SYS_gettid, [0; 4]).unwrap();
        let nofile = libc::c_long::from(libc::RLIMIT_NOFILE);
        let refused = Err(libc::EPERM);
        for (name, number, arguments) in [
            ("kill", libc::SYS_kill, [helper, 0, 0, 0]),
            ("tgkill", libc::SYS_tgkill, [helper, helper, 0, 0]),
            ("tkill", libc::SYS_tkill, [helper, 0, 0, 0]),
            ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, [helper, 0, 0, 0]),
            ("pidfd_open", libc::SYS_pidfd_open, [helper, 0, 0, 0]),
            ("ptrace", libc::SYS_ptrace, [libc::c_long::from(libc::PTRACE_SEIZE), helper, 0, 0]),
            ("process_vm_readv", libc::SYS_process_vm_readv, [helper, 0, 0, 0]),
            ("process_vm_writev", libc::SYS_process_vm_writev, [helper, 0, 0, 0]),
            ("prlimit64", libc::SYS_prlimit64, [helper, nofile, 0, 0]),
            ("prlimit64 of itself", libc::SYS_prlimit64, [0, nofile, 1, 0]),
            ("sched_setaffinity", libc::SYS_sched_setaffinity, [helper, 0, 0, 0]),
            ("sched_getscheduler", libc::SYS_sched_getscheduler, [helper, 0, 0, 0]),
            ("setpriority", libc::SYS_setpriority, [0, helper, 19, 0]),
            ("fcntl F_SETOWN", libc::SYS_fcntl, [0, libc::c_long::from(libc::F_SETOWN), helper, 0]),
            ("fcntl F_SETSIG", libc::SYS_fcntl, [0, libc::c_long::from(super::F_SETSIG), 9, 0]),
            ("openat O_TRUNC", libc::SYS_openat, [-1, 0, libc::c_long::from(libc::O_TRUNC), 0]),
            ("openat O_WRONLY", libc::SYS_openat, [-1, 0, libc::c_long::from(libc::O_WRONLY), 0]),
            ("getpgid", libc::SYS_getpgid, [helper, 0, 0, 0]),
        ] {
            assert_eq!(call(number, arguments), refused, "{name}");
        }
        // Without the filter, these arguments are invalid and have other errors, or no effect.
        for (name, number) in [
            ("pidfd_send_signal", libc::SYS_pidfd_send_signal),
            ("pidfd_getfd", libc::SYS_pidfd_getfd),
            ("process_madvise", libc::SYS_process_madvise),
            ("rt_tgsigqueueinfo", libc::SYS_rt_tgsigqueueinfo),
            ("kcmp", libc::SYS_kcmp),
            ("ioprio_set", libc::SYS_ioprio_set),
            ("sched_setattr", libc::SYS_sched_setattr),
            ("setresuid", libc::SYS_setresuid),
            ("capset", libc::SYS_capset),
            ("prctl", libc::SYS_prctl),
            ("ioctl", libc::SYS_ioctl),
            ("execve", libc::SYS_execve),
            ("clone3", libc::SYS_clone3),
            ("socket", libc::SYS_socket),
            ("sendto", libc::SYS_sendto),
            ("connect", libc::SYS_connect),
            ("open_by_handle_at", libc::SYS_open_by_handle_at),
            ("openat2", libc::SYS_openat2),
            ("linkat", libc::SYS_linkat),
            ("symlinkat", libc::SYS_symlinkat),
            ("renameat2", libc::SYS_renameat2),
            ("unlinkat", libc::SYS_unlinkat),
            ("mkdirat", libc::SYS_mkdirat),
            ("mknodat", libc::SYS_mknodat),
            ("truncate", libc::SYS_truncate),
            ("fallocate", libc::SYS_fallocate),
            ("fchmodat2", libc::SYS_fchmodat2),
            ("lremovexattr", libc::SYS_lremovexattr),
            ("inotify_add_watch", libc::SYS_inotify_add_watch),
            ("fanotify_init", libc::SYS_fanotify_init),
            ("memfd_create", libc::SYS_memfd_create),
            ("shmat", libc::SYS_shmat),
            ("msgsnd", libc::SYS_msgsnd),
            ("semop", libc::SYS_semop),
            ("mq_open", libc::SYS_mq_open),
            ("io_uring_enter", libc::SYS_io_uring_enter),
            ("userfaultfd", libc::SYS_userfaultfd),
            ("bpf", libc::SYS_bpf),
            ("perf_event_open", libc::SYS_perf_event_open),
            ("mount", libc::SYS_mount),
            ("move_mount", libc::SYS_move_mount),
            ("unshare", libc::SYS_unshare),
            ("setns", libc::SYS_setns),
            ("keyctl", libc::SYS_keyctl),
        ] {
            assert_eq!(call(number, [-1; 4]), refused, "{name}");
        }
        // What the child itself needs is permitted.
        assert_eq!(call(libc::SYS_tgkill, [own, thread, 0, 0]), Ok(0));
        assert_eq!(call(libc::SYS_prlimit64, [0, nofile, 0, 0]), Ok(0));
        assert!(std::fs::File::open("/etc/passwd").is_err() || !protection.iter().any(|name| name == "Landlock"));
    }
}
