//! The only module that reads the wall clock and the machine's sleep time. Leases and limits never use the wall clock:
//! they use monotonic time or the database's clock.

use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;
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

/// Id of [`process_ms`] of this process.
pub fn process_clock() -> uuid::Uuid {
    static CLOCK: OnceLock<uuid::Uuid> = OnceLock::new();
    *CLOCK.get_or_init(uuid::Uuid::now_v7)
}

/// Monotonic time of this process in milliseconds, including the time that the machine has slept. Its zero is arbitrary.
pub fn process_ms() -> u64 {
    u64::try_from(read(libc::CLOCK_BOOTTIME).as_millis()).unwrap_or(u64::MAX)
}

/// Random duration of at most `max`, by which a repeated request is delayed, so that many senders that lost a reply at
/// the same time do not repeat their requests at the same time.
pub fn jitter(max: Duration) -> Duration {
    // The keys of every `RandomState` are random.
    let random = std::hash::RandomState::new().build_hasher().finish();
    max.mul_f64(random as f64 / u64::MAX as f64)
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
    fn jitter_is_at_most_its_limit() {
        let limit = Duration::from_millis(100);
        let drawn: Vec<Duration> = (0..100).map(|_| jitter(limit)).collect();
        assert!(drawn.iter().all(|wait| *wait <= limit) && drawn.iter().any(|wait| *wait != drawn[0]), "{drawn:?}");
    }

    #[test]
    fn time_slept_is_the_difference_of_both_clocks() {
        assert!(read(libc::CLOCK_MONOTONIC) > Duration::ZERO);
        assert!(time_slept() <= read(libc::CLOCK_BOOTTIME));
        assert!(time_slept().abs_diff(time_slept()) < Duration::from_secs(1));
    }
}
