//! The JetStream work stream and the nodes' consumers. Placements are stored in Postgres, so the stream needs no
//! durability: if it is lost, the stream and its consumers are created again, and the work orders are published again.
//!
//! Each boot of a node has a push consumer with a fixed deliver subject, so that a node sends nothing to JetStream: who
//! may send it a pull or an acknowledgement can have it publish to any subject (see [`subject::Grants`]). Orders are
//! therefore delivered without acknowledgement. JetStream keeps an order while the node is not connected, and the
//! scheduler publishes the order of an attempt that is not accepted again.

use std::time::Duration;

use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, push},
    context::{
        CreateStreamError, DeleteStreamError, GetStreamError, PublishError, PublishErrorKind, UpdateStreamError,
    },
    stream::{Config, ConsumerError, DiscardPolicy, RetentionPolicy, StorageType},
};
use cfq_link::Session;
use cfq_proto::envelope::{self, EnvelopeError};
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::WorkOrder;
use cfq_proto::subject;

/// Maximum age of a work order in the stream. An order that was not delivered within this time belongs to an attempt
/// that was replaced long ago.
const MAX_ORDER_AGE: Duration = Duration::from_secs(60);
/// Maximum number of work orders in the stream; when it is full, new orders are refused. The planner places only jobs
/// that a node can admit now, so the stream fills up only if something is faulty.
const MAX_WORK_ORDERS: i64 = 10_000;
/// Maximum number of work orders for one boot of a node in the stream, so that a node that takes no orders leaves room for
/// those of the others. A refused order is published again later.
const MAX_WORK_ORDERS_PER_NODE: i64 = 64;
/// Time after which JetStream deletes the consumer of a boot that is not connected. The consumer of a former boot is also
/// deleted when the next boot registers.
const UNUSED_CONSUMER_TTL: Duration = Duration::from_secs(3600);
/// Longest wait for the answers of one operation here. The client has no limit for requests to JetStream, and one that
/// was written to a broken connection is never answered.
const JETSTREAM_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum total size of the work orders in the stream, in bytes.
const MAX_WORK_STREAM_BYTES: i64 = 128 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("cannot look up the JetStream stream of work orders")]
    Find {
        #[source]
        source: GetStreamError,
    },
    #[error("cannot delete the JetStream stream of work orders that an early 0.1 build created")]
    DeleteFormer {
        #[source]
        source: DeleteStreamError,
    },
    #[error("cannot create the JetStream stream of work orders")]
    Create {
        #[source]
        source: CreateStreamError,
    },
    #[error("cannot change the limits of the JetStream stream of work orders")]
    Update {
        #[source]
        source: UpdateStreamError,
    },
    #[error("cannot create the consumer of node {node}")]
    Consumer {
        node: NodeId,
        #[source]
        source: ConsumerError,
    },
    #[error("JetStream does not answer")]
    NoAnswer,
    /// The stream does not exist: the JetStream store was lost.
    #[error("the JetStream stream of work orders does not exist")]
    Missing,
    #[error("cannot encode an order for node {node}")]
    Encode {
        node: NodeId,
        #[source]
        source: EnvelopeError,
    },
    #[error("cannot publish an order for node {node}")]
    Publish {
        node: NodeId,
        #[source]
        source: PublishError,
    },
}

fn config() -> Config {
    Config {
        name: subject::WORK_STREAM.to_owned(),
        description: Some("work orders for nodes; the durable state is in Postgres".to_owned()),
        subjects: vec![subject::WORK_ALL.to_owned()],
        // An order is removed once it is delivered. An order without a consumer is not stored.
        retention: RetentionPolicy::Interest,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        max_age: MAX_ORDER_AGE,
        max_messages: MAX_WORK_ORDERS,
        max_messages_per_subject: MAX_WORK_ORDERS_PER_NODE,
        discard_new_per_subject: true,
        max_bytes: MAX_WORK_STREAM_BYTES,
        max_message_size: 1024 * 1024,
        num_replicas: 1,
        // Short, because a work order that is published again must be delivered again; the node detects duplicates by
        // their fence.
        duplicate_window: Duration::from_secs(1),
        ..Config::default()
    }
}

async fn limited<T>(operation: impl Future<Output = Result<T, StreamError>>) -> Result<T, StreamError> {
    tokio::time::timeout(JETSTREAM_TIMEOUT, operation).await.unwrap_or(Err(StreamError::NoAnswer))
}

/// Creates the stream if it does not exist. True if it was created.
pub async fn ensure(session: &Session) -> Result<bool, StreamError> {
    limited(ensure_stream(session)).await
}

async fn ensure_stream(session: &Session) -> Result<bool, StreamError> {
    let context = jetstream::new(session.client().clone());
    match context.get_stream(subject::WORK_STREAM).await {
        Ok(stream) if stream.cached_info().config.retention == RetentionPolicy::Interest => {
            if stream.cached_info().config.max_messages_per_subject != MAX_WORK_ORDERS_PER_NODE {
                context.update_stream(config()).await.map_err(|source| StreamError::Update { source })?;
            }
            return Ok(false);
        }
        // JetStream does not change this property of a stream.
        Ok(_) => {
            context.delete_stream(subject::WORK_STREAM).await.map_err(|source| StreamError::DeleteFormer { source })?;
            tracing::info!(stream = subject::WORK_STREAM, "deleted the work stream of an earlier build");
        }
        Err(error) if matches!(error.kind(), jetstream::context::GetStreamErrorKind::JetStream(_)) => {}
        Err(source) => return Err(StreamError::Find { source }),
    }
    context.create_stream(config()).await.map_err(|source| StreamError::Create { source })?;
    tracing::info!(stream = subject::WORK_STREAM, "created the work stream");
    Ok(true)
}

/// Creates the durable consumer that pushes the work orders to this boot of a node, if it does not exist.
pub async fn ensure_consumer(session: &Session, node: &NodeId, boot: BootId) -> Result<(), StreamError> {
    limited(create_consumer(session, node, boot)).await
}

async fn create_consumer(session: &Session, node: &NodeId, boot: BootId) -> Result<(), StreamError> {
    let context = jetstream::new(session.client().clone());
    let wanted = push::Config {
        durable_name: Some(subject::consumer(node, boot)),
        deliver_subject: subject::order(node, boot),
        filter_subject: subject::work(node, boot),
        ack_policy: AckPolicy::None,
        inactive_threshold: UNUSED_CONSUMER_TTL,
        ..push::Config::default()
    };
    let created = context.create_consumer_on_stream(wanted.clone(), subject::WORK_STREAM).await;
    let Err(first) = created else { return Ok(()) };
    tracing::debug!(%node, error = %first, "consumer not created, trying again");
    // Possible causes: the stream is missing, or an earlier build created it.
    ensure_stream(session).await?;
    match context.create_consumer_on_stream(wanted, subject::WORK_STREAM).await {
        Ok(_) => Ok(()),
        Err(source) => Err(StreamError::Consumer { node: node.clone(), source }),
    }
}

/// Deletes the consumer of a boot that another one has replaced.
pub async fn delete_consumer(session: &Session, node: &NodeId, boot: BootId) {
    let context = jetstream::new(session.client().clone());
    let deleted = context.delete_consumer_from_stream(subject::consumer(node, boot), subject::WORK_STREAM);
    // A consumer that stays is deleted by JetStream itself when it was not used for some time.
    match tokio::time::timeout(JETSTREAM_TIMEOUT, deleted).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%node, %boot, %error, "cannot delete the consumer of the node's former boot"),
        Err(_) => tracing::debug!(%node, %boot, "JetStream does not answer; the node's former consumer stays"),
    }
}

/// Publishes a work order for one boot of a node and waits for the stream's acknowledgement.
pub async fn publish(session: &Session, node: &NodeId, boot: BootId, order: &WorkOrder) -> Result<(), StreamError> {
    let context = jetstream::new(session.client().clone());
    let bytes = envelope::encode(order).map_err(|source| StreamError::Encode { node: node.clone(), source })?;
    let classify = |source: PublishError| match source.kind() {
        PublishErrorKind::StreamNotFound => StreamError::Missing,
        _ => StreamError::Publish { node: node.clone(), source },
    };
    let stored = async { context.publish(subject::work(node, boot), bytes.into()).await?.await };
    limited(async { stored.await.map_err(classify) }).await?;
    Ok(())
}
