//! Rights of a process that a supervisor of root starts: account, groups and capabilities; and of one thread of root.
//!
//! A process of root may read and write every file and control every process. Linux divides these rights into
//! capabilities. A process gets only those that it needs, and cannot get others: the bounding set limits what a program
//! gets at its start, and `no_new_privs` lets it gain nothing from setuid programs.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

/// User account that a child runs as. Only a supervisor that runs as root can choose an account other than its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A set of capabilities, as in `/proc/PID/status`. Empty on systems other than Linux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities(u64);

/// The capabilities that cfq uses, with their names.
const NAMES: [(Capabilities, &str); 7] = [
    (Capabilities::CHOWN, "CAP_CHOWN"),
    (Capabilities::DAC_OVERRIDE, "CAP_DAC_OVERRIDE"),
    (Capabilities::DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH"),
    (Capabilities::FOWNER, "CAP_FOWNER"),
    (Capabilities::SETGID, "CAP_SETGID"),
    (Capabilities::SETUID, "CAP_SETUID"),
    (Capabilities::NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE"),
];

impl Capabilities {
    /// No capability.
    pub const NONE: Self = Self(0);
    /// Changes the owner of files.
    pub const CHOWN: Self = Self(1);
    /// Reads and writes all files.
    pub const DAC_OVERRIDE: Self = Self(1 << 1);
    /// Reads all files and folders.
    pub const DAC_READ_SEARCH: Self = Self(1 << 2);
    /// Changes mode and times of all files.
    pub const FOWNER: Self = Self(1 << 3);
    /// Changes the groups of its process.
    pub const SETGID: Self = Self(1 << 6);
    /// Changes the user of its process.
    pub const SETUID: Self = Self(1 << 7);
    /// Listens on ports below 1024.
    pub const NET_BIND_SERVICE: Self = Self(1 << 10);

    /// The capabilities of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The capabilities of this set that `other` lacks.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True for the empty set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The capabilities that the calling thread uses (its effective set).
    #[cfg(target_os = "linux")]
    pub fn of_this_thread() -> Self {
        linux::Sets::of_this_thread().map_or(Self::NONE, |sets| Self(sets.effective))
    }

    /// All of them: root has no limits.
    #[cfg(not(target_os = "linux"))]
    pub fn of_this_thread() -> Self {
        Self(u64::MAX)
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.iter().filter(|(one, _)| one.without(*self).is_empty());
        let names: Vec<&str> = names.map(|(_, name)| *name).collect();
        f.write_str(&names.join(", "))
    }
}

/// Rights of a child of root that are fewer than those of its account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    /// Supplementary groups, if the child runs as another account.
    pub groups: Vec<u32>,
    /// Capabilities that the child keeps, of those that the supervisor has.
    pub capabilities: Capabilities,
}

/// Runs `work` on this thread with the rights of `account` and the capability to read all files, if the process has it.
/// Programs that `work` starts have the same rights. The other threads are not affected.
///
/// # Errors
/// If the thread may not change its account; `work` has not run.
pub fn with_account<T>(account: Account, work: impl FnOnce() -> T) -> io::Result<T> {
    #[cfg(target_os = "linux")]
    let _restored = linux::AccountOfThread::change(account)?;
    #[cfg(not(target_os = "linux"))]
    let _ = account;
    Ok(work())
}

/// Takes from this thread all capabilities except those in `permitted`. It uses only those in `effective`, and programs
/// that it starts get none.
///
/// # Errors
/// If the kernel refuses it.
#[cfg(target_os = "linux")]
pub fn limit_capabilities(permitted: Capabilities, effective: Capabilities) -> io::Result<()> {
    linux::Sets::of_this_thread()?.limit(permitted.0, effective.0)
}

#[cfg(target_os = "linux")]
pub(super) use linux::apply;

#[cfg(target_os = "linux")]
mod linux {
    use std::io;

    use libc::{c_int, c_long, c_ulong};

    use super::{Account, Capabilities, Rights};

    /// Version 3 of the structures of `capget` and `capset`.
    const CAPABILITY_VERSION: u32 = 0x2008_0522;
    /// Number of bits of a capability set.
    const CAPABILITY_BITS: u32 = 64;
    /// Limit of the niceness that permits the priority of the heartbeat thread, -10, without a capability.
    const NICE_LIMIT: libc::rlim_t = 30;
    /// Argument of `setresuid` and `setresgid` that changes nothing.
    const UNCHANGED: c_long = -1;

    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }

    /// One half of the three sets: 32 capabilities.
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Half {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }

    /// Three sets of capabilities of a thread.
    #[derive(Clone, Copy)]
    pub(super) struct Sets {
        pub(super) effective: u64,
        permitted: u64,
        inheritable: u64,
    }

    fn checked(result: c_long) -> io::Result<()> {
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    impl Sets {
        pub(super) fn of_this_thread() -> io::Result<Self> {
            let header = Header { version: CAPABILITY_VERSION, pid: 0 };
            let mut halves = [Half::default(); 2];
            // SAFETY: capget reads the header and writes two structures, which have the kernel's layout.
            #[allow(unsafe_code)]
            checked(unsafe { libc::syscall(libc::SYS_capget, &raw const header, halves.as_mut_ptr()) })?;
            let join = |part: fn(&Half) -> u32| u64::from(part(&halves[0])) | u64::from(part(&halves[1])) << 32;
            Ok(Self {
                effective: join(|half| half.effective),
                permitted: join(|half| half.permitted),
                inheritable: join(|half| half.inheritable),
            })
        }

        pub(super) fn limit(self, permitted: u64, effective: u64) -> io::Result<()> {
            let permitted = self.permitted & permitted;
            Self { effective: permitted & effective, permitted, inheritable: 0 }.apply()
        }

        #[allow(clippy::cast_possible_truncation, reason = "a set is split into its two halves")]
        fn apply(self) -> io::Result<()> {
            let header = Header { version: CAPABILITY_VERSION, pid: 0 };
            let half = |shift: u32| Half {
                effective: (self.effective >> shift) as u32,
                permitted: (self.permitted >> shift) as u32,
                inheritable: (self.inheritable >> shift) as u32,
            };
            let halves = [half(0), half(32)];
            // SAFETY: capset reads the header and two structures, which have the kernel's layout.
            #[allow(unsafe_code)]
            checked(unsafe { libc::syscall(libc::SYS_capset, &raw const header, halves.as_ptr()) })
        }
    }

    /// Calls prctl with up to two arguments.
    fn prctl(option: c_int, first: c_ulong, second: c_ulong) -> io::Result<()> {
        // SAFETY: the options used here take numbers only and change only this thread.
        #[allow(unsafe_code)]
        checked(c_long::from(unsafe { libc::prctl(option, first, second, 0, 0) }))
    }

    // The functions of libc would change all threads. The system calls change only the calling one.
    fn set_groups(groups: &[u32]) -> io::Result<()> {
        // SAFETY: the call reads `groups.len()` numbers.
        #[allow(unsafe_code)]
        checked(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
    }

    fn set_ids(call: c_long, real: c_long, effective: c_long, saved: c_long) -> io::Result<()> {
        // SAFETY: the two calls that are made take numbers only and change only this thread.
        #[allow(unsafe_code)]
        checked(unsafe { libc::syscall(call, real, effective, saved) })
    }

    /// Makes `kept` the ambient set: the capabilities that a program has which an ordinary user starts.
    fn set_ambient(kept: u64) -> io::Result<()> {
        prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong, 0)?;
        for bit in (0..CAPABILITY_BITS).filter(|bit| kept & 1 << bit != 0) {
            prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as c_ulong, c_ulong::from(bit))?;
        }
        Ok(())
    }

    /// Reduces the rights of a child between fork and exec. Makes only system calls: it allocates nothing and takes no
    /// lock.
    pub(crate) fn apply(account: Option<Account>, rights: &Rights) -> io::Result<()> {
        let kept = Sets::of_this_thread()?.permitted & rights.capabilities.0;
        for bit in (0..CAPABILITY_BITS).filter(|bit| kept & 1 << bit == 0) {
            match prctl(libc::PR_CAPBSET_DROP, c_ulong::from(bit), 0) {
                // This kernel has no more capabilities.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                // Without CAP_SETPCAP. `no_new_privs` then keeps the child from getting more.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => break,
                dropped => dropped?,
            }
        }
        let nice = libc::rlimit { rlim_cur: NICE_LIMIT, rlim_max: NICE_LIMIT };
        // SAFETY: the call reads one structure. Without the limit, the child's priority is lower, so a failure is ignored.
        #[allow(unsafe_code)]
        unsafe {
            libc::setrlimit(libc::RLIMIT_NICE, &raw const nice);
        }
        if let Some(Account { uid, gid }) = account {
            set_groups(&rights.groups)?;
            prctl(libc::PR_SET_KEEPCAPS, 1, 0)?;
            set_ids(libc::SYS_setresgid, gid.into(), gid.into(), gid.into())?;
            set_ids(libc::SYS_setresuid, uid.into(), uid.into(), uid.into())?;
        }
        Sets { effective: kept, permitted: kept, inheritable: kept }.apply()?;
        set_ambient(kept)?;
        prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)
    }

    /// Another account of this thread; dropping it restores the former one.
    pub(super) struct AccountOfThread {
        uid: u32,
        gid: u32,
        groups: Vec<u32>,
        sets: Sets,
    }

    impl AccountOfThread {
        /// The saved user id remains root's, so that the change can be undone. Programs do not inherit it.
        pub(super) fn change(account: Account) -> io::Result<Self> {
            // SAFETY: system calls without arguments; getgroups writes at most `groups.len()` numbers.
            #[allow(unsafe_code)]
            let (uid, gid, groups) = unsafe {
                let count = libc::getgroups(0, std::ptr::null_mut());
                let mut groups = vec![0; usize::try_from(count).map_err(|_| io::Error::last_os_error())?];
                checked(c_long::from(libc::getgroups(count, groups.as_mut_ptr())))?;
                (libc::geteuid(), libc::getegid(), groups)
            };
            let former = Self { uid, gid, groups, sets: Sets::of_this_thread()? };
            let kept = former.sets.permitted & Capabilities::DAC_READ_SEARCH.0;
            set_groups(&[])?;
            set_ids(libc::SYS_setresgid, account.gid.into(), account.gid.into(), UNCHANGED)?;
            set_ids(libc::SYS_setresuid, account.uid.into(), account.uid.into(), UNCHANGED)?;
            Sets { effective: kept, permitted: former.sets.permitted, inheritable: kept }.apply()?;
            set_ambient(kept)?;
            Ok(former)
        }

        fn restore(&self) -> io::Result<()> {
            set_ids(libc::SYS_setresuid, self.uid.into(), self.uid.into(), UNCHANGED)?;
            set_ids(libc::SYS_setresgid, self.gid.into(), self.gid.into(), UNCHANGED)?;
            set_groups(&self.groups)?;
            set_ambient(0)?;
            self.sets.apply()
        }
    }

    impl Drop for AccountOfThread {
        fn drop(&mut self) {
            if let Err(error) = self.restore() {
                tracing::error!(%error, "cannot restore the account of a thread");
            }
        }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    const ACCOUNT: Account = Account { uid: 4_000_001, gid: 4_000_002 };

    fn status(name: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap().trim().to_owned()
    }

    #[test]
    fn missing_capabilities_are_named() {
        let needed = Capabilities::CHOWN.with(Capabilities::SETGID).with(Capabilities::SETUID);
        assert_eq!(needed.without(Capabilities::SETGID).to_string(), "CAP_CHOWN, CAP_SETUID");
        assert!(needed.without(needed).is_empty());
    }

    #[test]
    fn thread_writes_as_the_account_and_then_as_root_again() {
        if !rustix::process::geteuid().is_root() {
            return cfq_test_skip::skip("thread_writes_as_the_account_and_then_as_root_again", "only root can do this");
        }
        let folder = tempfile::tempdir().unwrap();
        let names = ["Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh", "CapAmb"];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let before = names.map(status);
                let secret = folder.path().join("secret");
                std::fs::write(&secret, "read").unwrap();
                let (written, read, other) = with_account(ACCOUNT, || {
                    let other = std::thread::spawn(|| status("Uid")).join().unwrap();
                    (std::fs::write(folder.path().join("file"), ""), std::fs::read_to_string(&secret), other)
                })
                .unwrap();
                assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
                assert_eq!(read.unwrap(), "read", "a private folder is no obstacle");
                assert!(other.starts_with("4000001"), "a thread started meanwhile has the account too: {other}");
                assert_eq!(names.map(status), before);
                std::fs::write(folder.path().join("file"), "").unwrap();
            });
        });
        assert!(!status("Uid").contains("4000001"));
    }
}
