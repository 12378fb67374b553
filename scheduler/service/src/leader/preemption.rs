//! Names the running tasks that ready tasks of P0 preempt, at the interval of the sweep.

use cfq_scheduler_core::preemptions;
use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use crate::store::{Leadership, StoreError, limited};

/// Runs until another scheduler leads.
pub async fn run(leader: Leader, leadership: Leadership) {
    let mut checks = interval(leader.store.timing().sweep());
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        match check(&leader, leadership).await {
            Ok(()) => {}
            Err(StoreError::NotLeader { term }) => {
                tracing::warn!(term, "preemption rejected, another scheduler leads");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "cannot check for preemptions");
            }
        }
    }
}

async fn check(leader: &Leader, leadership: Leadership) -> Result<(), StoreError> {
    let store = &leader.store;
    let tasks = limited("finding tasks to preempt", store.task_queue()).await?;
    for change in preemptions(tasks.free_slots, &tasks.queues, &tasks.running) {
        let named = match limited("naming a task to preempt", store.set_preemption(leadership, &change)).await {
            Err(error) if error.is_row_local() => {
                tracing::warn!(task = %change.victim, %error, "task not named for preemption, retrying");
                continue;
            }
            named => named?,
        };
        match (named, change.by) {
            (true, Some(by)) => tracing::info!(task = %change.victim, %by, "task is preempted after its next step"),
            (true, None) => tracing::info!(task = %change.victim, "preemption withdrawn"),
            (false, _) => tracing::debug!(task = %change.victim, "preemption rejected, the task has changed"),
        }
    }
    Ok(())
}
