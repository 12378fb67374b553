//! Keeps the JetStream stream of work orders and the nodes' consumers in place, in a task of its own: JetStream may
//! refuse or not answer, for example when its disk is full, and nothing else waits for it.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use crate::bus::stream;
use crate::store::limited;

/// Handle to the task. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct WorkStream {
    repair: Arc<Notify>,
}

impl WorkStream {
    /// Has the consumers checked soon, because work orders do not arrive.
    pub fn repair(&self) {
        self.repair.notify_one();
    }

    /// Checks the stream at intervals, and its consumers when the stream was created or [`Self::repair`] was called.
    pub async fn run(self, leader: Leader) {
        let mut checks = interval(leader.store.timing().sweep());
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_logged = false;
        loop {
            let is_repair = tokio::select! {
                _ = checks.tick() => false,
                () = self.repair.notified() => true,
            };
            match stream::ensure(&leader.session).await {
                Ok(is_new) => {
                    is_logged = false;
                    if is_new || is_repair {
                        ensure_consumers(&leader).await;
                    }
                }
                Err(error) if is_logged => tracing::debug!(%error, "work stream still unavailable"),
                Err(error) => {
                    let cause = std::error::Error::source(&error);
                    tracing::warn!(%error, ?cause, "cannot use the work stream: no job reaches a node until it is back");
                    is_logged = true;
                }
            }
        }
    }
}

/// Makes sure that every node has its consumer.
async fn ensure_consumers(leader: &Leader) {
    let nodes = match limited("reading the nodes", leader.store.core_nodes()).await {
        Ok(nodes) => nodes,
        Err(error) => return tracing::warn!(%error, "cannot read the nodes"),
    };
    for node in nodes {
        if let Err(error) = stream::ensure_consumer(&leader.session, &node.id, node.boot).await {
            let cause = std::error::Error::source(&error);
            tracing::warn!(node = %node.id, %error, ?cause, "cannot create the node's consumer");
        }
    }
}
