//! The database's clock, read now and then and carried on monotonically: all of the planner's times are on it, so a
//! machine's wrong clock moves nothing.

use std::time::Instant;

#[derive(Debug, Clone, Copy)]
pub struct DatabaseClock {
    read_ms: i64,
    at: Instant,
}

impl DatabaseClock {
    pub fn new(read_ms: i64) -> Self {
        Self { read_ms, at: Instant::now() }
    }

    pub fn now_ms(&self) -> i64 {
        self.read_ms.saturating_add(i64::try_from(self.at.elapsed().as_millis()).unwrap_or(i64::MAX))
    }
}
