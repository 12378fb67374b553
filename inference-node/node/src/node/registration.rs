//! Registration of the node with the scheduler.

use cfq_link::clock;
use cfq_link::credentials_lock::LeaseWait;
use cfq_proto::messages::{NodeRegistration, RegisterReply};
use cfq_proto::node::Device;
use tokio::sync::watch;

use super::context::NodeContext;
use super::error::Error;

/// Registers the node now and whenever a new registration is requested, and sets `registered` after the first one.
/// Returns when the scheduler refuses this node.
pub(super) async fn run(
    context: &NodeContext,
    devices: &watch::Sender<Vec<Device>>,
    registered: watch::Sender<bool>,
) -> Error {
    let mut requests = context.keeper.registration_requests();
    loop {
        match register(context, devices).await {
            Ok(()) => registered.send_replace(true),
            Err(error) => return error,
        };
        // One registration satisfies all requests so far.
        requests.mark_unchanged();
        tokio::select! {
            () = context.registration_wanted.notified() => {}
            changed = requests.changed() => {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

/// Repeats the registration until a scheduler replies, and while the lease of another process with this node's id may
/// still end.
async fn register(context: &NodeContext, devices: &watch::Sender<Vec<Device>>) -> Result<(), Error> {
    let mut lease_wait = LeaseWait::default();
    loop {
        let body = NodeRegistration {
            node: context.node.clone(),
            boot: context.boot,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            devices: devices.borrow().clone(),
            ledger: context.registry.ledger(),
            machine_boot: clock::machine_boot(),
            credentials_lock: context.credentials_lock.as_ref().map(|lock| lock.id().to_owned()),
            receives_pushed_orders: true,
        };
        match context.session.request::<_, RegisterReply>(&context.subject("register"), &body).await {
            Ok(RegisterReply::Registered { consumer, pushes_orders: true }) => {
                tracing::info!(consumer, "registered");
                context.keeper.heartbeat_now();
                return Ok(());
            }
            Ok(RegisterReply::Registered { pushes_orders: false, .. }) => return Err(Error::OlderScheduler),
            Ok(RegisterReply::Refused { reason, retry_ms: Some(lease_ms) }) => {
                if !lease_wait.wait(lease_ms, &reason, &context.timing).await {
                    return Err(Error::Refused { reason });
                }
            }
            Ok(RegisterReply::Refused { reason, retry_ms: None }) => return Err(Error::Refused { reason }),
            Err(error) => {
                tracing::debug!(%error, "no reply to the registration yet");
                let wait = context.timing.heartbeat() / 4;
                tokio::time::sleep(wait + clock::jitter(wait / 2)).await;
            }
        }
    }
}
