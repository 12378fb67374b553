//! Decides which jobs a node runs concurrently. A job that may be poison (it may have stopped more than one node)
//! shares its node with no other job.

use crate::job::Job;

/// Occupancy of a node by jobs, for the isolation of possible poison jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodeOccupancy {
    /// Number of jobs that are placed or running on the node.
    pub jobs: u32,
    /// True if the node runs a possible poison job or is reserved for one.
    pub exclusive: bool,
}

impl NodeOccupancy {
    /// Returns whether the job may run concurrently with the jobs already on the node.
    pub fn admits(self, job: &Job) -> bool {
        !self.exclusive && (self.jobs == 0 || !job.may_be_poison())
    }

    /// Counts the job as one of the node's.
    pub fn add(&mut self, job: &Job) {
        self.jobs += 1;
        self.exclusive |= job.may_be_poison();
    }
}
