//! What nodes ask.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cfq_link::LinkError;
use cfq_link::stop::Stop;
use cfq_proto::ids::NodeId;
use cfq_proto::messages::{
    Accept, Beat, BeatReply, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, HelloReply, JobReport, Journal,
    NodeHello, Refuse,
};
use cfq_proto::subject;
use tokio::task::JoinSet;

use super::{Bus, reason, stream};
use crate::store::{Hint, LeaderHint, StoreError};

pub(super) async fn serve(bus: &Arc<Bus>, loops: &mut JoinSet<()>, stop: &Stop) -> Result<(), LinkError> {
    bus.answer(loops, stop, "node", "beat", beat).await?;
    bus.answer(loops, stop, "node", "hello", hello).await?;
    bus.answer(loops, stop, "node", "accept", accept).await?;
    bus.answer(loops, stop, "node", "refuse", refuse).await?;
    bus.answer(loops, stop, "node", "journal", journal).await?;
    bus.answer(loops, stop, "node", "result", result).await?;
    bus.answer(loops, stop, "node", "blob_put", blob_put).await?;
    bus.answer(loops, stop, "node", "blob_get", blob_get).await
}

async fn hello(bus: Arc<Bus>, sender: String, hello: NodeHello) -> Option<HelloReply> {
    if hello.node.as_str() != sender {
        let reason = format!("{sender} cannot say hello as {}", hello.node);
        return Some(HelloReply::Refused { reason });
    }
    if let Some(reason) = too_old(&hello.version) {
        return Some(HelloReply::Refused { reason });
    }
    let greeting = match bus.store.node_hello(&hello).await {
        Ok(Some(greeting)) => greeting,
        Ok(None) => return Some(HelloReply::Refused { reason: later_boot(&sender) }),
        Err(error) => {
            reason(&error, "node hello");
            return None;
        }
    };
    // The consumer exists before the node hears that it may pull.
    if let Err(error) =
        stream::ensure_consumer(&bus.session, &hello.node, hello.boot, bus.store.timing(), greeting.new_boot).await
    {
        tracing::warn!(node = %hello.node, %error, "cannot make the node's consumer yet");
        return None;
    }
    tracing::info!(node = %hello.node, boot = %hello.boot, version = hello.version, "node joined");
    bus.link.tell(greeting.hints).await;
    Some(HelloReply::Welcome { consumer: subject::consumer(&hello.node) })
}

async fn beat(bus: Arc<Bus>, sender: String, beat: Beat) -> Option<BeatReply> {
    let node: NodeId = sender.parse().ok()?;
    match bus.beats.node_beat(&node, &beat).await {
        Ok(reply) => {
            bus.link.tell(vec![Hint::Leader(LeaderHint::Node(node))]).await;
            Some(reply)
        }
        Err(error) => {
            reason(&error, "node beat");
            None
        }
    }
}

async fn accept(bus: Arc<Bus>, sender: String, ask: Accept) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.accept(&node, &ask).await;
    Some(fenced(&bus, "accept", answer).await)
}

async fn refuse(bus: Arc<Bus>, sender: String, ask: Refuse) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.refuse(&node, &ask).await;
    Some(fenced(&bus, "refuse", answer).await)
}

async fn journal(bus: Arc<Bus>, sender: String, ask: Journal) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.journal(&node, &ask).await.map(|reply| (reply, vec![]));
    Some(fenced(&bus, "journal", answer).await)
}

async fn result(bus: Arc<Bus>, sender: String, ask: JobReport) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.report(&node, &ask).await;
    Some(fenced(&bus, "result", answer).await)
}

/// The same request may be served later, by this scheduler or another.
pub(super) fn may_pass(error: &StoreError) -> bool {
    error.may_retry() || matches!(error, StoreError::NotLeader { .. })
}

pub(super) async fn fenced(
    bus: &Bus,
    doing: &'static str,
    answer: Result<(FenceReply, Vec<Hint>), StoreError>,
) -> FenceReply {
    match answer {
        Ok((reply, hints)) => {
            bus.link.tell(hints).await;
            reply
        }
        Err(error) if may_pass(&error) => FenceReply::Unavailable { reason: reason(&error, doing) },
        Err(error) => FenceReply::Refused { reason: reason(&error, doing) },
    }
}

pub(super) async fn blob_put(bus: Arc<Bus>, sender: String, put: BlobPut) -> Option<BlobPutReply> {
    use crate::store::Put;
    let Ok(data) = BASE64_STANDARD.decode(&put.data) else {
        return Some(BlobPutReply::Refused { reason: format!("{sender} sent a chunk that is not base64") });
    };
    Some(match bus.store.blob_put(put.lease, &put.hash, put.size, put.index, &data).await {
        Ok(Put::Kept) => BlobPutReply::Kept,
        Ok(Put::Refused(reason)) => BlobPutReply::Refused { reason },
        Err(error) => BlobPutReply::Unavailable { reason: reason(&error, "blob put") },
    })
}

pub(super) async fn blob_get(bus: Arc<Bus>, _sender: String, get: BlobGet) -> Option<BlobGetReply> {
    Some(match bus.store.blob_get(get.lease, &get.hash, get.index).await {
        Ok(Some((size, data))) => BlobGetReply::Chunk { size, data: BASE64_STANDARD.encode(data) },
        Ok(None) => BlobGetReply::Refused { reason: "no such chunk, or not for this lease".into() },
        Err(error) => BlobGetReply::Unavailable { reason: reason(&error, "blob get") },
    })
}

/// Messages only grow within a minor version; an older one may lack what this build relies on.
pub(super) fn too_old(version: &str) -> Option<String> {
    let own = env!("CARGO_PKG_VERSION");
    let minor = |v: &str| {
        let mut parts = v.split('.').map(|p| p.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    };
    let (theirs, ours) = (minor(version)?, minor(own)?);
    (theirs < ours)
        .then(|| format!("cfq {version} is older than the scheduler's {own}: install {own} there and start it again"))
}

/// Two processes under one name would take turns in losing their leases.
pub(super) fn later_boot(name: &str) -> String {
    format!("a later start of {name} is up: stop one of the two, or give this one another name")
}

#[cfg(test)]
mod tests {
    use super::too_old;

    #[test]
    fn only_an_older_minor_version_is_refused() {
        assert_eq!(too_old(env!("CARGO_PKG_VERSION")), None);
        assert_eq!(too_old("99.0.0"), None);
        let reason = too_old("0.0.9").unwrap();
        assert!(reason.contains("0.0.9") && reason.contains("install"), "{reason}");
    }
}
