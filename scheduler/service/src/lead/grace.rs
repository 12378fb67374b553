//! When nothing may be swept. After an election, and after Postgres or NATS was away, holders could not beat although they
//! live; and after the database's clock moved by itself (its machine slept, or its time was set) every lease looks expired
//! at once, before its holder could say a word. In each case one TTL passes first.
//!
//! A clock that moved shows in the difference of two clocks between two readings: the monotonic one stands still while a
//! machine sleeps and is never set.

use std::time::{Duration, Instant};

use super::clock::DatabaseClock;

#[derive(Debug, Clone, Copy)]
pub struct Grace {
    until: Instant,
    ttl: Duration,
    /// Holders stop acting this long before their lease runs out; what the clock moves by less takes nobody's lease.
    margin: Duration,
}

impl Grace {
    pub fn new(now: Instant, ttl: Duration, margin: Duration) -> Self {
        Self { until: now + ttl, ttl, margin }
    }

    pub fn renew(&mut self, now: Instant) {
        self.until = now + self.ttl;
    }

    pub fn holds(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Compares a new reading of the database's clock with the one before. True if the clock moved by itself, or the
    /// reading took so long that beats cannot have come through either: the grace is renewed.
    pub fn reading(&mut self, before: Option<&DatabaseClock>, read: &DatabaseClock, took: Duration) -> bool {
        let moved = before.map_or(0, |before| read.ahead_of(before));
        let margin = i64::try_from(self.margin.as_millis()).unwrap_or(i64::MAX);
        let over = moved.abs() > margin || took > self.margin;
        if over {
            self.renew(read.at());
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(6);
    const MARGIN: Duration = Duration::from_secs(1);

    #[test]
    fn a_clock_that_jumped_ahead_gives_every_holder_one_ttl_to_beat() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        let first = DatabaseClock::at_instant(1_000_000, start);
        let after = start + Duration::from_secs(10);
        assert!(!grace.holds(after));
        // Ten seconds on both clocks, and the round trip's noise.
        let steady = DatabaseClock::at_instant(1_010_300, after);
        assert!(!grace.reading(Some(&first), &steady, Duration::ZERO) && !grace.holds(after));
        // The machine slept an hour: the monotonic clock did not see it.
        let woken = after + Duration::from_secs(1);
        let read = DatabaseClock::at_instant(1_010_300 + 3_601_000, woken);
        assert!(grace.reading(Some(&steady), &read, Duration::ZERO));
        assert!(grace.holds(woken + Duration::from_secs(5)) && !grace.holds(woken + TTL));
        // From there on it is steady again, and does not push the sweep out for ever.
        let later = woken + TTL;
        let next = DatabaseClock::at_instant(1_010_300 + 3_601_000 + 6_000, later);
        assert!(!grace.reading(Some(&read), &next, Duration::ZERO) && !grace.holds(later));
    }

    #[test]
    fn a_clock_that_was_set_back_does_too_because_what_it_wrote_lies_in_the_future() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        let after = start + Duration::from_secs(10);
        let read = DatabaseClock::at_instant(1_010_000 - 3_600_000, after);
        assert!(grace.reading(Some(&DatabaseClock::at_instant(1_000_000, start)), &read, Duration::ZERO));
        assert!(grace.holds(after) && !grace.holds(after + TTL));
    }

    #[test]
    fn a_reading_that_hung_counts_as_an_outage() {
        let start = Instant::now();
        let mut grace = Grace::new(start, TTL, MARGIN);
        let late = start + Duration::from_secs(20);
        let read = DatabaseClock::at_instant(1_020_000, late);
        assert!(grace.reading(Some(&DatabaseClock::at_instant(1_000_000, start)), &read, Duration::from_secs(4)));
        assert!(grace.holds(late));
    }
}
