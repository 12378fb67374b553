//! Leader election: one scheduler at a time holds the leader row and places work; the others wait until the row
//! expires.

mod clock;
mod explain;
mod grace;
mod nats_check;
mod preemption;
mod publisher;
mod rereads;
mod starts;
mod sweeper;
mod term;
mod wait_estimates;
mod work_stream;

use std::time::{Duration, Instant};

use cfq_link::Session;
use cfq_link::stop::Stop;
use tokio::sync::watch;
use tokio::task::JoinSet;
use uuid::Uuid;

pub use explain::ask_leader;
use nats_check::NatsCheck;

use crate::bus::presence;
use crate::heartbeat_failures::HeartbeatFailures;
use crate::link::Link;
use crate::metrics::Metrics;
use crate::store::{Leadership, Store, limited, limited_election};

/// Interval of the leader's checks of the database.
const DATABASE_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Takes part in the election and, while it holds the leader row, places jobs and ends expired leases.
#[derive(Debug, Clone)]
pub struct Leader {
    /// Id of this scheduler process.
    pub id: Uuid,
    /// Store with a connection pool that only the leader uses: if no connection can be acquired, Postgres is
    /// unavailable.
    pub store: Store,
    /// Store that only elects: its connections are never busy with placing or sweeping, so renewals never wait.
    pub election: Store,
    pub link: Link,
    pub session: Session,
    pub metrics: Metrics,
    pub heartbeat_failures: HeartbeatFailures,
}

impl Leader {
    /// Tries to become the leader until `stop` is raised. A leader that stops releases the row, so that another
    /// scheduler need not wait until it expires.
    pub async fn run(self, mut stop: Stop) {
        loop {
            if let Some(leadership) = self.try_acquire_leadership(self.id).await {
                self.metrics.leader.set(1);
                self.metrics.elections_won.inc();
                tracing::info!(term = leadership.term, "became leader");
                let (confirm, confirmed) = watch::channel(Instant::now());
                let nats = NatsCheck::default();
                let mut checks = JoinSet::new();
                checks.spawn(nats.clone().run(self.session.clone(), self.store.timing().sweep()));
                checks.spawn(check_database(self.store.clone()));
                let renewal = renew_until_lost(self.election.clone(), leadership, confirm, nats.clone());
                let mut renewal = tokio::spawn(renewal);
                tokio::select! {
                    _ = &mut renewal => tracing::warn!(term = leadership.term, "lost leadership"),
                    () = term::run(&self, leadership, confirmed, nats) => {}
                    () = presence::announce(&self.session, self.id, self.store.timing()) => {}
                    () = stop.raised() => {}
                }
                renewal.abort();
                self.metrics.leader.set(0);
                if stop.is_raised()
                    && let Err(error) =
                        limited_election("releasing the leader row", self.election.release_leadership(leadership)).await
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
        let has_nats = self.session.round_trip().await.is_ok();
        match limited_election("acquiring the leader row", self.election.acquire_leadership(holder, has_nats)).await {
            Ok(leadership) => leadership,
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "cannot acquire the leader row");
                None
            }
        }
    }
}

/// Renews the leader row. Returns when another scheduler holds it, or when renewals have failed for longer than the
/// row's TTL. Runs as a task of its own, so that no other work of the leader delays a renewal.
async fn renew_until_lost(store: Store, leadership: Leadership, confirmed: watch::Sender<Instant>, nats: NatsCheck) {
    let timing = store.timing();
    loop {
        tokio::time::sleep(timing.leader_renewal()).await;
        let asked = Instant::now();
        let left = timing.leader_ttl().saturating_sub(confirmed.borrow().elapsed());
        match tokio::time::timeout(left, store.renew_leadership(leadership, nats.delivers())).await {
            Ok(Ok(true)) => {
                confirmed.send_replace(asked);
            }
            Ok(Ok(false)) | Err(_) => return,
            Ok(Err(error)) => tracing::warn!(%error, "cannot renew the leader row"),
        }
        if confirmed.borrow().elapsed() > timing.leader_ttl() {
            return;
        }
    }
}

/// Repairs now and then what a scheduler of an earlier version, or a restore of the database under a running scheduler,
/// left.
async fn check_database(store: Store) {
    loop {
        if let Err(error) = limited("checking whether the database was restored", store.check_epoch()).await {
            tracing::warn!(%error, "cannot check whether the database was restored");
        }
        let resumed = limited("finding tasks that wait for no job", store.resume_tasks_without_pending_job()).await;
        if let Err(error) = resumed {
            tracing::warn!(%error, "cannot check the tasks that wait for a job");
        }
        tokio::time::sleep(DATABASE_CHECK_INTERVAL).await;
    }
}
