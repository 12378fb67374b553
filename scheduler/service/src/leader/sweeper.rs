//! Ends expired leases and passed deadlines. The sweeper needs only Postgres: it waits neither for the planner nor for
//! JetStream. While NATS delivers no message, it ends no lease, because live holders cannot send heartbeats either.
//!
//! Passed deadlines, and the work that an earlier boot of a node or runner still holds, need no grace period, because no
//! heartbeat changes them.
//!
//! A heartbeat that arrived but could not be written delays the end of its sender's leases (see
//! [`HeartbeatFailures`](crate::heartbeat_failures::HeartbeatFailures)).
//!
//! An error that concerns one row skips only that row. Such an error does not renew the grace period (see `grace`); an
//! outage of Postgres or NATS, or a lock on a whole table, does.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use super::clock::DatabaseClock;
use super::grace::Grace;
use super::nats_check::NatsCheck;
use crate::store::{Leadership, StoreError, limited};

/// Time that a message to itself may take, in addition to the interval of these messages.
const NATS_MARGIN: Duration = Duration::from_secs(1);

/// What the sweeper found, for the planner.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// Last reading of the database's clock.
    pub clock: DatabaseClock,
    /// The current grace period.
    pub grace: Grace,
    /// Total of the jumps ahead of the database's clock in this term, in ms.
    pub jumps_ms: i64,
}

/// Sweeps during one term of a leader.
pub struct Sweeper {
    leader: Leader,
    leadership: Leadership,
    observed: watch::Sender<Option<Observed>>,
    /// When the leader row was last renewed. A renewal is a write, like the extension of a lease by a heartbeat.
    confirmed: watch::Receiver<Instant>,
    nats: NatsCheck,
    grace: Grace,
    jumps_ms: i64,
    /// How long the last reading of the clock took.
    last_reading: Duration,
}

impl Sweeper {
    pub fn new(
        leader: Leader,
        leadership: Leadership,
        observed: watch::Sender<Option<Observed>>,
        confirmed: watch::Receiver<Instant>,
        nats: NatsCheck,
    ) -> Self {
        let timing = leader.store.timing();
        let grace = Grace::new(Instant::now(), timing.lease_ttl(), timing.lease_margin());
        Self { leader, leadership, observed, confirmed, nats, grace, jumps_ms: 0, last_reading: Duration::ZERO }
    }

    /// Sweeps at intervals until another scheduler leads.
    pub async fn run(mut self) {
        let mut sweeps = interval(self.leader.store.timing().sweep());
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            sweeps.tick().await;
            match self.sweep().await {
                Ok(()) => {}
                Err(StoreError::NotLeader { term }) => {
                    tracing::warn!(term, "sweep rejected, another scheduler leads");
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "sweep failed, retrying");
                    if error.may_retry() {
                        self.grace.renew(Instant::now());
                    }
                }
            }
        }
    }

    fn observe(&self, clock: DatabaseClock) {
        self.observed.send_replace(Some(Observed { clock, grace: self.grace, jumps_ms: self.jumps_ms }));
    }

    async fn sweep(&mut self) -> Result<(), StoreError> {
        let store = &self.leader.store;
        let asked = Instant::now();
        let read = DatabaseClock::new(limited("reading the database's clock", store.clock_ms()).await?);
        let before = self.observed.borrow().map(|observed| observed.clock);
        let took = asked.elapsed();
        if self.grace.on_clock_reading(before.as_ref(), &read, took) {
            tracing::warn!("database clock jumped or was slow to answer: no lease is ended for one lease TTL");
        }
        let before_took = std::mem::replace(&mut self.last_reading, took);
        let jump_ms = before.map_or(0, |before| read.certain_jump_ms(&before, before_took));
        if u128::from(jump_ms) > store.timing().lease_margin().as_millis() {
            let jump_ms = i64::try_from(jump_ms).unwrap_or(i64::MAX);
            // Before the planner sees the new time.
            let excluded = limited("excluding a jump of the clock", store.exclude_clock_jump(self.leadership, jump_ms));
            if let Err(error) = excluded.await {
                tracing::warn!(%error, jump_ms, "the jump of the clock counts as working time");
            }
            self.jumps_ms = self.jumps_ms.saturating_add(jump_ms);
        }
        self.observe(read);
        self.leader.link.send_hints(store.sweep_deadlines(self.leadership).await?).await;
        // A registration releases this work itself, unless its scheduler stopped or a row was locked.
        self.leader.link.send_hints(store.release_jobs_of_earlier_boots(None).await?).await;
        self.leader.link.send_hints(store.release_tasks_of_earlier_boots(None).await?).await;
        let timing = store.timing();
        if self.confirmed.borrow().elapsed() > timing.leader_renewal() + timing.lease_margin() {
            tracing::warn!("postgres is slow to write: no lease is ended for one lease TTL");
            self.grace.renew(Instant::now());
        }
        if self.nats.is_silent_for(timing.sweep() + NATS_MARGIN) {
            self.grace.renew(Instant::now());
        }
        self.observe(read);
        if self.grace.is_active(Instant::now()) {
            return Ok(());
        }
        let unwritten = self.leader.heartbeat_failures.within(timing.lease_ttl());
        let (hints, jobs, tasks) = store.sweep(self.leadership, read.ms(), &unwritten).await?;
        self.leader.metrics.job_leases_expired.inc_by(jobs as u64);
        self.leader.metrics.task_leases_expired.inc_by(tasks as u64);
        if jobs + tasks > 0 {
            tracing::warn!(jobs, tasks, "leases expired");
        }
        self.leader.link.send_hints(hints).await;
        let (hints, calls) = store.sweep_calls(self.leadership, read.ms()).await?;
        if calls > 0 {
            tracing::warn!(calls, "calls of clients ended, because the scheduler that served them was lost");
        }
        self.leader.link.send_hints(hints).await;
        Ok(())
    }
}
