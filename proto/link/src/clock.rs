//! The only module that reads the wall clock and the machine's sleep time. Leases and limits never use the wall clock:
//! they use monotonic time or the database's clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Whole seconds since 1970.
#[allow(clippy::disallowed_methods)]
pub fn unix_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Total time that this machine has slept (was suspended) since it booted. Monotonic time stops during sleep, but the
/// database's clock may continue, so a deadline that another machine enforces must include the time slept.
pub fn time_slept() -> Duration {
    // BOOTTIME is read first, so the time between the two readings can only reduce the result.
    let with_sleep = read(libc::CLOCK_BOOTTIME);
    with_sleep.saturating_sub(read(libc::CLOCK_MONOTONIC))
}

/// Identifies the current start of this machine; `None` if the system does not report it.
pub fn machine_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that outlives the call, which writes nothing else.
    #[allow(unsafe_code)]
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // Both clocks exist on every supported Linux; without them the sleep time is unknown and counts as zero.
    if result != 0 {
        return Duration::ZERO;
    }
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_slept_is_the_difference_of_both_clocks() {
        assert!(read(libc::CLOCK_MONOTONIC) > Duration::ZERO);
        assert!(time_slept() <= read(libc::CLOCK_BOOTTIME));
        assert!(time_slept().abs_diff(time_slept()) < Duration::from_secs(1));
    }
}
