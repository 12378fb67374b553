//! Scheduling priority of the heartbeat thread. A machine on which many threads compute must not lose its leases because
//! the thread that renews them waits for a core.

/// Niceness of the heartbeat thread. The thread computes next to nothing, so no other thread is delayed by it.
const HEARTBEAT_NICENESS: i32 = -10;

/// Raises the priority of the current thread, if this process may: a negative niceness needs the capability
/// `CAP_SYS_NICE` or a limit `RLIMIT_NICE` (`LimitNICE=` of a systemd unit) that permits it. Without it, the thread keeps
/// the priority of the process.
pub(super) fn raise() {
    // Linux sets the niceness of the calling thread only.
    match rustix::process::setpriority_process(None, HEARTBEAT_NICENESS) {
        Ok(()) => {}
        Err(error) => tracing::debug!(%error, "the heartbeat thread keeps the priority of the process"),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Field 19 of a thread's `stat` file.
    fn niceness(stat: &str) -> Option<i32> {
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(16)?.parse().ok()
    }

    #[test]
    fn only_the_current_thread_gets_the_priority() {
        let own = || niceness(&std::fs::read_to_string("/proc/thread-self/stat").unwrap()).unwrap();
        let before = own();
        let (permitted, raised) = std::thread::spawn(move || {
            raise();
            (rustix::process::setpriority_process(None, HEARTBEAT_NICENESS).is_ok(), own())
        })
        .join()
        .unwrap();
        assert_eq!(raised, if permitted { HEARTBEAT_NICENESS } else { before });
        assert_eq!(own(), before, "this thread keeps its priority");
    }
}
