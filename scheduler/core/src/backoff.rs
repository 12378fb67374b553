//! Exponential backoff of a job on a node after a failed call (N12): 1, 2, 4 ... 256 s, until the time since the first
//! failure reaches the retry ceiling. The backoff is counted per node, because another node that serves the model may
//! be tried at once. It is stored with the job, so a new leader continues with the same wait.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use serde::{Deserialize, Serialize};

/// Limits of the exponential backoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffPolicy {
    /// Wait after the first failure, in ms.
    pub base_ms: u64,
    /// Longest wait, in ms.
    pub cap_ms: u64,
}

/// Longest remaining wait that is accepted, in ms. A longer one results from a clock that was set back, because no
/// sensible policy has such a cap.
const MAX_CREDIBLE_WAIT_MS: u64 = 3_600_000;

impl BackoffPolicy {
    /// Wait after the `failures`-th failure (counted from 1), in ms: the base, doubled for each earlier failure up to
    /// the cap, less a jitter of at most a quarter. The jitter keeps jobs that failed together from being retried
    /// together. The jitter is a hash of the job id and the number of failures, so a replay gives the same wait.
    pub fn wait_ms(self, job: JobId, failures: u32) -> u64 {
        let doublings = failures.saturating_sub(1).min(40);
        let step_ms = self.base_ms.saturating_mul(1u64 << doublings).min(self.cap_ms.max(1));
        step_ms - (step_ms / 4).saturating_mul(u64::from(jitter(job, failures))) / 256
    }
}

/// Returns the jitter as a byte: an FNV-1a hash over the job id and the number of failures, folded. It only has to be
/// evenly distributed.
fn jitter(job: JobId, failures: u32) -> u8 {
    let hash = job
        .0
        .as_bytes()
        .iter()
        .chain(&failures.to_be_bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    hash.to_be_bytes().into_iter().fold(0, |a, b| a ^ b)
}

/// Failures of a job on one node, and the end of the backoff after the last one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeBackoff {
    /// Number of failed attempts on the node.
    pub failures: u32,
    /// The job is not placed on the node before this time, in ms.
    pub until_ms: i64,
}

/// Failures of one job, by node. Empty while no attempt of the job has failed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeFailures(pub BTreeMap<NodeId, NodeBackoff>);

impl NodeFailures {
    /// Counts a failure on `node` and sets the backoff after it.
    pub fn record(&mut self, job: JobId, node: NodeId, now_ms: i64, policy: BackoffPolicy) {
        let failures = self.0.get(&node).map_or(0, |s| s.failures) + 1;
        let until_ms = now_ms.saturating_add_unsigned(policy.wait_ms(job, failures));
        self.0.insert(node, NodeBackoff { failures, until_ms });
    }

    /// Times at which [`NodeFailures::blocks`] may change for a node, in ms.
    pub(crate) fn change_times_ms(&self) -> impl Iterator<Item = i64> + '_ {
        let ends = self.0.values().map(|s| s.until_ms);
        ends.flat_map(|end| [end, end.saturating_sub_unsigned(MAX_CREDIBLE_WAIT_MS)])
    }

    /// Returns whether the backoff still prevents a placement of the job on `node`. A wait longer than any policy
    /// allows was written before the database's clock was set back, and counts as over.
    pub fn blocks(&self, node: &NodeId, now_ms: i64) -> bool {
        self.0.get(node).is_some_and(|s| now_ms < s.until_ms && s.until_ms.abs_diff(now_ms) <= MAX_CREDIBLE_WAIT_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::JobId;

    const POLICY: BackoffPolicy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };

    #[test]
    fn wait_doubles_up_to_the_cap_and_jitter_stays_within_a_quarter() {
        for job in (0..200).map(|_| JobId::fresh()) {
            let mut previous = 0;
            for failures in 1..=20 {
                let step = (1_000u64 << (failures - 1).min(8)).min(256_000);
                let wait = POLICY.wait_ms(job, failures);
                assert!(wait <= step && wait >= step - step / 4, "{failures}: {wait} of {step}");
                if failures <= 9 {
                    assert!(wait > previous, "wait {failures} is longer than the one before");
                }
                previous = step;
                assert_eq!(wait, POLICY.wait_ms(job, failures));
            }
        }
    }

    #[test]
    fn wait_from_before_a_clock_set_back_is_over() {
        let node = NodeId::new("a").unwrap();
        let mut failures = NodeFailures::default();
        failures.record(JobId::fresh(), node.clone(), 10_000_000, POLICY);
        assert!(failures.blocks(&node, 10_000_000) && !failures.blocks(&node, 10_000_000 - 7_200_000));
    }

    #[test]
    fn backoff_is_counted_per_node() {
        let (a, b) = (NodeId::new("a").unwrap(), NodeId::new("b").unwrap());
        let mut failures = NodeFailures::default();
        failures.record(JobId::fresh(), a.clone(), 0, POLICY);
        assert!(failures.blocks(&a, 500));
        assert!(!failures.blocks(&a, 1_000));
        assert!(!failures.blocks(&b, 0));
    }
}
