//! Order of the queue: P0 before P1 before P2 before P3; within one class the earliest deadline first, then the oldest
//! job.
//!
//! **Ageing prevents starvation.** A job rises one class every [`AGE_STEP_MS`] (10 minutes), so a P3 competes as P0
//! after half an hour. A job older than [`OVERDUE_MS`] (40 minutes) precedes all younger jobs, whatever their class and
//! deadline, oldest first. No job therefore waits behind work that was submitted more than 40 minutes after it: its
//! wait is at most 40 minutes plus the time that the nodes with its model need for the work that is in the queue by
//! then.

use cfq_proto::ids::JobId;

use crate::job::Job;

/// Age after which a job rises one priority class, in ms.
pub const AGE_STEP_MS: i64 = 10 * 60 * 1000;
/// Age after which a job precedes all younger jobs, in ms.
pub const OVERDUE_MS: i64 = 4 * AGE_STEP_MS;

/// Position of a job in the queue; the smallest rank is placed first. The id breaks ties, so the order is total and the
/// same in every process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    class: i64,
    deadline_ms: i64,
    created_ms: i64,
    id: JobId,
}

/// Returns the rank of a job at `now_ms`.
pub fn rank(job: &Job, now_ms: i64) -> Rank {
    let age = now_ms.saturating_sub(job.created_ms).max(0);
    let (class, deadline_ms) = if age >= OVERDUE_MS {
        (-1, i64::MAX)
    } else {
        let class = (i64::from(job.priority.as_i16()) - age / AGE_STEP_MS).max(0);
        (class, job.deadline_ms.unwrap_or(i64::MAX))
    };
    Rank { class, deadline_ms, created_ms: job.created_ms, id: job.id }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::job;
    use cfq_proto::task::Priority;

    #[test]
    fn class_then_deadline_then_age_decides() {
        let p0 = job(Priority::P0, 100);
        let p3 = job(Priority::P3, 0);
        assert!(rank(&p0, 200) < rank(&p3, 200));
        let mut soon = job(Priority::P2, 100);
        soon.deadline_ms = Some(1_000);
        let older = job(Priority::P2, 0);
        assert!(rank(&soon, 200) < rank(&older, 200));
        assert!(rank(&older, 200) < rank(&job(Priority::P2, 50), 200));
    }

    #[test]
    fn p3_ranks_as_p0_after_30_minutes_and_overdue_ranks_first() {
        let old = job(Priority::P3, 0);
        let now = 3 * AGE_STEP_MS;
        assert!(rank(&old, now) < rank(&job(Priority::P0, now), now));
        let mut urgent = job(Priority::P0, OVERDUE_MS);
        urgent.deadline_ms = Some(0);
        assert!(rank(&urgent, OVERDUE_MS - 1) < rank(&old, OVERDUE_MS - 1));
        assert!(rank(&old, OVERDUE_MS) < rank(&urgent, OVERDUE_MS));
    }
}
