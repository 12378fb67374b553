//! State that the async tasks of a node share, and the table of running attempts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_link::Session;
use cfq_link::credentials_lock::CredentialsLock;
use cfq_link::lease::LeaseKeeper;
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::job::ReleaseReason;
use cfq_proto::messages::{JobFence, WorkOrder};
use cfq_proto::model::ModelId;
use cfq_proto::subject;
use cfq_proto::timing::Timing;
use tokio::sync::{Notify, watch};

use super::model_registry::ModelRegistry;
use super::model_registry::yielding::GpuClaim;
use super::speculative_prefill::PrefillQueue;

/// Why an attempt must stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AttemptStop {
    /// The scheduler withdrew the job.
    Cancelled,
    /// The node is stopping.
    Drained,
    /// The node yields a GPU to another program.
    Yielded { to: GpuClaim },
    /// The lease expired or was revoked: another node may run the job already, so nothing is reported.
    LostLease,
}

impl AttemptStop {
    /// The reason to report to the scheduler; `None` if the lease is lost, since then nothing is reported.
    pub(super) fn release_reason(&self) -> Option<ReleaseReason> {
        match self {
            Self::Cancelled => Some(ReleaseReason::Cancelled),
            Self::Drained => Some(ReleaseReason::Drained),
            Self::Yielded { to } => Some(ReleaseReason::Yielded { to: to.to_string() }),
            Self::LostLease => None,
        }
    }
}

impl fmt::Display for AttemptStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.release_reason() {
            Some(reason) => fmt::Display::fmt(&reason, f),
            None => f.write_str("its lease was lost"),
        }
    }
}

/// Receiver of the reason for which an attempt must stop.
#[derive(Debug, Clone)]
pub(super) struct AttemptStopSignal(watch::Receiver<Option<AttemptStop>>);

impl AttemptStopSignal {
    /// The reason; `None` while the attempt may continue.
    pub(super) fn reason(&self) -> Option<AttemptStop> {
        self.0.borrow().clone()
    }

    /// Waits until the attempt must stop, and returns the reason.
    pub(super) async fn stopped(&mut self) -> AttemptStop {
        match self.0.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(AttemptStop::Drained),
            // Unreachable while the attempt runs: the sender is dropped together with the attempt.
            Err(_) => AttemptStop::Drained,
        }
    }
}

/// An attempt in the [`AttemptTable`].
struct AttemptEntry {
    model: ModelId,
    stop: watch::Sender<Option<AttemptStop>>,
}

impl AttemptEntry {
    /// Stops the attempt. If it is stopped more than once, the first reason is kept.
    fn stop(&self, reason: AttemptStop) {
        self.stop.send_if_modified(|current| {
            let first = current.is_none();
            if first {
                *current = Some(reason);
            }
            first
        });
    }
}

/// State that the async tasks of a node share.
pub(super) struct NodeContext {
    pub(super) node: NodeId,
    pub(super) boot: BootId,
    /// Held until the node has stopped.
    pub(super) credentials_lock: Option<CredentialsLock>,
    pub(super) session: Session,
    pub(super) keeper: LeaseKeeper,
    pub(super) registry: Arc<ModelRegistry>,
    pub(super) timing: Timing,
    /// Notifier that fires when the node has to register again.
    pub(super) registration_wanted: Notify,
    pub(super) prefill_queue: Arc<PrefillQueue>,
    pub(super) attempts: AttemptTable,
}

/// The running attempts of the node.
#[derive(Default)]
pub(super) struct AttemptTable(Mutex<HashMap<JobFence, AttemptEntry>>);

impl NodeContext {
    fn attempts(&self) -> MutexGuard<'_, HashMap<JobFence, AttemptEntry>> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.attempts.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// NATS subject of this node for requests of the kind `verb`.
    pub(super) fn subject(&self, verb: &str) -> String {
        subject::node(&self.node, verb)
    }

    /// Adds an attempt to the table; `None` if it is already running, for example because its order was delivered
    /// twice.
    pub(super) fn begin_attempt(self: &Arc<Self>, order: &WorkOrder) -> Option<RunningAttempt> {
        let fence = order.fence;
        match self.attempts().entry(fence) {
            Entry::Occupied(_) => None,
            Entry::Vacant(free) => {
                let (stop, receiver) = watch::channel(None);
                free.insert(AttemptEntry { model: order.model.clone(), stop });
                Some(RunningAttempt { fence, stop: AttemptStopSignal(receiver), context: self.clone() })
            }
        }
    }

    /// Stops one attempt. Returns false if it does not run on this node.
    pub(super) fn stop_attempt(&self, fence: &JobFence, reason: AttemptStop) -> bool {
        self.attempts().get(fence).map(|attempt| attempt.stop(reason)).is_some()
    }

    /// Stops all attempts.
    pub(super) fn stop_all_attempts(&self, reason: &AttemptStop) {
        self.attempts().values().for_each(|attempt| attempt.stop(reason.clone()));
    }

    /// Stops the attempts on models that yield to another program, so that their jobs are released.
    pub(super) fn release_jobs(&self) {
        for attempt in self.attempts().values() {
            if let Some(to) = self.registry.yields_to(&attempt.model) {
                attempt.stop(AttemptStop::Yielded { to });
            }
        }
    }
}

/// Handle of an attempt in the [`AttemptTable`]; dropping it removes the attempt from the table.
pub(super) struct RunningAttempt {
    pub(super) fence: JobFence,
    pub(super) stop: AttemptStopSignal,
    context: Arc<NodeContext>,
}

impl Drop for RunningAttempt {
    fn drop(&mut self) {
        self.context.attempts().remove(&self.fence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_stop_reason_counts() {
        let (stop, receiver) = watch::channel(None);
        let attempt = AttemptEntry { model: "path:/m".parse().unwrap(), stop };
        let mut signal = AttemptStopSignal(receiver);
        assert_eq!(signal.reason(), None);
        let to = GpuClaim { program: "game".to_owned(), gpu: "cuda:0".to_owned() };
        attempt.stop(AttemptStop::Yielded { to: to.clone() });
        attempt.stop(AttemptStop::Drained);
        assert_eq!(signal.stopped().await, AttemptStop::Yielded { to });
    }
}
