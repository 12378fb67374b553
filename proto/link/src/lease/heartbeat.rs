//! The heartbeat loop.

use std::time::{Duration, Instant};

use cfq_proto::ids::BootId;
use cfq_proto::messages::{Heartbeat, HeartbeatReply};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;

use super::{HeartbeatExtras, Shared};
use crate::link_error::LinkError;
use crate::session::{NatsConfig, Session};

/// Wait between two attempts to connect.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Wait after a change before the heartbeat that reports it, so that several changes within this time share one
/// heartbeat.
const HEARTBEAT_COALESCE_DELAY: Duration = Duration::from_millis(5);

/// Connects, then sends heartbeats until this future is dropped.
pub(super) async fn run(
    shared: &Shared,
    nats: NatsConfig,
    identity: Identity,
    boot: BootId,
    subject: String,
    timing: Timing,
    extras: impl Fn() -> HeartbeatExtras,
) {
    let session = loop {
        match Session::connect(&nats, identity.clone(), &timing).await {
            Ok(session) => break session,
            Err(error) => {
                tracing::warn!(%error, "heartbeat cannot connect to nats, retrying");
                tokio::time::sleep(CONNECT_RETRY_INTERVAL).await;
            }
        }
    };
    loop {
        let (sent, sent_at) = (Instant::now(), shared.now());
        let next_deadline = shared.table().suspend_overdue(sent_at);
        let HeartbeatExtras { ledger, devices } = extras();
        let heartbeat = Heartbeat { boot, held: shared.table().held(sent), ledger, devices };
        // The wait for a reply is so short that, if the reply is lost, another heartbeat can be sent before the lease
        // expires.
        let reply = async {
            let request = session.request::<_, HeartbeatReply>(&subject, &heartbeat);
            match tokio::time::timeout(timing.lease_ttl() / 2, request).await {
                Ok(reply) => reply,
                Err(_) => Err(LinkError::NoReply { subject: subject.clone() }),
            }
        };
        let overdue = async {
            match next_deadline {
                Some(at) => tokio::time::sleep(at.saturating_duration_since(sent_at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(reply);
        tokio::select! {
            reply = &mut reply => apply(shared, reply, sent_at),
            () = overdue => {
                shared.table().suspend_overdue(shared.now());
                let reply = reply.await;
                apply(shared, reply, sent_at);
            }
        }
        let next = (sent + timing.heartbeat()).into();
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = async {
                shared.heartbeat_now.notified().await;
                tokio::time::sleep(HEARTBEAT_COALESCE_DELAY).await;
            } => {}
        }
    }
}

/// Applies the reply to a heartbeat. `sent` is the time at which the heartbeat was sent, on the clock of
/// [`Shared::now`].
pub(super) fn apply(shared: &Shared, reply: Result<HeartbeatReply, LinkError>, sent: Instant) {
    match reply {
        Ok(reply) => {
            shared.table().apply(&reply, shared.deadline_after(sent));
            if reply.register_again {
                shared.registration_requests.send_modify(|n| *n += 1);
            }
        }
        Err(error) => tracing::warn!(%error, "heartbeat not confirmed"),
    }
    shared.table().suspend_overdue(shared.now());
}
