//! Wakes the handlers of API clients' calls: when a transaction changed a call, and for each token frame of its job. Each
//! handler also polls the database, so that a lost wake-up only delays it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_link::stop::Stop;
use cfq_proto::ids::TaskId;
use cfq_proto::messages::TokenFrame;
use tokio::sync::mpsc;

use crate::store::{Store, limited};

/// Capacity of a handler's channel, in signals. A handler that falls further behind misses token frames; it sees the gap,
/// and sends the missing text with the result.
const CHANNEL_SIGNALS: usize = 256;

/// Wait before calls are extended again after an error.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// What wakes the handler of a call.
#[derive(Debug, Clone)]
pub enum CallSignal {
    /// The row of the call or of its job may have changed.
    Changed,
    /// The job generated text.
    Tokens(Arc<TokenFrame>),
}

/// The calls of this process' clients. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct CallWatches(Arc<Mutex<HashMap<TaskId, mpsc::Sender<CallSignal>>>>);

/// The signals of one call, until it is dropped.
#[derive(Debug)]
pub struct CallWatch {
    watches: CallWatches,
    call: TaskId,
    signals: mpsc::Receiver<CallSignal>,
}

impl CallWatches {
    /// Begins to watch a call.
    pub fn watch(&self, call: TaskId) -> CallWatch {
        let (sender, signals) = mpsc::channel(CHANNEL_SIGNALS);
        self.watched().insert(call, sender);
        CallWatch { watches: self.clone(), call, signals }
    }

    /// Wakes the handler of this call, or those of all calls.
    pub fn on_changed(&self, call: Option<TaskId>) {
        let watched = self.watched();
        match call {
            Some(call) => watched.get(&call).into_iter().for_each(|handler| send(handler, CallSignal::Changed)),
            None => watched.values().for_each(|handler| send(handler, CallSignal::Changed)),
        }
    }

    /// Sends a frame to the handler of its call; false if no handler of this process waits for it.
    pub fn on_tokens(&self, frame: &Arc<TokenFrame>) -> bool {
        let watched = self.watched();
        let handler = watched.get(&frame.task);
        handler.into_iter().for_each(|handler| send(handler, CallSignal::Tokens(frame.clone())));
        handler.is_some()
    }

    /// Extends the watched calls until `stop` is raised, so that the leader does not delete them.
    pub async fn extend(self, store: Store, mut stop: Stop) {
        let interval = store.timing().lease_ttl() / 2;
        let mut wait = interval;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.raised() => return,
            }
            wait = interval;
            let calls: Vec<TaskId> = self.watched().keys().copied().collect();
            if calls.is_empty() {
                continue;
            }
            if let Err(error) = limited("extending calls", store.extend_calls(&calls)).await {
                tracing::warn!(%error, calls = calls.len(), "calls of clients were not extended, trying again");
                wait = RETRY_INTERVAL.min(interval);
            }
        }
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<TaskId, mpsc::Sender<CallSignal>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A full channel already wakes its handler.
fn send(handler: &mpsc::Sender<CallSignal>, signal: CallSignal) {
    drop(handler.try_send(signal));
}

impl CallWatch {
    /// The next signal.
    pub async fn next(&mut self) -> CallSignal {
        match self.signals.recv().await {
            Some(signal) => signal,
            // Another watch has the same id, which does not happen; the handler still polls.
            None => std::future::pending().await,
        }
    }
}

impl Drop for CallWatch {
    fn drop(&mut self) {
        self.watches.watched().remove(&self.call);
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{JobId, LeaseId};
    use cfq_proto::job::JobRole;
    use cfq_proto::messages::JobFence;

    use super::*;

    #[tokio::test]
    async fn signals_reach_only_their_call_and_do_not_block() {
        let watches = CallWatches::default();
        let (call, other) = (TaskId::fresh(), TaskId::fresh());
        let (mut first, second) = (watches.watch(call), watches.watch(other));
        let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
        let frame = TokenFrame { task: call, fence, role: JobRole::Client, offset: 0, text: "a".into() };
        let frame = Arc::new(frame);
        (0..2 * CHANNEL_SIGNALS).for_each(|_| assert!(watches.on_tokens(&frame)));
        assert!(matches!(first.next().await, CallSignal::Tokens(frame) if frame.text == "a"));
        watches.on_changed(None);
        assert_eq!((first.signals.len(), second.signals.len()), (CHANNEL_SIGNALS, 1));
        drop(first);
        assert!(!watches.on_tokens(&frame));
    }
}
