//! The JetStream work stream and the nodes' consumers. Placements are stored in Postgres, so the stream needs no
//! durability: if it is lost, the stream and its consumers are created again, and the work orders are published again.

use std::time::Duration;

use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, pull},
    context::{CreateStreamError, GetStreamError, PublishError, PublishErrorKind},
    stream::{Config, ConsumerError, DiscardPolicy, RetentionPolicy, StorageType},
};
use cfq_link::Session;
use cfq_proto::envelope::{self, EnvelopeError};
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::WorkOrder;
use cfq_proto::subject;
use cfq_proto::timing::Timing;

/// Maximum age of a work order in the stream. An order that was not pulled within this time belongs to an attempt that
/// was replaced long ago.
const MAX_ORDER_AGE: Duration = Duration::from_secs(60);
/// Maximum number of work orders in the stream; when it is full, new orders are refused. The planner places only jobs
/// that a node can admit now, so the stream fills up only if something is faulty.
const MAX_WORK_ORDERS: i64 = 10_000;
/// Maximum total size of the work orders in the stream, in bytes.
const MAX_WORK_STREAM_BYTES: i64 = 128 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("cannot look up the JetStream stream of work orders")]
    Find {
        #[source]
        source: GetStreamError,
    },
    #[error("cannot create the JetStream stream of work orders")]
    Create {
        #[source]
        source: CreateStreamError,
    },
    #[error("cannot create the consumer of node {node}")]
    Consumer {
        node: NodeId,
        #[source]
        source: ConsumerError,
    },
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
        retention: RetentionPolicy::WorkQueue,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        max_age: MAX_ORDER_AGE,
        max_messages: MAX_WORK_ORDERS,
        max_bytes: MAX_WORK_STREAM_BYTES,
        max_message_size: 1024 * 1024,
        num_replicas: 1,
        // Short, because a work order that is published again must be delivered again; the node detects duplicates by
        // their fence.
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
            context.create_stream(config()).await.map_err(|source| StreamError::Create { source })?;
            tracing::info!(stream = subject::WORK_STREAM, "created the work stream");
            Ok(true)
        }
        Err(source) => Err(StreamError::Find { source }),
    }
}

/// Creates the node's durable consumer, which receives the work orders for this boot of the node. With `recreate`, the
/// consumer of an earlier boot is deleted first.
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
        tracing::debug!(%node, %error, "cannot delete the node's former consumer");
    }
    let wanted = pull::Config {
        durable_name: Some(name),
        filter_subject: subject::work(node, boot),
        ack_policy: AckPolicy::Explicit,
        // Time after which JetStream redelivers a message that the node pulled but did not acknowledge. Independently
        // of this, the scheduler publishes the order of an attempt that is not accepted again.
        ack_wait: (timing.accept_timeout() * 2).max(Duration::from_secs(1)),
        max_ack_pending: 1_000,
        ..pull::Config::default()
    };
    let created = context.create_consumer_on_stream(wanted.clone(), subject::WORK_STREAM).await;
    let Err(first) = created else { return Ok(()) };
    tracing::debug!(%node, error = %first, "consumer not created, trying again");
    // Possible causes: the stream is missing, or a consumer with another filter subject exists. Repair both, then
    // retry.
    ensure(session).await?;
    if let Err(error) = context.delete_consumer_from_stream(subject::consumer(node), subject::WORK_STREAM).await {
        tracing::debug!(%node, %error, "cannot delete the node's former consumer");
    }
    match context.create_consumer_on_stream(wanted, subject::WORK_STREAM).await {
        Ok(_) => Ok(()),
        Err(source) => Err(StreamError::Consumer { node: node.clone(), source }),
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
    context.publish(subject::work(node, boot), bytes.into()).await.map_err(classify)?.await.map_err(classify)?;
    Ok(())
}
