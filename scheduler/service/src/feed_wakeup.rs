//! Wakes the event feeds when an event is committed (Postgres `notify`, which also reports events written by other
//! schedulers) and when a token frame arrives (NATS). Wake-ups only reduce latency; each feed also polls the database.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use cfq_link::Session;
use cfq_link::stop::Stop;
use cfq_proto::ids::{LeaseId, TaskId};
use cfq_proto::messages::TokenFrame;
use cfq_proto::subject;
use tokio::sync::broadcast;

use crate::store::Store;

/// Capacity of each channel, in messages. A feed that falls further behind misses messages. Missed events are read from
/// the database; missed token frames are visible as a gap in the frames' offsets.
const CHANNEL_MESSAGES: usize = 4_096;
/// Maximum size of the set of attempts whose first token is already recorded. A larger set is cleared; the next frame
/// of each attempt then records the first token again, which changes nothing.
const MAX_RECORDED_LEASES: usize = 4_096;
/// Wait before a failed Postgres listener or NATS subscription is opened again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Broadcast channels that wake the feeds of this process. Clones share the channels.
#[derive(Debug, Clone)]
pub struct FeedWakeup {
    /// Channel of committed events. Each message is the task that has new events; `None` means that notifications may
    /// have been missed, so every feed must query the database.
    events: broadcast::Sender<Option<TaskId>>,
    tokens: broadcast::Sender<Arc<TokenFrame>>,
}

impl Default for FeedWakeup {
    fn default() -> Self {
        Self { events: broadcast::Sender::new(CHANNEL_MESSAGES), tokens: broadcast::Sender::new(CHANNEL_MESSAGES) }
    }
}

impl FeedWakeup {
    pub fn events(&self) -> broadcast::Receiver<Option<TaskId>> {
        self.events.subscribe()
    }

    pub fn tokens(&self) -> broadcast::Receiver<Arc<TokenFrame>> {
        self.tokens.subscribe()
    }

    #[cfg(test)]
    pub fn send_tokens(&self, frame: TokenFrame) {
        self.tokens.send(Arc::new(frame)).unwrap();
    }

    /// Forwards the Postgres notifications of committed events to the feeds until `stop` is raised.
    pub async fn follow_events(self, store: Store, mut stop: Stop) {
        while !stop.is_raised() {
            let listened = tokio::select! {
                listened = self.listen(&store) => listened,
                () = stop.raised() => return,
            };
            if let Err(error) = listened {
                tracing::debug!(%error, "cannot listen for event notifications; feeds only poll for now");
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
                () = stop.raised() => return,
            }
        }
    }

    async fn listen(&self, store: &Store) -> Result<(), crate::store::StoreError> {
        let mut listener = store.listen().await?;
        // `send` fails if no feed is open, which is not an error.
        let wake = |task| drop(self.events.send(task));
        wake(None);
        loop {
            match listener.try_recv().await {
                Ok(Some(notification)) => wake(notification.payload().parse().ok()),
                // The connection was lost and opened again: notifications may have been missed.
                Ok(None) => wake(None),
                Err(error) => {
                    tracing::debug!(%error, "event listener lost its connection");
                    return Ok(());
                }
            }
        }
    }

    /// Forwards token frames to the feeds until `stop` is raised. The first frame of each attempt is recorded in the
    /// database, because a task's working time starts at its first token.
    pub async fn follow_tokens(self, session: Session, store: Store, mut stop: Stop) {
        let mut frames = loop {
            match session.subscribe::<TokenFrame>(&subject::tokens_of("*")).await {
                Ok(frames) => break frames,
                Err(error) => tracing::warn!(%error, "cannot subscribe to token frames"),
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
                () = stop.raised() => return,
            }
        };
        let mut recorded: HashSet<LeaseId> = HashSet::new();
        // Leases of attempts whose first token could not be recorded. The next frame of such an attempt triggers
        // another try.
        let (failed, mut failures) = tokio::sync::mpsc::channel(CHANNEL_MESSAGES);
        loop {
            let frame = tokio::select! {
                next = frames.next() => match next { Some(frame) => frame, None => return },
                Some(lease) = failures.recv() => {
                    recorded.remove(&lease);
                    continue;
                }
                () = stop.raised() => return,
            };
            let Ok(frame) = frame.body else { continue };
            if recorded.len() > MAX_RECORDED_LEASES {
                recorded.clear();
            }
            if recorded.insert(frame.fence.lease) {
                let (store, fence, failed) = (store.clone(), frame.fence, failed.clone());
                tokio::spawn(async move {
                    if let Err(error) = store.record_first_token(&fence).await {
                        tracing::debug!(job = %fence.job, attempt = fence.attempt, %error, "first token not recorded");
                        if failed.send(fence.lease).await.is_err() {
                            tracing::debug!("token frame reader stopped");
                        }
                    }
                });
            }
            drop(self.tokens.send(Arc::new(frame)));
        }
    }
}
