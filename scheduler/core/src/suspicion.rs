//! Decides whether a job may have caused the end of an attempt that its node did not report.
//!
//! A node that is lost ends all attempts that it holds, but at most one job is the cause. A prompt that crashes a node
//! does so while the node prepares it or computes its first token. So if the node held an attempt without a first
//! token, only such attempts are suspected, and an attempt that had already generated text is not. A node that sends
//! heartbeats but does not accept work may be blocked by an earlier order. Then only the job of the first order that it
//! left unaccepted is suspected.
//!
//! Losses that are not suspicious are counted too, with a higher limit, so that a job
//! which always crashes its node late in its text is isolated in the end. An isolated job is the only one on its node,
//! and is therefore suspected.

use cfq_proto::ids::JobId;

/// How an attempt ended without a report of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnreportedEnd {
    /// The node process ended unexpectedly, or its heartbeats stopped.
    NodeLost,
    /// The node sends heartbeats, but the accepted attempt completed no step in time, or the node dropped it.
    Stalled,
    /// The node sends heartbeats, but did not accept the attempt.
    NotAccepted,
    /// The node stopped cleanly, its machine was restarted, or Postgres or NATS was unavailable.
    Infrastructure,
}

/// One attempt on a boot of a node, as far as the decision needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootAttempt {
    /// Job of the attempt.
    pub job: JobId,
    /// Time of the placement, in ms.
    pub placed_ms: i64,
    /// Time of the acceptance, in ms; `None` if the node did not accept the attempt.
    pub accepted_ms: Option<i64>,
    /// Whether the attempt has generated its first token.
    pub has_first_token: bool,
}

/// Number of suspicions from which a job is isolated.
pub(crate) const SUSPICIONS_BEFORE_ISOLATION: u32 = 2;
/// Number of losses, suspicious or not, from which a job is isolated.
pub(crate) const LOSSES_BEFORE_ISOLATION: u32 = 6;

/// Returns whether the job may have caused the end of its attempt. `others` are the attempts of other jobs that the
/// same boot of the node held when the attempt ended, or had left unaccepted before. `last_accepted_ms` is the time at
/// which this boot last accepted an attempt.
pub fn is_suspect(
    end: UnreportedEnd,
    attempt: &BootAttempt,
    others: &[BootAttempt],
    last_accepted_ms: Option<i64>,
) -> bool {
    match end {
        UnreportedEnd::Infrastructure => false,
        UnreportedEnd::Stalled => true,
        UnreportedEnd::NodeLost => {
            let others_start = others.iter().any(|other| other.job != attempt.job && !other.has_first_token);
            !attempt.has_first_token || !others_start
        }
        UnreportedEnd::NotAccepted => !others.iter().any(|other| {
            other.job != attempt.job
                && other.accepted_ms.is_none()
                && other.placed_ms <= attempt.placed_ms
                && last_accepted_ms.is_none_or(|accepted| accepted < other.placed_ms)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::new_id;

    fn attempt(placed_ms: i64, accepted_ms: Option<i64>, has_first_token: bool) -> BootAttempt {
        BootAttempt { job: new_id(), placed_ms, accepted_ms, has_first_token }
    }

    #[test]
    fn starting_attempts_are_suspected_before_generating_ones() {
        let (placed, prefill) = (attempt(9, None, false), attempt(8, Some(9), false));
        let (generating, second) = (attempt(1, Some(2), true), attempt(1, Some(2), true));
        let lost =
            |this: BootAttempt, others: &[BootAttempt]| is_suspect(UnreportedEnd::NodeLost, &this, others, Some(9));
        assert!(lost(placed, &[generating]) && lost(prefill, &[generating, placed]));
        assert!(!lost(generating, &[placed]) && !lost(generating, &[second, prefill]));
        assert!(lost(generating, &[second]), "without a starting attempt, every generating one is suspected");
        assert!(lost(generating, &[]), "alone on its node");
    }

    #[test]
    fn first_unaccepted_order_is_suspected_and_not_those_that_wait_behind_it() {
        let (first, behind) = (attempt(10, None, false), attempt(11, None, false));
        let unaccepted = |this, other, accepted| is_suspect(UnreportedEnd::NotAccepted, &this, &[other], accepted);
        assert!(unaccepted(first, behind, Some(9)));
        assert!(!unaccepted(behind, first, Some(9)));
        assert!(!unaccepted(behind, first, None), "the boot never accepted anything");
        assert!(
            unaccepted(behind, first, Some(12)),
            "the node accepted work after the first order, so it is not blocked"
        );
        let own = BootAttempt { job: behind.job, ..first };
        assert!(unaccepted(behind, own, None), "an earlier attempt of the same job");
    }

    #[test]
    fn stall_is_suspicious_and_infrastructure_is_not() {
        let (this, other) = (attempt(1, Some(2), true), attempt(1, None, false));
        assert!(is_suspect(UnreportedEnd::Stalled, &this, &[other], None));
        assert!(!is_suspect(UnreportedEnd::Infrastructure, &this, &[], None));
    }
}
