//! Publishes work orders without waiting for JetStream, which may not answer. An order that is lost is published again
//! once the node has not accepted the job in time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_link::Session;
use cfq_proto::ids::{BootId, LeaseId, NodeId};
use cfq_proto::messages::WorkOrder;
use tokio::sync::Semaphore;

use super::work_stream::WorkStream;
use crate::bus::stream::{self, StreamError};

/// Maximum number of work orders that are being published at the same time.
const MAX_PUBLICATIONS: usize = 256;

/// Publishes work orders, and knows which of them are stored in the work stream.
pub struct Publisher {
    session: Session,
    work_stream: WorkStream,
    permits: Arc<Semaphore>,
    /// Leases of placed attempts whose work orders are stored.
    stored: Arc<Mutex<HashSet<LeaseId>>>,
}

impl Publisher {
    pub fn new(session: Session, work_stream: WorkStream) -> Self {
        Self { session, work_stream, permits: Arc::new(Semaphore::new(MAX_PUBLICATIONS)), stored: Arc::default() }
    }

    /// Starts to publish the work order of a new attempt.
    pub fn publish(&self, node: NodeId, boot: BootId, order: WorkOrder) {
        self.start(node, boot, order, false);
    }

    /// Starts to publish again the work order of an attempt that its node has not accepted. First, the node's consumer
    /// is created if it does not exist: the stream stores no order without one, and reports no error.
    pub fn publish_again(&self, node: NodeId, boot: BootId, order: WorkOrder) {
        self.start(node, boot, order, true);
    }

    fn start(&self, node: NodeId, boot: BootId, order: WorkOrder, is_repeated: bool) {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            return tracing::warn!(%node, "work order not published: the work stream does not answer");
        };
        let (session, work_stream, stored) = (self.session.clone(), self.work_stream.clone(), self.stored.clone());
        if is_repeated {
            // The first one was not stored if the consumer is missing.
            lock(&stored).remove(&order.fence.lease);
        }
        tokio::spawn(async move {
            let _permit = permit;
            let published = async {
                if is_repeated {
                    stream::ensure_consumer(&session, &node, boot).await?;
                }
                stream::publish(&session, &node, boot, &order).await
            };
            match published.await {
                Ok(()) => {
                    lock(&stored).insert(order.fence.lease);
                }
                Err(StreamError::Missing) => {
                    tracing::warn!("work stream is missing, creating it again");
                    work_stream.repair();
                }
                Err(error) => {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "work order not published");
                }
            }
            cfq_link::failpoint::hit("scheduler.place.after_publish");
        });
    }

    /// Has the nodes' consumers checked soon, because work orders do not arrive.
    pub fn repair_stream(&self) {
        self.work_stream.repair();
    }

    /// Whether the work order of this attempt was stored in the work stream.
    pub fn is_stored(&self, lease: LeaseId) -> bool {
        lock(&self.stored).contains(&lease)
    }

    /// Forgets all work orders except those of these placed attempts.
    pub fn retain(&self, placed: impl Iterator<Item = LeaseId>) {
        let placed: HashSet<LeaseId> = placed.collect();
        lock(&self.stored).retain(|lease| placed.contains(lease));
    }
}

fn lock(stored: &Mutex<HashSet<LeaseId>>) -> MutexGuard<'_, HashSet<LeaseId>> {
    // Plain data: consistent even if a thread panicked while it held the lock.
    stored.lock().unwrap_or_else(PoisonError::into_inner)
}
