//! Order of the queue: each job has one key, its creation time plus 10 minutes for each class below P0. The smallest key
//! is placed first.
//!
//! All jobs age at the same rate, so the order of two jobs never changes, and no timer is needed. A job of one class is
//! placed before a job of the next higher class that was created 10 minutes later: this is the ageing that prevents
//! starvation. A deadline brings a job forward to 10 minutes before the deadline, but by at most one class.
//!
//! **Worst wait.** A P3 job without a deadline comes after a P0 job with an urgent one that was created up to
//! [`MAX_OVERTAKING_MS`] (40 minutes) later, and before all jobs that were created after that. Its wait is therefore at
//! most 40 minutes plus the time that the nodes with its model need for the work that is in the queue by then.

use cfq_proto::ids::JobId;

use crate::job::Job;

/// Time by which each class comes after the one above it, in ms; also the maximum effect of a deadline.
pub const CLASS_STEP_MS: i64 = 10 * 60 * 1000;
/// No job is overtaken by a job that was created more than this time after it, in ms.
pub const MAX_OVERTAKING_MS: i64 = 4 * CLASS_STEP_MS;

/// Position of a job in the queue. The id breaks ties, so the order is total and the same in every process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderKey {
    key_ms: i64,
    id: JobId,
}

impl OrderKey {
    /// The job with this position.
    pub fn job(self) -> JobId {
        self.id
    }
}

/// Returns the job's position in the queue; the smallest is placed first. A deadline brings the key forward to one class
/// before the deadline, but by at most one class.
pub fn order_key(job: &Job) -> OrderKey {
    let class_ms = i64::from(job.priority.as_i16()) * CLASS_STEP_MS;
    let base_ms = job.created_ms.saturating_add(class_ms);
    let by_deadline_ms = job.deadline_ms.map_or(base_ms, |deadline_ms| deadline_ms.saturating_sub(CLASS_STEP_MS));
    OrderKey { key_ms: by_deadline_ms.clamp(base_ms.saturating_sub(CLASS_STEP_MS), base_ms), id: job.id }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::job;
    use cfq_proto::task::Priority;
    use proptest::prelude::*;

    const MINUTE_MS: i64 = 60_000;

    #[test]
    fn class_then_age_decides() {
        let key = |priority, created_ms| order_key(&job(priority, created_ms));
        assert!(key(Priority::P0, 100) < key(Priority::P1, 0));
        assert!(key(Priority::P2, 0) < key(Priority::P2, 50));
        assert!(key(Priority::P3, 0) < key(Priority::P2, 10 * MINUTE_MS + 1), "it is older by a class");
        assert!(key(Priority::P2, 10 * MINUTE_MS - 1) < key(Priority::P3, 0));
    }

    #[test]
    fn deadline_brings_forward_by_at_most_one_class() {
        let due = |after_ms| order_key(&Job { deadline_ms: Some(after_ms), ..job(Priority::P2, 0) }).key_ms;
        let keys = [i64::MIN, -1, 20 * MINUTE_MS, 25 * MINUTE_MS, 30 * MINUTE_MS, i64::MAX].map(due);
        assert_eq!(keys, [10, 10, 10, 15, 20, 20].map(|minutes| minutes * MINUTE_MS));
    }

    proptest! {
        /// The worst wait that the documentation states.
        #[test]
        fn no_job_is_overtaken_by_one_created_much_later(
            classes in (0i16..4, 0i16..4), deadlines in (any::<Option<i64>>(), any::<Option<i64>>()),
            created_ms in 0i64..1_000_000_000_000, later_ms in 1i64..1_000_000_000,
        ) {
            let with = |class, deadline_ms, created_ms| {
                order_key(&Job { deadline_ms, ..job(Priority::try_from(class).unwrap(), created_ms) })
            };
            let first = with(classes.0, deadlines.0, created_ms);
            prop_assert!(first < with(classes.1, deadlines.1, created_ms + MAX_OVERTAKING_MS + later_ms));
        }
    }
}
