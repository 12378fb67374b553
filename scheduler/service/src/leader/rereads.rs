//! When the leader reads its rows again. A read takes longer with more rows, so the interval grows with the time that
//! the last read took: rereading never takes more than a small part of the leader's time.

use std::time::Duration;

use tokio::time::Instant;

/// The interval is at least this many times as long as the last read took.
const MIN_INTERVAL_READS: u32 = 20;
/// Maximum interval, and so the maximum delay of a change whose hint is lost.
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Schedule of the reads.
pub struct Rereads {
    interval: Duration,
    next: Instant,
}

impl Rereads {
    /// Schedules the first read now, and the following ones at this interval.
    pub fn new(interval: Duration) -> Self {
        Self { interval, next: Instant::now() }
    }

    /// Completes when the next read is due. May be dropped and called again.
    pub async fn due(&self) {
        tokio::time::sleep_until(self.next).await;
    }

    /// Schedules the next read after one that took `took`.
    pub fn on_done(&mut self, took: Duration) {
        self.next = Instant::now() + self.interval.max((took * MIN_INTERVAL_READS).min(MAX_INTERVAL));
    }

    /// Schedules the next read after one that failed.
    pub fn on_failed(&mut self) {
        self.next = Instant::now() + self.interval;
    }
}
