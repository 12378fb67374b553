//! The one place that reads the wall clock, and the one that knows of the machine's sleep. Leases and limits never use the
//! wall clock: they run on monotonic time or the database's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Whole seconds since 1970.
#[allow(clippy::disallowed_methods)]
pub fn unix_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// How long this machine slept since it was started. Monotonic time stands still meanwhile, the database's need not: whoever
/// keeps a deadline that others judge adds this.
pub fn slept() -> Duration {
    // In this order the time between the two readings makes it less, never more than nothing.
    let with_sleep = read(libc::CLOCK_BOOTTIME);
    with_sleep.saturating_sub(read(libc::CLOCK_MONOTONIC))
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a whole timespec that lives through the call, which writes nothing else.
    #[allow(unsafe_code)]
    let done = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // Both clocks exist on every Linux this runs on; without them nothing is known of any sleep.
    if done != 0 {
        return Duration::ZERO;
    }
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_is_what_the_boot_clock_is_ahead() {
        assert!(read(libc::CLOCK_MONOTONIC) > Duration::ZERO);
        assert!(slept() <= read(libc::CLOCK_BOOTTIME));
        assert!(slept().abs_diff(slept()) < Duration::from_secs(1));
    }
}
