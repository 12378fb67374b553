//! What wakes the feeds: committed events (Postgres' `notify`, so whichever scheduler wrote them) and tokens (NATS, as they are
//! generated). Both only hurry; a feed also looks by itself.

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

/// Frames kept for a slow reader; one that is further behind misses some, and sees it by their offsets.
const BEHIND: usize = 4_096;

#[derive(Debug, Clone)]
pub struct Pulse {
    /// `None` means that something may have been missed: look at everything.
    events: broadcast::Sender<Option<TaskId>>,
    tokens: broadcast::Sender<Arc<TokenFrame>>,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { events: broadcast::Sender::new(BEHIND), tokens: broadcast::Sender::new(BEHIND) }
    }
}

impl Pulse {
    pub fn events(&self) -> broadcast::Receiver<Option<TaskId>> {
        self.events.subscribe()
    }

    pub fn tokens(&self) -> broadcast::Receiver<Arc<TokenFrame>> {
        self.tokens.subscribe()
    }

    #[cfg(test)]
    pub fn tell_tokens(&self, frame: TokenFrame) {
        self.tokens.send(Arc::new(frame)).unwrap();
    }

    /// Passes on what Postgres notifies, until told to stop.
    pub async fn follow_events(self, store: Store, mut stop: Stop) {
        while !stop.is_raised() {
            let listened = tokio::select! {
                listened = self.listen(&store) => listened,
                () = stop.raised() => return,
            };
            if let Err(error) = listened {
                tracing::debug!(%error, "not hearing of events, feeds look by themselves");
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                () = stop.raised() => return,
            }
        }
    }

    async fn listen(&self, store: &Store) -> Result<(), crate::store::StoreError> {
        let mut listener = store.listen().await?;
        // Nobody listening is no error.
        let tell = |what| drop(self.events.send(what));
        tell(None);
        loop {
            match listener.try_recv().await {
                Ok(Some(notification)) => tell(notification.payload().parse().ok()),
                // The connection was cut and made again: some may be missed.
                Ok(None) => tell(None),
                Err(error) => {
                    tracing::debug!(%error, "the event listener lost its connection");
                    return Ok(());
                }
            }
        }
    }

    /// Passes on token frames, and notes the first of each attempt: from there the task's time runs.
    pub async fn follow_tokens(self, session: Session, store: Store, mut stop: Stop) {
        let mut frames = loop {
            match session.subscribe::<TokenFrame>(&subject::tokens_of("*")).await {
                Ok(frames) => break frames,
                Err(error) => tracing::warn!(%error, "cannot listen for tokens"),
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                () = stop.raised() => return,
            }
        };
        let mut seen: HashSet<LeaseId> = HashSet::new();
        // First tokens that could not be written down: the next frame tries again.
        let (missed, mut missing) = tokio::sync::mpsc::channel(BEHIND);
        loop {
            let frame = tokio::select! {
                next = frames.next() => match next { Some(frame) => frame, None => return },
                Some(lease) = missing.recv() => {
                    seen.remove(&lease);
                    continue;
                }
                () = stop.raised() => return,
            };
            let Ok(frame) = frame.body else { continue };
            if seen.len() > BEHIND {
                seen.clear();
            }
            if seen.insert(frame.fence.lease) {
                let (store, fence, missed) = (store.clone(), frame.fence, missed.clone());
                tokio::spawn(async move {
                    if let Err(error) = store.first_token(&fence).await {
                        tracing::debug!(%error, "first token not noted");
                        if missed.send(fence.lease).await.is_err() {
                            tracing::debug!("the frames' reader has stopped");
                        }
                    }
                });
            }
            drop(self.tokens.send(Arc::new(frame)));
        }
    }
}
