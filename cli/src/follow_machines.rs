//! Writes the keys of the machines that joined into NATS's configuration, and removes those of revoked machines.

use std::time::Duration;

use cfq_deploy::nats::{RemoteNode, RemoteNodes};
use cfq_proto::client::Client;
use cfq_proto::http::MachineView;
use cfq_proto::ids::NodeId;
use tokio::task::JoinHandle;

/// Interval between two reads of the machines that may connect.
const INTERVAL: Duration = Duration::from_secs(1);

/// The task that keeps the keys up to date; it ends when this is dropped.
pub struct FollowMachines(JoinHandle<()>);

impl FollowMachines {
    /// `own` is the node of this machine, which no other machine may act for.
    pub fn start(client: Client, nodes: RemoteNodes, own: NodeId) -> Self {
        Self(tokio::spawn(follow(client, nodes, own)))
    }
}

impl Drop for FollowMachines {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn follow(client: Client, nodes: RemoteNodes, own: NodeId) {
    let mut is_reported = false;
    loop {
        match client.machines().await {
            Ok(machines) => {
                let may_connect = |machine: &MachineView| machine.revoked_at.is_none() && machine.name != own;
                let remote = |machine: MachineView| RemoteNode { name: machine.name, key: machine.nats_key };
                match nodes.set(machines.into_iter().filter(may_connect).map(remote).collect()) {
                    Ok(()) => is_reported = false,
                    Err(error) if !is_reported => {
                        tracing::error!(%error, "cannot update the keys that NATS accepts");
                        is_reported = true;
                    }
                    Err(_) => {}
                }
            }
            // The scheduler restarts, or has no database at the moment.
            Err(error) => tracing::debug!(%error, "cannot read which machines joined"),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
