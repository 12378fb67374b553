//! Grace periods, in which the leader ends no lease, not even an expired one. After an election, and after an outage of
//! Postgres or NATS, live holders may have been unable to send heartbeats. After a jump of the database's clock (its
//! machine was suspended, or its time was set), all leases look expired at once, before their holders can send a
//! heartbeat. In each case, no lease is ended for one lease TTL.
//!
//! A jump is detected by comparing how far the database's clock and this machine's monotonic clock advanced between two
//! readings. The monotonic clock stops while the machine is suspended, and it is never set.

use std::time::{Duration, Instant};

use super::clock::DatabaseClock;

/// The current grace period: no lease is ended before `until`.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    until: Instant,
    ttl: Duration,
    /// A holder stops using its lease this long before the lease expires, so a clock jump smaller than this margin
    /// cannot end a lease that is in use.
    margin: Duration,
}

impl Grace {
    pub fn new(now: Instant, ttl: Duration, margin: Duration) -> Self {
        Self { until: now + ttl, ttl, margin }
    }

    pub fn renew(&mut self, now: Instant) {
        self.until = now + self.ttl;
    }

    pub fn is_active(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Compares a new reading of the database's clock with the previous one; `took` is how long the query took. Returns
    /// true, and renews the grace period, if the clock jumped or if the query took so long that heartbeats cannot have
    /// been answered either.
    pub fn on_clock_reading(&mut self, before: Option<&DatabaseClock>, read: &DatabaseClock, took: Duration) -> bool {
        let jump_ms = before.map_or(0, |before| read.ahead_of(before));
        let margin = i64::try_from(self.margin.as_millis()).unwrap_or(i64::MAX);
        let needs_grace = jump_ms.abs() > margin || took > self.margin;
        if needs_grace {
            self.renew(read.at());
        }
        needs_grace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(6);
    const MARGIN: Duration = Duration::from_secs(1);

    #[test]
    fn clock_jump_ahead_delays_the_sweep_by_one_ttl() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        let first = DatabaseClock::at_instant(1_000_000, start);
        let after = start + Duration::from_secs(10);
        assert!(!grace.is_active(after));
        // Ten seconds pass on both clocks, plus the noise of a round trip.
        let steady = DatabaseClock::at_instant(1_010_300, after);
        assert!(!grace.on_clock_reading(Some(&first), &steady, Duration::ZERO) && !grace.is_active(after));
        // The machine was suspended for an hour, which the monotonic clock does not count.
        let woken = after + Duration::from_secs(1);
        let read = DatabaseClock::at_instant(1_010_300 + 3_601_000, woken);
        assert!(grace.on_clock_reading(Some(&steady), &read, Duration::ZERO));
        assert!(grace.is_active(woken + Duration::from_secs(5)) && !grace.is_active(woken + TTL));
        // After the jump the clock is steady, so the grace period is not renewed again.
        let later = woken + TTL;
        let next = DatabaseClock::at_instant(1_010_300 + 3_601_000 + 6_000, later);
        assert!(!grace.on_clock_reading(Some(&read), &next, Duration::ZERO) && !grace.is_active(later));
    }

    #[test]
    fn clock_set_back_delays_the_sweep_by_one_ttl() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        // Expiry times that were written before the clock was set back now lie far in the future.
        let after = start + Duration::from_secs(10);
        let read = DatabaseClock::at_instant(1_010_000 - 3_600_000, after);
        assert!(grace.on_clock_reading(Some(&DatabaseClock::at_instant(1_000_000, start)), &read, Duration::ZERO));
        assert!(grace.is_active(after) && !grace.is_active(after + TTL));
    }

    #[test]
    fn slow_clock_reading_counts_as_an_outage() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        let late = start + Duration::from_secs(20);
        let read = DatabaseClock::at_instant(1_020_000, late);
        let before = DatabaseClock::at_instant(1_000_000, start);
        assert!(grace.on_clock_reading(Some(&before), &read, Duration::from_secs(4)));
        assert!(grace.is_active(late));
    }
}
