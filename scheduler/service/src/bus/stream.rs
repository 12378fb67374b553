//! The work stream and the nodes' consumers. Postgres holds the promise, so the stream may be small, short-lived and wiped:
//! whatever is missing is made again, and what was in it is published again.

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

/// An order that nobody took for a minute is of an attempt that was placed anew long ago.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Placement publishes only what a node admits now, so a stream as large as this is out of order; new ones are refused.
const MAX_MESSAGES: i64 = 10_000;
const MAX_BYTES: i64 = 128 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("cannot look up or make the work stream: {0}")]
    Stream(String),
    #[error("cannot make the consumer of {node}: {reason}")]
    Consumer { node: NodeId, reason: String },
    /// The stream is gone: the store of NATS was lost.
    #[error("the work stream is gone")]
    Gone,
    #[error("cannot publish an order for {node}: {reason}")]
    Publish { node: NodeId, reason: String },
}

fn config() -> Config {
    Config {
        name: subject::WORK_STREAM.to_owned(),
        description: Some("orders on their way to nodes; Postgres is the truth".to_owned()),
        subjects: vec![subject::WORK_ALL.to_owned()],
        retention: RetentionPolicy::WorkQueue,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        max_age: MAX_AGE,
        max_messages: MAX_MESSAGES,
        max_bytes: MAX_BYTES,
        max_message_size: 1024 * 1024,
        num_replicas: 1,
        // Republishing an attempt is meant to arrive; the node's fence tells repeats apart.
        duplicate_window: Duration::from_secs(1),
        ..Config::default()
    }
}

/// True if the stream had to be made.
pub async fn ensure(session: &Session) -> Result<bool, StreamError> {
    let context = jetstream::new(session.client().clone());
    match context.get_stream(subject::WORK_STREAM).await {
        Ok(_) => Ok(false),
        Err(error) if matches!(error.kind(), jetstream::context::GetStreamErrorKind::JetStream(_)) => {
            context.create_stream(config()).await.map_err(|e| StreamError::Stream(e.to_string()))?;
            tracing::info!(stream = subject::WORK_STREAM, "made the work stream");
            Ok(true)
        }
        Err(error) => Err(StreamError::Stream(error.to_string())),
    }
}

/// Makes the node's durable consumer on this boot's subject. `anew` drops the one of an earlier boot first.
pub async fn ensure_consumer(
    session: &Session,
    node: &NodeId,
    boot: BootId,
    timing: &Timing,
    anew: bool,
) -> Result<(), StreamError> {
    let context = jetstream::new(session.client().clone());
    let name = subject::consumer(node);
    if anew && let Err(error) = context.delete_consumer_from_stream(&name, subject::WORK_STREAM).await {
        tracing::debug!(%node, %error, "no consumer to drop");
    }
    let wanted = pull::Config {
        durable_name: Some(name),
        filter_subject: subject::work(node, boot),
        ack_policy: AckPolicy::Explicit,
        // The scheduler sends an attempt again by itself; this only covers a node that took a message and lost it.
        ack_wait: (timing.accept() * 2).max(Duration::from_secs(1)),
        max_ack_pending: 1_000,
        ..pull::Config::default()
    };
    let made = context.create_consumer_on_stream(wanted.clone(), subject::WORK_STREAM).await;
    let Err(first) = made else { return Ok(()) };
    // The stream may be gone, or a consumer with another filter in the way.
    ensure(session).await?;
    if let Err(error) = context.delete_consumer_from_stream(subject::consumer(node), subject::WORK_STREAM).await {
        tracing::debug!(%node, %error, "no consumer to drop");
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
    let told = |error: jetstream::context::PublishError| match error.kind() {
        PublishErrorKind::StreamNotFound => StreamError::Gone,
        _ => fail(error.to_string()),
    };
    context.publish(subject::work(node, boot), bytes.into()).await.map_err(told)?.await.map_err(told)?;
    Ok(())
}
