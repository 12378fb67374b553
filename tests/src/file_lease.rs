//! A file that blocks its reader, although it is a regular file: the kernel delays the `open` of a file with a lease
//! until the lease's holder gives way, for up to 45 seconds (`/proc/sys/fs/lease-break-time`).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use crate::wait;

/// A write lease; dropping it lets the blocked readers continue.
pub struct FileLease(File);

impl FileLease {
    /// Takes the lease of a file that no process has open.
    pub fn take(path: &Path) -> Self {
        static IGNORE_SIGIO: Once = Once::new();
        // SAFETY: ignoring a signal runs no code; the kernel reports with it that a process waits for a lease.
        #[allow(unsafe_code)]
        IGNORE_SIGIO.call_once(|| unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
        });
        let file = File::options().read(true).write(true).open(path).unwrap();
        // SAFETY: a plain system call on an open file.
        #[allow(unsafe_code)]
        let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
        assert_eq!(taken, 0, "{}: {}", path.display(), std::io::Error::last_os_error());
        Self(file)
    }

    /// Waits until a process is blocked by the lease.
    pub async fn wait_until_blocking(&self, limit: Duration) {
        wait::until("a process that opens the file", limit, || async {
            // SAFETY: a plain system call on an open file.
            #[allow(unsafe_code)]
            let lease = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) };
            // While a process waits, the kernel reports the kind of lease that would let it continue.
            if lease == libc::F_WRLCK { Err("no process".to_owned()) } else { Ok(()) }
        })
        .await;
    }
}
