//! Leading: one scheduler at a time holds the leader row and places work; the others wait for the row to expire.

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

#[derive(Debug, Clone)]
pub struct Leader {
    /// Of its own: with it, a connection that is not to be had means that Postgres is away.
    pub store: Store,
    pub link: Link,
    pub session: Session,
    pub metrics: Metrics,
}

impl Leader {
    /// Stands for election until told to stop; a stopping leader gives the row up, so that nobody waits for it.
    pub async fn run(self, mut stop: Stop) {
        let holder = Uuid::now_v7();
        loop {
            if let Some(lead) = self.stand(holder).await {
                self.metrics.leader.set(1);
                self.metrics.elections.inc();
                tracing::info!(generation = lead.generation, "leading");
                tokio::select! {
                    () = self.keep(lead) => tracing::warn!(generation = lead.generation, "lost the lead"),
                    () = term::serve(&self, lead) => {}
                    () = stop.raised() => {}
                }
                self.metrics.leader.set(0);
                if stop.is_raised()
                    && let Err(error) = self.store.yield_lead(lead).await
                {
                    tracing::debug!(%error, "the lead was not given up, it runs out by itself");
                }
            }
            if stop.is_raised() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(self.store.timing().leader_beat()) => {}
                () = stop.raised() => return,
            }
        }
    }

    async fn stand(&self, holder: Uuid) -> Option<Leadership> {
        match self.store.take_lead(holder).await {
            Ok(lead) => lead,
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "cannot stand for election");
                None
            }
        }
    }

    /// Renews the row until that fails for longer than it lives, or somebody else has it.
    async fn keep(&self, lead: Leadership) {
        let timing = self.store.timing();
        let mut confirmed = Instant::now();
        loop {
            tokio::time::sleep(timing.leader_beat()).await;
            let asked = Instant::now();
            match self.store.renew_lead(lead).await {
                Ok(true) => confirmed = asked,
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "cannot renew the lead"),
            }
            if confirmed.elapsed() > timing.leader_ttl() {
                return;
            }
        }
    }
}
