//! The JetStream work stream and the nodes' consumers. Placements are durable in Postgres, so the stream may be small,
//! short-lived and even lost: the stream and its consumers are created again, and orders are published again.

use std::time::Duration;

use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, pull},
    context::PublishErrorKind,
    stream::{Config, DiscardPolicy, RetentionPolicy, StorageType},
};
use cfq_link::Session;
use cfq_proto::envelope;
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::WorkOrder;
use cfq_proto::subject;
use cfq_proto::timing::Timing;

/// An order that was not pulled within a minute belongs to an attempt that was replaced long ago.
const MAX_ORDER_AGE: Duration = Duration::from_secs(60);
/// Placement publishes only what a node admits now, so a stream of this size means a fault; new orders are refused.
const MAX_MESSAGES: i64 = 10_000;
const MAX_BYTES: i64 = 128 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("cannot look up or create the work stream: {0}")]
    Stream(String),
    #[error("cannot create the consumer of node {node}: {reason}")]
    Consumer { node: NodeId, reason: String },
    /// The stream does not exist: the JetStream store was lost.
    #[error("the work stream does not exist")]
    Missing,
    #[error("cannot publish an order for node {node}: {reason}")]
    Publish { node: NodeId, reason: String },
}

fn config() -> Config {
    Config {
        name: subject::WORK_STREAM.to_owned(),
        description: Some("work orders for nodes; the durable state is in Postgres".to_owned()),
        subjects: vec![subject::WORK_ALL.to_owned()],
        retention: RetentionPolicy::WorkQueue,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        max_age: MAX_ORDER_AGE,
        max_messages: MAX_MESSAGES,
        max_bytes: MAX_BYTES,
        max_message_size: 1024 * 1024,
        num_replicas: 1,
        // A republished attempt must be delivered; the node detects repeats by their fence.
        duplicate_window: Duration::from_secs(1),
        ..Config::default()
    }
}

/// Creates the stream if it does not exist. True if it was created.
pub async fn ensure(session: &Session) -> Result<bool, StreamError> {
    let context = jetstream::new(session.client().clone());
    match context.get_stream(subject::WORK_STREAM).await {
        Ok(_) => Ok(false),
        Err(error) if matches!(error.kind(), jetstream::context::GetStreamErrorKind::JetStream(_)) => {
            context.create_stream(config()).await.map_err(|e| StreamError::Stream(e.to_string()))?;
            tracing::info!(stream = subject::WORK_STREAM, "created the work stream");
            Ok(true)
        }
        Err(error) => Err(StreamError::Stream(error.to_string())),
    }
}

/// Creates the node's durable consumer on this boot's subject. `recreate` first deletes the consumer of an earlier
/// boot.
pub async fn ensure_consumer(
    session: &Session,
    node: &NodeId,
    boot: BootId,
    timing: &Timing,
    recreate: bool,
) -> Result<(), StreamError> {
    let context = jetstream::new(session.client().clone());
    let name = subject::consumer(node);
    if recreate && let Err(error) = context.delete_consumer_from_stream(&name, subject::WORK_STREAM).await {
        tracing::debug!(%node, %error, "no consumer deleted");
    }
    let wanted = pull::Config {
        durable_name: Some(name),
        filter_subject: subject::work(node, boot),
        ack_policy: AckPolicy::Explicit,
        // The scheduler resends an attempt that is not accepted; this covers a node that pulled a message and lost it.
        ack_wait: (timing.accept() * 2).max(Duration::from_secs(1)),
        max_ack_pending: 1_000,
        ..pull::Config::default()
    };
    let created = context.create_consumer_on_stream(wanted.clone(), subject::WORK_STREAM).await;
    let Err(first) = created else { return Ok(()) };
    // The stream may be missing, or a consumer with another filter may exist.
    ensure(session).await?;
    if let Err(error) = context.delete_consumer_from_stream(subject::consumer(node), subject::WORK_STREAM).await {
        tracing::debug!(%node, %error, "no consumer deleted");
    }
    match context.create_consumer_on_stream(wanted, subject::WORK_STREAM).await {
        Ok(_) => Ok(()),
        Err(second) => Err(StreamError::Consumer { node: node.clone(), reason: format!("{first}; then {second}") }),
    }
}

/// Publishes an order to a boot of a node and waits for the stream's acknowledgement.
pub async fn publish(session: &Session, node: &NodeId, boot: BootId, order: &WorkOrder) -> Result<(), StreamError> {
    let fail = |reason: String| StreamError::Publish { node: node.clone(), reason };
    let context = jetstream::new(session.client().clone());
    let bytes = envelope::encode(order).map_err(|e| fail(e.to_string()))?;
    let classify = |error: jetstream::context::PublishError| match error.kind() {
        PublishErrorKind::StreamNotFound => StreamError::Missing,
        _ => fail(error.to_string()),
    };
    context.publish(subject::work(node, boot), bytes.into()).await.map_err(classify)?.await.map_err(classify)?;
    Ok(())
}
