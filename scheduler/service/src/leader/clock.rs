//! The database's clock, read at intervals and extrapolated with the monotonic clock. All times of the planner are
//! times of this clock, so a wrong wall clock on a scheduler, node or runner has no effect.

use std::time::Instant;

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

    fn ms_at(&self, at: Instant) -> i64 {
        let passed = at.saturating_duration_since(self.at).as_millis();
        self.read_ms.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX))
    }
}
