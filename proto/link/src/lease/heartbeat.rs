//! The heartbeat loop.

use std::time::{Duration, Instant};

use cfq_proto::ids::BootId;
use cfq_proto::messages::{Heartbeat, HeartbeatReply};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::{HeartbeatExtras, Shared};
use crate::clock;
use crate::link_error::LinkError;
use crate::session::{NatsConfig, Session};

/// Wait between two attempts to connect.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time without a reply after which a heartbeat is sent again; it doubles with each further repetition. It is at most an
/// eighth of the lease TTL.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
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
        let heartbeat = || Heartbeat {
            boot,
            held: shared.table().held(Instant::now()),
            ledger: ledger.clone(),
            devices: devices.clone(),
        };
        let reply = request_repeatedly(shared, &session, &subject, &timing, heartbeat);
        let overdue = async {
            match next_deadline {
                Some(at) => tokio::time::sleep(at.saturating_duration_since(sent_at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(reply);
        tokio::select! {
            (reply, sent_at) = &mut reply => apply(shared, reply, sent_at),
            () = overdue => {
                shared.table().suspend_overdue(shared.now());
                let (reply, sent_at) = reply.await;
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

/// Sends a heartbeat, and sends it again while there is no reply, because NATS may have delivered it to a scheduler that
/// is stopped or hangs. Returns the first reply to any of them, and the time at which that heartbeat was sent, on the
/// clock of [`Shared::now`]. The whole wait is so short that, if all replies are lost, another heartbeat can be sent
/// before the lease expires.
async fn request_repeatedly(
    shared: &Shared,
    session: &Session,
    subject: &str,
    timing: &Timing,
    heartbeat: impl Fn() -> Heartbeat,
) -> (Result<HeartbeatReply, LinkError>, Instant) {
    let end = Instant::now() + timing.lease_ttl() / 2;
    let mut repeat_after = REPEAT_AFTER.min(timing.lease_ttl() / 8);
    let mut waiting = FuturesUnordered::new();
    loop {
        let (sent_at, body, left) = (shared.now(), heartbeat(), end.saturating_duration_since(Instant::now()));
        waiting.push(async move { (session.request_within(subject, &body, left).await, sent_at) });
        let repeat_at = (Instant::now() + repeat_after + clock::jitter(repeat_after / 8)).min(end);
        let wait = async {
            while let Some((reply, sent_at)) = waiting.next().await {
                match reply {
                    // Without a subscriber, this error comes at once.
                    Err(LinkError::NoReply { .. }) => {}
                    reply => return (reply, sent_at),
                }
            }
            std::future::pending().await
        };
        match tokio::time::timeout_at(repeat_at.into(), wait).await {
            Ok(replied) => return replied,
            Err(_) if repeat_at == end => return (Err(LinkError::NoReply { subject: subject.to_owned() }), sent_at),
            Err(_) => repeat_after *= 2,
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
