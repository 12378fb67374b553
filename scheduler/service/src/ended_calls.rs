//! Deletes the calls of API clients that have their result, or have disconnected. A call that is not deleted here, because
//! the database is unavailable, is deleted by the leader when it expires.

use std::time::Duration;

use cfq_proto::ids::TaskId;
use tokio::sync::mpsc;

use crate::link::Link;
use crate::store::{Store, limited};

/// Capacity of the channel. It exceeds the default limit of open calls.
const CHANNEL_CALLS: usize = 1_024;
/// Maximum number of calls that are deleted at the same time.
const CONCURRENCY: usize = 4;
/// Number of attempts to delete a call.
const MAX_ATTEMPTS: u32 = 5;
/// Wait between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Accepts the calls to delete. Clones share the channel.
#[derive(Debug, Clone)]
pub struct EndedCalls(mpsc::Sender<TaskId>);

/// The calls to delete.
#[derive(Debug)]
pub struct EndedCallsReceiver(mpsc::Receiver<TaskId>);

/// A channel for calls to delete.
pub fn channel() -> (EndedCalls, EndedCallsReceiver) {
    let (sender, receiver) = mpsc::channel(CHANNEL_CALLS);
    (EndedCalls(sender), EndedCallsReceiver(receiver))
}

impl EndedCalls {
    /// Lets the call be deleted soon.
    pub fn add(&self, call: TaskId) {
        if self.0.try_send(call).is_err() {
            tracing::debug!(%call, "too many calls end at the same time; the leader deletes this one");
        }
    }
}

impl EndedCallsReceiver {
    /// Deletes calls until all senders are dropped.
    pub async fn delete_all(self, store: Store, link: Link) {
        let calls = futures::stream::unfold(self.0, |mut calls| async move { Some((calls.recv().await?, calls)) });
        futures::StreamExt::for_each_concurrent(calls, CONCURRENCY, |call| delete(&store, &link, call)).await;
    }
}

async fn delete(store: &Store, link: &Link, call: TaskId) {
    for _ in 0..MAX_ATTEMPTS {
        match limited("deleting a call", store.end_call(call)).await {
            Ok(hints) => return link.send_hints(hints).await,
            Err(error) if error.may_retry() => tracing::debug!(%call, %error, "call not deleted yet"),
            Err(error) => return tracing::error!(%call, %error, "call cannot be deleted"),
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
