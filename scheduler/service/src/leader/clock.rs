//! The database's clock, read at intervals and extrapolated with the monotonic clock. All times of the planner are
//! times of this clock, so a wrong wall clock on a scheduler, node or runner has no effect.

use std::time::{Duration, Instant};

/// One reading of the database's clock, in ms since 1970, and the instant at which it was taken.
#[derive(Debug, Clone, Copy)]
pub struct DatabaseClock {
    read_ms: i64,
    at: Instant,
}

impl DatabaseClock {
    pub fn new(read_ms: i64) -> Self {
        Self::at_instant(read_ms, Instant::now())
    }

    pub fn at_instant(read_ms: i64, at: Instant) -> Self {
        Self { read_ms, at }
    }

    pub fn at(&self) -> Instant {
        self.at
    }

    /// The time that was read, in ms since 1970.
    pub fn ms(&self) -> i64 {
        self.read_ms
    }

    pub fn now_ms(&self) -> i64 {
        self.ms_at(Instant::now())
    }

    /// Time in ms by which this reading is ahead of the earlier reading `before`, extrapolated to the instant of this
    /// one. The result is nonzero if the database's clock jumped, and negative if the clock was set back.
    pub fn ahead_of(&self, before: &Self) -> i64 {
        self.read_ms.saturating_sub(before.ms_at(self.at))
    }

    /// Time in ms by which the clock certainly jumped ahead since the reading `before`, which took `before_took`: that
    /// reading may be older than its instant by this time.
    pub fn certain_jump_ms(&self, before: &Self, before_took: Duration) -> u64 {
        let late_ms = i64::try_from(before_took.as_millis()).unwrap_or(i64::MAX);
        u64::try_from(self.ahead_of(before).saturating_sub(late_ms)).unwrap_or(0)
    }

    fn ms_at(&self, at: Instant) -> i64 {
        let passed = at.saturating_duration_since(self.at).as_millis();
        self.read_ms.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_reading_is_no_jump_and_a_suspension_is_one() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        // Read at 1,000 s, but the answer came 20 s later.
        let slow = DatabaseClock::at_instant(1_000_000, start + 20 * second);
        let next = DatabaseClock::at_instant(1_021_000, start + 21 * second);
        assert_eq!(next.certain_jump_ms(&slow, 20 * second), 0);
        // The monotonic clock stops while the machine is suspended for an hour.
        let woken = DatabaseClock::at_instant(1_022_000 + 3_600_000, start + 22 * second);
        assert_eq!(woken.certain_jump_ms(&next, Duration::ZERO), 3_600_000);
        let set_back = DatabaseClock::at_instant(1_000, start + 22 * second);
        assert_eq!(set_back.certain_jump_ms(&next, Duration::ZERO), 0);
    }
}
