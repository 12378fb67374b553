//! Nodes on other machines: they are added and removed while the server runs.

use cfq_link::child::{Process, Signal};
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

/// The nodes on other machines, and the server that has to know them.
#[derive(Debug, Default)]
pub(super) struct RemoteState {
    pub nodes: Vec<RemoteNode>,
    /// The running server; `None` while it starts, which then reads the nodes at the end of its start.
    pub running: Option<Process>,
}

/// The nodes on other machines that may connect.
#[derive(Debug, Clone)]
pub struct RemoteNodes(Nats);

impl RemoteNodes {
    pub(super) fn new(nats: Nats) -> Self {
        Self(nats)
    }

    /// Replaces the nodes. A running server reads them within a moment, and closes the connections of nodes that may not
    /// connect any more. If it fails, the nodes before stay, and the call can be repeated.
    pub fn set(&self, nodes: Vec<RemoteNode>) -> Result<(), NatsError> {
        let mut remote = lock(&self.0.remote);
        if remote.nodes == nodes {
            return Ok(());
        }
        let stored = serde_json::to_vec(&nodes).unwrap_or_default();
        files::write_private(&self.0.remote_file, &stored, None)?;
        if let Some(process) = &remote.running {
            self.0.write_config(&nodes)?;
            process.signal(Signal::Hangup)?;
        }
        remote.nodes = nodes;
        Ok(())
    }
}
