//! Ages of requests, to drop those whose senders do not wait for the reply any more. A request may arrive late because
//! this scheduler or NATS was stopped, or because its sender was disconnected and sent it after the next connection. It
//! must not be executed: its sender has sent another one since, or has ended.
//!
//! The clocks of sender and receiver differ by an unknown offset, so one request alone has no age. Of the requests of one
//! sender, the one that was delivered fastest shows the offset; the age of any other is how much longer it took. So the
//! age is never overestimated, and wrong clocks drop no request. The age of the first request of a sender is unknown,
//! and counts as zero.
//!
//! The offset changes slowly, because clocks drift, so only requests of the last minutes count. If it changes at once,
//! for example because the sender's virtual machine was paused, all its requests seem late, also those that arrive one by
//! one. After [`MAX_LATE_MS`] the offset is learned again.

use std::collections::HashMap;
use std::time::Duration;

use cfq_proto::envelope::Deadline;
use uuid::Uuid;

/// Duration of the two windows of requests from which the offset is learned, in milliseconds.
const WINDOW_MS: i64 = 60_000;
/// Time without a request of the sender after which its offset is forgotten, in milliseconds. Clocks drift by less than a
/// tenth of a second within it.
const FORGET_AFTER_MS: i64 = 600_000;
/// Time for which all requests of a sender may be late, in milliseconds: requests that waited in buffers are read in a
/// fraction of it.
const MAX_LATE_MS: i64 = 5_000;

/// What is known of the clocks of all senders.
#[derive(Debug, Default)]
pub struct SenderClocks(HashMap<(&'static str, String), SenderClock>);

impl SenderClocks {
    /// Returns for how long the sender still waits for the reply; `None` if its wait has ended. `kind` is the sender's
    /// kind, and `received_ms` the time at which the request was read, in milliseconds on a monotonic clock of this
    /// process.
    pub fn time_left(
        &mut self,
        kind: &'static str,
        sender: &str,
        deadline: Deadline,
        received_ms: u64,
    ) -> Option<Duration> {
        let (received_ms, sent_ms) = (saturated(received_ms), saturated(deadline.sent_ms));
        let offset = received_ms.saturating_sub(sent_ms);
        let new = SenderClock::new(deadline.clock, sent_ms, offset);
        let clock = self.0.entry((kind, sender.to_owned())).or_insert(new);
        if clock.clock != deadline.clock || sent_ms.saturating_sub(clock.newest_sent_ms) > FORGET_AFTER_MS {
            *clock = new;
        }
        clock.newest_sent_ms = clock.newest_sent_ms.max(sent_ms);
        let age_ms = u64::try_from(offset.saturating_sub(clock.min_offset())).unwrap_or(0);
        if let Some(left_ms) = deadline.timeout_ms.checked_sub(age_ms) {
            clock.late_since_ms = None;
            clock.learn(sent_ms, offset);
            return Some(Duration::from_millis(left_ms));
        }
        let late_since_ms = *clock.late_since_ms.get_or_insert(received_ms);
        let is_changed = received_ms.saturating_sub(late_since_ms) > MAX_LATE_MS;
        if is_changed {
            *clock = new;
        }
        is_changed.then(|| Duration::from_millis(deadline.timeout_ms))
    }
}

/// Offset of one sender's clock to the receiver's.
#[derive(Debug, Clone, Copy)]
struct SenderClock {
    clock: Uuid,
    newest_sent_ms: i64,
    /// When the current window began, on the sender's clock.
    window_began_ms: i64,
    /// Smallest offset in the current window and in the one before it: time of receipt less time of sending.
    offsets: [i64; 2],
    /// Since when all requests were late, on the receiver's clock.
    late_since_ms: Option<i64>,
}

impl SenderClock {
    fn new(clock: Uuid, sent_ms: i64, offset: i64) -> Self {
        Self { clock, newest_sent_ms: sent_ms, window_began_ms: sent_ms, offsets: [offset; 2], late_since_ms: None }
    }

    fn min_offset(&self) -> i64 {
        self.offsets[0].min(self.offsets[1])
    }

    fn learn(&mut self, sent_ms: i64, offset: i64) {
        if sent_ms.saturating_sub(self.window_began_ms) > WINDOW_MS {
            self.offsets = [offset, self.offsets[0]];
            self.window_began_ms = sent_ms;
        } else {
            self.offsets[0] = self.offsets[0].min(offset);
        }
    }
}

fn saturated(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT_MS: u64 = 500;

    fn is_expired(clocks: &mut SenderClocks, sent_ms: u64, received_ms: u64) -> bool {
        let deadline = Deadline { clock: Uuid::from_u128(1), sent_ms, timeout_ms: TIMEOUT_MS };
        clocks.time_left("node", "den", deadline, received_ms).is_none()
    }

    #[test]
    fn requests_that_waited_while_the_receiver_was_stopped_are_expired() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 10_000, 7_003));
        // Stopped for 33 s; the requests of this time are read at once, then those sent now.
        let resumed = 7_003 + 33_000;
        let sent = (0..16).map(|n| 12_000 + n * 2_000);
        assert!(sent.into_iter().all(|sent_ms| is_expired(&mut clocks, sent_ms, resumed)));
        assert!(!is_expired(&mut clocks, 43_000, resumed + 2));
    }

    #[test]
    fn requests_that_waited_for_a_long_time_are_expired() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 0, 0));
        let sent = (1..1_000).map(|n| n * 2_000);
        assert!(sent.into_iter().all(|sent_ms| is_expired(&mut clocks, sent_ms, 2_000_000)));
    }

    #[test]
    fn changed_offset_is_learned_again() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 1_000, 1_000));
        // The sender's clock stood still for an hour.
        let received = |sent_ms| sent_ms + 3_600_000;
        let expired: Vec<bool> = (1..10).map(|n| is_expired(&mut clocks, n * 2_000, received(n * 2_000))).collect();
        assert_eq!(expired, [true, true, true, false, false, false, false, false, false]);
        assert!(is_expired(&mut clocks, 20_000, received(20_000) + 1_000), "a late one is noticed again");
    }

    #[test]
    fn drift_of_an_idle_senders_clock_expires_nothing() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 1_000, 1_000));
        let day_ms = 86_400_000;
        assert!(!is_expired(&mut clocks, day_ms, day_ms + 9_000), "drifted by 100 ppm");
    }

    #[test]
    fn another_process_of_the_same_name_has_its_own_offset() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 1_000_000, 1_000));
        let deadline = Deadline { clock: Uuid::from_u128(2), sent_ms: 5, timeout_ms: TIMEOUT_MS };
        assert_eq!(clocks.time_left("node", "den", deadline, 2_000), Some(Duration::from_millis(TIMEOUT_MS)));
    }

    #[test]
    fn time_in_which_a_request_waited_is_not_left() {
        let mut clocks = SenderClocks::default();
        assert!(!is_expired(&mut clocks, 1_000, 1_000));
        let deadline = Deadline { clock: Uuid::from_u128(1), sent_ms: 2_000, timeout_ms: TIMEOUT_MS };
        assert_eq!(clocks.time_left("node", "den", deadline, 2_300), Some(Duration::from_millis(TIMEOUT_MS - 300)));
    }

    proptest! {
        /// With any offset of the clocks and a drift of 200 ppm, no request is dropped while its sender waits.
        #[test]
        fn request_is_never_expired_before_its_deadline(
            start_ms in 0_u64..1 << 50,
            zero_ms in 0_u64..1 << 50,
            requests in prop::collection::vec((1_u64..300_000, 0_u64..=TIMEOUT_MS / 2), 1..200),
        ) {
            let (mut clocks, mut now_ms) = (SenderClocks::default(), 0);
            for (wait_ms, delay_ms) in requests {
                now_ms += wait_ms;
                let received_ms = zero_ms + now_ms + now_ms / 5_000 + delay_ms;
                prop_assert!(!is_expired(&mut clocks, start_ms + now_ms, received_ms));
            }
        }

        /// Any numbers are read without a panic.
        #[test]
        fn numbers_of_a_hostile_sender_do_no_harm(requests in prop::collection::vec((any::<u64>(), any::<u64>()), 1..50)) {
            let mut clocks = SenderClocks::default();
            for (sent_ms, received_ms) in requests {
                is_expired(&mut clocks, sent_ms, received_ms);
            }
        }
    }
}
