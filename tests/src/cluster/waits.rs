//! Waits for a state of a test cluster or of a task, each up to [`WAIT_LIMIT`].

use cfq_proto::http::{NodeView, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;

use super::{Cluster, WAIT_LIMIT, tail};
use crate::wait;

impl Cluster {
    /// Waits until the API is ready and every node has loaded all its models or found them on disk.
    pub async fn wait_until_ready(&self) {
        wait::until("the API to be ready", WAIT_LIMIT, || async {
            self.client.check_ready().await.map_err(|e| format!("{e}; {}", tail(&self.log("scheduler"))))
        })
        .await;
        wait::until("all nodes and their models", WAIT_LIMIT, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            if nodes.len() < if self.options.second_node { 2 } else { 1 } {
                return Err(format!("{} nodes; {}", nodes.len(), tail(&self.log("node"))));
            }
            let settled = |residency: &Residency| matches!(residency, Residency::Resident | Residency::Available);
            let unready = |n: &&NodeView| {
                !n.alive || n.ledger.models.is_empty() || n.ledger.models.iter().any(|m| !settled(&m.residency))
            };
            nodes.iter().find(unready).map_or(Ok(()), |node| Err(format!("{node:?}")))
        })
        .await;
    }

    /// Waits until the runners of a new cluster send heartbeats.
    pub(super) async fn wait_until_runners_alive(&self) {
        let runners = if self.options.second_runner { 2 } else { 1 };
        wait::until("all runners", WAIT_LIMIT, || async {
            let status = self.client.status().await.map_err(|e| e.to_string())?;
            if status.runners_alive == runners {
                Ok(())
            } else {
                Err(format!("{status:?}; {}", tail(&self.log("runner"))))
            }
        })
        .await;
    }

    /// Waits until the scheduler has swept the task's lease, that is, taken it from its runner.
    pub async fn wait_until_lease_swept(&self, task: TaskKey) {
        wait::until("the lease to be swept", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.runner.is_none() { Ok(()) } else { Err(format!("{:?} holds it", detail.runner)) }
        })
        .await;
    }

    /// Waits until a job of the task was lost with its node.
    pub async fn wait_until_job_lost(&self, task: TaskKey) {
        wait::until("a lost job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.jobs.iter().any(|j| j.losses > 0) { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
        })
        .await;
    }

    /// Waits until the task is in a terminal state or waits for a human.
    pub async fn wait_until_settled(&self, task: TaskKey) -> TaskDetail {
        wait::until("the task to end or wait for a human", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state.is_settled() { Ok(detail) } else { Err(self.diagnostics(&detail)) }
        })
        .await
    }

    /// Waits until the task is in the given state.
    pub async fn wait_for_state(&self, task: TaskKey, state: TaskState) -> TaskDetail {
        wait::until(&format!("the task to be {state}"), WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state == state { Ok(detail) } else { Err(self.diagnostics(&detail)) }
        })
        .await
    }

    /// Waits until a job of the task runs on a node.
    pub async fn wait_until_generating(&self, task: TaskKey) {
        wait::until("a running job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let running = detail.jobs.iter().any(|j| j.state == JobState::Running);
            if running { Ok(()) } else { Err(self.diagnostics(&detail)) }
        })
        .await;
    }

    /// Waits until a job of the task is queued.
    pub async fn wait_until_queued(&self, task: TaskKey) {
        wait::until("a queued job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let queued = detail.jobs.iter().any(|j| j.state == JobState::Queued);
            if queued { Ok(()) } else { Err(self.diagnostics(&detail)) }
        })
        .await;
    }

    /// Waits until no node runs a job and no model runs a sequence.
    pub async fn wait_until_nodes_idle(&self) {
        wait::until("idle nodes", WAIT_LIMIT, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            let running: u32 = nodes.iter().flat_map(|n| &n.ledger.models).map(|m| m.running).sum();
            if running == 0 && nodes.iter().all(|n| n.running == 0) { Ok(()) } else { Err(format!("{nodes:?}")) }
        })
        .await;
    }
}
