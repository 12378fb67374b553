//! Who goes first. P0 before P1 before P2 before P3; within one class the earliest deadline, then the oldest.
//!
//! **Ageing and the worst wait.** A job climbs one class every [`AGE_STEP_MS`] (10 minutes), so a P3 competes as P0 after
//! half an hour; a job older than [`OVERDUE_MS`] (40 minutes) goes before everything younger, whatever its class and
//! deadline, oldest first. So no job waits behind work that was asked for more than 40 minutes after it: its wait is at most
//! 40 minutes and the time its nodes need for what was already there then.

use cfq_proto::ids::JobId;

use crate::job::Job;

pub const AGE_STEP_MS: i64 = 10 * 60 * 1000;
pub const OVERDUE_MS: i64 = 4 * AGE_STEP_MS;

/// Smaller goes first. The id breaks ties, so the order is total and the same everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    class: i64,
    deadline_ms: i64,
    created_ms: i64,
    id: JobId,
}

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
    use crate::properties::job;
    use cfq_proto::task::Priority;

    #[test]
    fn class_then_deadline_then_age() {
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
    fn a_p3_of_half_an_hour_is_a_p0_and_an_overdue_one_beats_them_all() {
        let old = job(Priority::P3, 0);
        let now = 3 * AGE_STEP_MS;
        assert!(rank(&old, now) < rank(&job(Priority::P0, now), now));
        let mut urgent = job(Priority::P0, OVERDUE_MS);
        urgent.deadline_ms = Some(0);
        assert!(rank(&urgent, OVERDUE_MS - 1) < rank(&old, OVERDUE_MS - 1));
        assert!(rank(&old, OVERDUE_MS) < rank(&urgent, OVERDUE_MS));
    }
}
