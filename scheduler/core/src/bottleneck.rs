//! Bottlenecks: tasks for which several others wait, directly or indirectly. They are raised by one priority class once,
//! so that what waits for them starts earlier.

use cfq_proto::task::Priority;

/// Number of waiting tasks from which a task is a bottleneck. Counting stops at this number.
pub const BOTTLENECK_DEPENDENTS: usize = 3;

/// Returns the priority of a bottleneck that had `priority`: one class higher, if there is one.
pub fn bottleneck_priority(priority: Priority) -> Priority {
    match priority {
        Priority::P0 | Priority::P1 => Priority::P0,
        Priority::P2 => Priority::P1,
        Priority::P3 => Priority::P2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bottleneck_is_raised_by_one_class() {
        for (before, after) in [(0, 0), (1, 0), (2, 1), (3, 2)] {
            let priority = |n| Priority::try_from(n).unwrap();
            assert_eq!(bottleneck_priority(priority(before)), priority(after), "P{before}");
        }
    }
}
