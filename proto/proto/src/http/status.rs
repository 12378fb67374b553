//! Types for the state of the whole cluster.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, TaskNumber};
use crate::job::JobState;
use crate::task::TaskState;

/// Reply to `GET /status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterStatus {
    /// cfq version of the scheduler that answers.
    pub version: String,
    /// Time since that scheduler started, in seconds.
    pub uptime_s: f64,
    /// Why tasks are not executed, as text; `None` if they can be: a scheduler leads, NATS is connected, and at least
    /// one runner and one node send heartbeats. In the first 15 s, the scheduler does not miss runners and nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// Number of tasks that have not ended, by state.
    pub tasks: BTreeMap<TaskState, u64>,
    /// Number of failed tasks that are neither acknowledged nor retried.
    #[serde(default)]
    pub unacknowledged_failures: u64,
    /// Number of jobs that have not ended, and of dead letters, by state; without the queued jobs of paused tasks.
    pub jobs: BTreeMap<JobState, u64>,
    /// The queued job that was created first; jobs of paused tasks are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_queued_job: Option<QueuedJob>,
    /// Number of nodes whose heartbeats arrive.
    pub nodes_alive: u32,
    /// Nodes whose heartbeats do not arrive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes_unreachable: Vec<NodeId>,
    /// Number of runners whose heartbeats arrive.
    #[serde(default)]
    pub runners_alive: u32,
}

impl ClusterStatus {
    /// The number of tasks in these states.
    pub fn tasks_in(&self, states: &[TaskState]) -> u64 {
        states.iter().filter_map(|state| self.tasks.get(state)).sum()
    }

    /// The number of jobs in this state.
    pub fn jobs_in(&self, state: JobState) -> u64 {
        self.jobs.get(&state).copied().unwrap_or(0)
    }
}

/// A queued job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QueuedJob {
    /// Number of the job's task.
    #[serde(rename = "number", alias = "task")]
    pub task: TaskNumber,
    /// Time since the job was created, in seconds.
    pub age_s: f64,
    /// Why the job waits, as text.
    pub reason: String,
}
