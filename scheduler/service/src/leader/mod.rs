//! Leader election: one scheduler at a time holds the leader row and places work; the others wait until the row
//! expires.

mod clock;
mod grace;
mod term;

use std::time::Instant;

use cfq_link::Session;
use cfq_link::stop::Stop;
use uuid::Uuid;

use crate::link::Link;
use crate::metrics::Metrics;
use crate::store::{Leadership, Store};

/// Takes part in the election and, while it holds the leader row, places jobs and ends expired leases.
#[derive(Debug, Clone)]
pub struct Leader {
    /// Store with a connection pool that only the leader uses: if no connection can be acquired, Postgres is
    /// unavailable.
    pub store: Store,
    pub link: Link,
    pub session: Session,
    pub metrics: Metrics,
}

impl Leader {
    /// Tries to become the leader until `stop` is raised. A leader that stops releases the row, so that another
    /// scheduler need not wait until it expires.
    pub async fn run(self, mut stop: Stop) {
        let holder = Uuid::now_v7();
        loop {
            if let Some(leadership) = self.try_acquire_leadership(holder).await {
                self.metrics.leader.set(1);
                self.metrics.elections_won.inc();
                tracing::info!(term = leadership.term, "became leader");
                tokio::select! {
                    () = self.renew_until_lost(leadership) => tracing::warn!(term = leadership.term, "lost leadership"),
                    () = term::run(&self, leadership) => {}
                    () = stop.raised() => {}
                }
                self.metrics.leader.set(0);
                if stop.is_raised()
                    && let Err(error) = self.store.release_leadership(leadership).await
                {
                    tracing::debug!(%error, "leader row not released, it will expire");
                }
            }
            if stop.is_raised() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(self.store.timing().leader_renewal()) => {}
                () = stop.raised() => return,
            }
        }
    }

    async fn try_acquire_leadership(&self, holder: Uuid) -> Option<Leadership> {
        match self.store.acquire_leadership(holder).await {
            Ok(leadership) => leadership,
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "cannot acquire the leader row");
                None
            }
        }
    }

    /// Renews the leader row. Returns when another scheduler holds it, or when renewals have failed for longer than the
    /// row's TTL.
    async fn renew_until_lost(&self, leadership: Leadership) {
        let timing = self.store.timing();
        let mut confirmed = Instant::now();
        loop {
            tokio::time::sleep(timing.leader_renewal()).await;
            let asked = Instant::now();
            match self.store.renew_leadership(leadership).await {
                Ok(true) => confirmed = asked,
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "cannot renew the leader row"),
            }
            if confirmed.elapsed() > timing.leader_ttl() {
                return;
            }
        }
    }
}
