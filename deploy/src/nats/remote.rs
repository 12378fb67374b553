//! Nodes on other machines: they are added and removed while the server runs.

use cfq_link::child::Signal;
use cfq_proto::ids::NodeId;
use serde::{Deserialize, Serialize};

use super::{Nats, NatsError, lock};
use crate::files;

/// A node on another machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteNode {
    pub name: NodeId,
    /// Its public nkey.
    pub key: String,
}

/// The nodes on other machines that may connect.
#[derive(Debug, Clone)]
pub struct RemoteNodes(Nats);

impl RemoteNodes {
    pub(super) fn new(nats: Nats) -> Self {
        Self(nats)
    }

    /// Replaces the nodes. A running server reads them at once, and closes the connections of nodes that may not connect
    /// any more. If it fails, the nodes before stay, and the call can be repeated.
    pub fn set(&self, nodes: Vec<RemoteNode>) -> Result<(), NatsError> {
        let before = lock(&self.0.remote).clone();
        if before == nodes {
            return Ok(());
        }
        let stored = serde_json::to_vec(&nodes).unwrap_or_default();
        *lock(&self.0.remote) = nodes;
        let applied = self.apply(&stored);
        if applied.is_err() {
            *lock(&self.0.remote) = before;
        }
        applied
    }

    fn apply(&self, stored: &[u8]) -> Result<(), NatsError> {
        files::write_private(&self.0.remote_file, stored, None)?;
        self.0.write_config()?;
        // A server that is starting has read the file, or is started again if it has not.
        if let Some(process) = &*lock(&self.0.running) {
            process.signal(Signal::Hangup)?;
        }
        Ok(())
    }
}
