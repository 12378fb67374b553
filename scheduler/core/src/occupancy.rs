//! Which jobs a node runs concurrently. A suspect job, under which nodes were lost, shares its node with no other job.

use std::collections::BTreeMap;

use cfq_proto::ids::NodeId;

use crate::job::Job;
use crate::state::State;

/// The jobs that a node has, as far as isolation is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodeOccupancy {
    /// Number of jobs placed or running.
    pub jobs: u32,
    /// The node runs a suspect job, or is reserved for one.
    pub exclusive: bool,
}

impl NodeOccupancy {
    /// Returns whether the job may run concurrently with those on the node.
    pub fn admits(self, job: &Job) -> bool {
        !self.exclusive && (self.jobs == 0 || !job.is_suspect())
    }

    /// Counts the job as one of the node's.
    pub fn add(&mut self, job: &Job) {
        self.jobs += 1;
        self.exclusive |= job.is_suspect();
    }
}

/// Occupancy by placed and running jobs. Nodes without a job are absent.
pub(crate) fn node_occupancies(state: &State) -> BTreeMap<&NodeId, NodeOccupancy> {
    let mut occupancies: BTreeMap<&NodeId, NodeOccupancy> = BTreeMap::new();
    for job in state.jobs.values() {
        if let Some((node, _)) = job.holder() {
            occupancies.entry(node).or_default().add(job);
        }
    }
    occupancies
}
