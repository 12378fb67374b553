//! The network: messages are lost, duplicated, delayed and reordered.

use crate::event_queue::{MS, Micros};
use crate::rng::Rng;

use super::config::Faults;

/// Delay of a message without faults.
const BASE_DELAY: Micros = MS / 2;

/// Numbers of messages that were subject to a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetworkCounts {
    /// Messages sent.
    pub sent: u64,
    /// Messages lost.
    pub lost: u64,
    /// Messages delivered twice.
    pub duplicated: u64,
}

/// Returns the delays after which the copies of a message arrive. `faults` is `None` while no faults are injected.
pub fn copies(rng: &mut Rng, faults: Option<&Faults>, counts: &mut NetworkCounts) -> ([Micros; 2], usize) {
    counts.sent += 1;
    let Some(faults) = faults else { return ([BASE_DELAY; 2], 1) };
    if rng.chance(faults.loss) {
        counts.lost += 1;
        return ([0; 2], 0);
    }
    let mut delay =
        || BASE_DELAY + if faults.delay_ms > 0.0 { (rng.exponential(faults.delay_ms) * 1e3) as Micros } else { 0 };
    let delays = [delay(), delay()];
    if rng.chance(faults.duplication) {
        counts.duplicated += 1;
        return (delays, 2);
    }
    (delays, 1)
}
