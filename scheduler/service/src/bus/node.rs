//! Handlers for the NATS requests of nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cfq_link::LinkError;
use cfq_link::stop::Stop;
use cfq_proto::ids::NodeId;
use cfq_proto::messages::{
    Accept, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, Heartbeat, HeartbeatReply, JobResult, Journal,
    ModelReply, NodeCommand, NodeRegistration, Preparing, Refuse, RegisterReply,
};
use cfq_proto::model::ModelId;
use cfq_proto::subject;
use tokio::task::JoinSet;

use super::{Bus, log_failure, refusal, stream, unavailable};
use crate::store::{BlobLease, Hint, IdInUse, LeaderHint, PutOutcome, StoreError};
use crate::version;

pub(super) async fn serve(bus: &Arc<Bus>, loops: &mut JoinSet<()>, stop: &Stop) -> Result<(), LinkError> {
    bus.answer(loops, stop, "node", "heartbeat", heartbeat).await?;
    bus.answer(loops, stop, "node", "register", register).await?;
    bus.answer(loops, stop, "node", FORMER_REGISTER, refuse_former_register).await?;
    bus.answer(loops, stop, "node", "preparing", preparing).await?;
    bus.answer(loops, stop, "node", "accept", accept).await?;
    bus.answer(loops, stop, "node", "refuse", refuse).await?;
    bus.answer(loops, stop, "node", "journal", journal).await?;
    bus.answer(loops, stop, "node", "result", result).await?;
    bus.answer(loops, stop, "node", "blob_put", blob_put).await?;
    bus.answer(loops, stop, "node", "blob_get", blob_get).await
}

async fn register(bus: Arc<Bus>, sender: String, registration: NodeRegistration) -> Option<RegisterReply> {
    if registration.node.as_str() != sender {
        let name = &registration.node;
        let reason = format!("{sender} cannot register as {name}: give it the NATS credentials of that name");
        return Some(RegisterReply::Refused { reason, retry_ms: None });
    }
    if let Some(reason) = version::refusal(&registration.version) {
        return Some(RegisterReply::Refused { reason, retry_ms: None });
    }
    if !registration.receives_pushed_orders {
        return Some(RegisterReply::Refused { reason: older_build_refusal(&sender), retry_ms: None });
    }
    let registered = match bus.store.register_node(&registration).await {
        Ok(Ok(registered)) => registered,
        Ok(Err(in_use)) => return Some(refuse_used_id(&sender, in_use)),
        Err(error) => {
            log_failure(&error, "node register");
            return None;
        }
    };
    // An order that is published before its consumer exists is lost.
    let NodeRegistration { node, boot, version, .. } = &registration;
    if let Err(error) = stream::ensure_consumer(&bus.session, node, *boot).await {
        let cause = std::error::Error::source(&error);
        tracing::warn!(%node, %error, ?cause, "cannot create the node's consumer");
        return None;
    }
    if let Some(former) = registered.former_boot {
        bus.metrics.node_starts.with_label_values(&[node.as_str()]).inc();
        stream::delete_consumer(&bus.session, node, former).await;
    }
    tracing::info!(%node, %boot, version, "node registered");
    bus.link.send_hints(registered.hints).await;
    tokio::spawn(offer_agent_models(bus.clone(), node.clone()));
    Some(RegisterReply::Registered { consumer: subject::consumer(node, *boot), pushes_orders: true })
}

/// Asks a node that has started to use the models that users set for the agents, where no file has to be loaded. It
/// refuses those whose server or program it does not know.
async fn offer_agent_models(bus: Arc<Bus>, node: NodeId) {
    let overrides = match bus.store.agent_overrides().await {
        Ok(overrides) => overrides,
        Err(error) => return log_failure(&error, "settings of the agents"),
    };
    let models: BTreeSet<ModelId> =
        overrides.into_values().filter_map(|set| set.model).filter(|model| !model.is_file()).collect();
    for model in models {
        let load = NodeCommand::Load { model: model.clone() };
        let reply = bus.session.request::<_, ModelReply>(&subject::node_command(&node), &load).await;
        tracing::debug!(%node, %model, ?reply, "offered the model of an agent");
    }
}

async fn heartbeat(bus: Arc<Bus>, sender: String, heartbeat: Heartbeat) -> Option<HeartbeatReply> {
    let node: NodeId = sender.parse().ok()?;
    let recorded = bus.heartbeats.record_node_heartbeat(&node, &heartbeat).await;
    bus.heartbeat_failures.on_node(&node, !recorded.as_ref().is_err_and(StoreError::may_retry));
    match recorded {
        Ok(reply) => {
            bus.link.send_hints(vec![Hint::Leader(LeaderHint::Node(node))]).await;
            Some(reply)
        }
        Err(error) => {
            log_failure(&error, "node heartbeat");
            None
        }
    }
}

async fn preparing(bus: Arc<Bus>, sender: String, request: Preparing) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.preparing(&node, &request).await;
    Some(fence_reply(&bus, "preparing", answer).await)
}

async fn accept(bus: Arc<Bus>, sender: String, request: Accept) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.accept(&node, &request).await;
    Some(fence_reply(&bus, "accept", answer).await)
}

async fn refuse(bus: Arc<Bus>, sender: String, request: Refuse) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.refuse(&node, &request).await;
    Some(fence_reply(&bus, "refuse", answer).await)
}

async fn journal(bus: Arc<Bus>, sender: String, request: Journal) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.append_journal(&node, &request).await.map(|reply| (reply, vec![]));
    Some(fence_reply(&bus, "journal", answer).await)
}

async fn result(bus: Arc<Bus>, sender: String, request: JobResult) -> Option<FenceReply> {
    let node: NodeId = sender.parse().ok()?;
    let answer = bus.store.record_result(&node, &request).await.map(|recorded| {
        if let Some(ended) = &recorded.ended {
            bus.metrics.attempts.observe(&node, ended);
        }
        (recorded.reply, recorded.hints)
    });
    Some(fence_reply(&bus, "result", answer).await)
}

/// Whether the same request may succeed later, on this scheduler or on another one.
pub(super) fn may_succeed_later(error: &StoreError) -> bool {
    error.may_retry() || matches!(error, StoreError::NotLeader { .. })
}

/// Converts the store's result to a reply, and sends the hints that the result contains.
pub(super) async fn fence_reply(
    bus: &Bus,
    doing: &'static str,
    answer: Result<(FenceReply, Vec<Hint>), StoreError>,
) -> FenceReply {
    match answer {
        Ok((reply, hints)) => {
            bus.link.send_hints(hints).await;
            reply
        }
        Err(error) if may_succeed_later(&error) => FenceReply::Unavailable { reason: unavailable(&error, doing) },
        Err(error) => FenceReply::Refused { reason: refusal(&error, doing) },
    }
}

async fn blob_put(bus: Arc<Bus>, sender: String, put: BlobPut) -> Option<BlobPutReply> {
    let lease = BlobLease::Node(sender.parse().ok()?, put.lease);
    Some(put_chunk(&bus, &lease, &put).await)
}

async fn blob_get(bus: Arc<Bus>, sender: String, get: BlobGet) -> Option<BlobGetReply> {
    let lease = BlobLease::Node(sender.parse().ok()?, get.lease);
    Some(get_chunk(&bus, &lease, &get).await)
}

/// Stores a chunk under the sender's lease.
pub(super) async fn put_chunk(bus: &Bus, lease: &BlobLease, put: &BlobPut) -> BlobPutReply {
    let Ok(data) = BASE64_STANDARD.decode(&put.data) else {
        return BlobPutReply::Refused { reason: "the chunk is not base64".to_owned() };
    };
    match bus.store.blob_put(lease, &put.hash, put.size, put.index, &data).await {
        Ok(PutOutcome::Kept) => BlobPutReply::Kept,
        Ok(PutOutcome::Refused(reason)) => BlobPutReply::Refused { reason },
        Err(error) => BlobPutReply::Unavailable { reason: unavailable(&error, "blob put") },
    }
}

/// Reads a chunk under the sender's lease.
pub(super) async fn get_chunk(bus: &Bus, lease: &BlobLease, get: &BlobGet) -> BlobGetReply {
    match bus.store.blob_get(lease, &get.hash, get.index).await {
        Ok(Some((size, data))) => BlobGetReply::Chunk { size, data: BASE64_STANDARD.encode(data) },
        Ok(None) => BlobGetReply::Refused { reason: "the chunk does not exist, or this lease may not read it".into() },
        Err(error) => BlobGetReply::Unavailable { reason: unavailable(&error, "blob get") },
    }
}

/// Name of the register verb in early builds of 0.1. It is still answered, because such a build would otherwise wait
/// for a reply without reporting why.
pub(super) const FORMER_REGISTER: &str = "hello";

/// Refuses a build that registers with [`FORMER_REGISTER`]: it does not know the other current verbs either.
pub(super) async fn refuse_former_register(
    _bus: Arc<Bus>,
    sender: String,
    _registration: serde_json::Value,
) -> Option<RegisterReply> {
    Some(RegisterReply::Refused { reason: older_build_refusal(&sender), retry_ms: None })
}

fn older_build_refusal(sender: &str) -> String {
    format!("cfq on {sender} is older than the scheduler: install the scheduler's version there, then restart it")
}

/// Refuses a sender whose id another process uses: two processes with one id would take each other's leases.
pub(super) fn refuse_used_id(id: &str, in_use: IdInUse) -> RegisterReply {
    let reason = format!(
        "another process uses the id {id}: stop that process, or give this one another id with credentials of its own"
    );
    tracing::warn!(id, lease_ms = in_use.lease_ms, "registration refused: another process uses the id");
    RegisterReply::Refused { reason, retry_ms: Some(in_use.lease_ms) }
}
