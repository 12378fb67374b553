//! How long a node is left alone after a call on it failed (N12): 1, 2, 4 ... 256 s, until the ceiling counted from the
//! first failure. The ladder is per node, because another node that serves the model may be tried at once; kept with the
//! job, so that a new leader climbs on from the same rung.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ladder {
    pub base_ms: u64,
    pub cap_ms: u64,
}

/// Longer than the cap of any sensible ladder.
const LONGEST_MS: u64 = 3_600_000;

impl Ladder {
    /// The wait after the `failures`-th failure (from 1): between three quarters of the rung and the rung. The jitter keeps
    /// jobs that failed together from coming back together; it is a hash of the job and the rung, so it can be replayed.
    pub fn wait_ms(self, job: JobId, failures: u32) -> u64 {
        let doublings = failures.saturating_sub(1).min(40);
        let rung = self.base_ms.saturating_mul(1u64 << doublings).min(self.cap_ms.max(1));
        rung - (rung / 4).saturating_mul(u64::from(spread(job, failures))) / 256
    }
}

/// FNV-1a over the id and the rung, folded to a byte: spread is all that is asked of it.
fn spread(job: JobId, failures: u32) -> u8 {
    let hash = job
        .0
        .as_bytes()
        .iter()
        .chain(&failures.to_be_bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    hash.to_be_bytes().into_iter().fold(0, |a, b| a ^ b)
}

/// What happened to a job on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setback {
    pub failures: u32,
    /// The job does not go to this node before.
    pub until_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Setbacks(pub BTreeMap<NodeId, Setback>);

impl Setbacks {
    /// Climbs one rung on `node`.
    pub fn record(&mut self, job: JobId, node: NodeId, now_ms: i64, ladder: Ladder) {
        let failures = self.0.get(&node).map_or(0, |s| s.failures) + 1;
        let until_ms = now_ms.saturating_add_unsigned(ladder.wait_ms(job, failures));
        self.0.insert(node, Setback { failures, until_ms });
    }

    /// A wait longer than any rung was written before the database's clock was set back, and is over.
    pub fn blocks(&self, node: &NodeId, now_ms: i64) -> bool {
        self.0.get(node).is_some_and(|s| now_ms < s.until_ms && s.until_ms.abs_diff(now_ms) <= LONGEST_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::JobId;

    const LADDER: Ladder = Ladder { base_ms: 1_000, cap_ms: 256_000 };

    #[test]
    fn the_ladder_doubles_to_its_cap_and_jitter_stays_on_the_rung() {
        for job in (0..200).map(|_| JobId::fresh()) {
            let mut below = 0;
            for failures in 1..=20 {
                let rung = (1_000u64 << (failures - 1).min(8)).min(256_000);
                let wait = LADDER.wait_ms(job, failures);
                assert!(wait <= rung && wait >= rung - rung / 4, "{failures}: {wait} of {rung}");
                if failures <= 9 {
                    assert!(wait > below, "rung {failures} is above the one before");
                }
                below = rung;
                assert_eq!(wait, LADDER.wait_ms(job, failures));
            }
        }
    }

    #[test]
    fn a_wait_from_before_the_clock_was_set_back_is_over() {
        let node = NodeId::new("a").unwrap();
        let mut setbacks = Setbacks::default();
        setbacks.record(JobId::fresh(), node.clone(), 10_000_000, LADDER);
        assert!(setbacks.blocks(&node, 10_000_000) && !setbacks.blocks(&node, 10_000_000 - 7_200_000));
    }

    #[test]
    fn each_node_has_its_own_ladder() {
        let (a, b) = (NodeId::new("a").unwrap(), NodeId::new("b").unwrap());
        let mut setbacks = Setbacks::default();
        setbacks.record(JobId::fresh(), a.clone(), 0, LADDER);
        assert!(setbacks.blocks(&a, 500));
        assert!(!setbacks.blocks(&a, 1_000));
        assert!(!setbacks.blocks(&b, 0));
    }
}
