//! Keeps leases alive: a dedicated thread with its own runtime, connection and, where permitted, a raised priority sends
//! heartbeats, so that busy cores cannot delay them.
//!
//! Every heartbeat lists the held leases, each with the time since its last step; the scheduler extends only leases in
//! this list. Each holder computes its own deadline: the *send* time of the last confirmed heartbeat + TTL - margin, on
//! monotonic time. After this deadline the lease is suspended: the holder keeps its state and publishes nothing. A
//! later confirmed heartbeat resumes the lease; a reply that lists the lease as lost ends it.
//!
//! Monotonic time stops while a machine sleeps, but the scheduler's clock for the machine's leases continues. Deadlines
//! therefore include the time slept. The age of a step excludes it, because no work could proceed during the sleep.

mod heartbeat;
mod priority;
mod table;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cfq_proto::ids::{BootId, LeaseId};
use cfq_proto::node::{Device, Ledger};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use tokio::sync::{Notify, watch};

use crate::link_error::LinkError;
use crate::session::NatsConfig;
use table::LeaseTable;

/// Interval at which a waiting holder checks the deadline, which may move without a change of status.
const DEADLINE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Status of a held lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseStatus {
    /// The holder may act and publish.
    Live,
    /// The holder keeps its state and publishes nothing.
    Suspended,
    /// The lease may now belong to another holder: this holder must drop all state.
    Lost,
}

/// Fields that a node adds to its heartbeats.
#[derive(Debug, Clone, Default)]
pub struct HeartbeatExtras {
    /// The ledger, if it changed since the last confirmed heartbeat.
    pub ledger: Option<Ledger>,
    /// The devices, if they changed since the last confirmed heartbeat.
    pub devices: Option<Vec<Device>>,
}

struct Shared {
    table: Mutex<LeaseTable>,
    /// Wakes the heartbeat loop before the next interval, because a lease was taken or the ledger changed.
    heartbeat_now: Notify,
    /// Number of times the scheduler has asked this process to register again.
    registration_requests: watch::Sender<u64>,
    stop: watch::Sender<bool>,
    ttl: Duration,
    margin: Duration,
    /// Function that returns the total time the machine has slept.
    slept: fn() -> Duration,
}

impl Shared {
    /// Monotonic time including the machine's sleep; only for comparing deadlines.
    fn now(&self) -> Instant {
        Instant::now() + (self.slept)()
    }

    /// Deadline of a lease that was granted or extended by a request or heartbeat sent at `sent`.
    fn deadline_after(&self, sent: Instant) -> Instant {
        sent + self.ttl.saturating_sub(self.margin)
    }

    fn table(&self) -> MutexGuard<'_, LeaseTable> {
        // The table is plain data: it is consistent even if a holder panicked.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Owner of the heartbeat thread. Cheap to clone; the heartbeats end with [`Self::stop`].
#[derive(Clone)]
pub struct LeaseKeeper {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for LeaseKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseKeeper").finish_non_exhaustive()
    }
}

impl LeaseKeeper {
    /// Starts the heartbeat thread. It calls `extras` before every heartbeat, so `extras` must not block.
    ///
    /// # Errors
    /// [`LinkError::Thread`] if the runtime or the thread cannot be started.
    pub fn start(
        nats: NatsConfig,
        identity: Identity,
        boot: BootId,
        heartbeat_subject: String,
        timing: Timing,
        extras: impl Fn() -> HeartbeatExtras + Send + 'static,
    ) -> Result<Self, LinkError> {
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            heartbeat_now: Notify::new(),
            registration_requests: watch::Sender::new(0),
            stop: watch::Sender::new(false),
            ttl: timing.lease_ttl(),
            margin: timing.lease_margin(),
            slept: crate::clock::time_slept,
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| LinkError::Thread { source })?;
        let for_thread = shared.clone();
        std::thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || {
                priority::raise();
                runtime.block_on(async move {
                    let mut stop = for_thread.stop.subscribe();
                    tokio::select! {
                        () = heartbeat::run(&for_thread, nats, identity, boot, heartbeat_subject, timing, extras) => {}
                        _ = stop.wait_for(|s| *s) => {}
                    }
                });
            })
            .map_err(|source| LinkError::Thread { source })?;
        Ok(Self { shared })
    }

    /// Adds a lease to the heartbeats and returns its handle. `requested_at` is the time at which the request that
    /// granted the lease was sent.
    pub fn hold(&self, lease: LeaseId, requested_at: Instant) -> LeaseHandle {
        let now = self.shared.now();
        let requested_at = now.checked_sub(requested_at.elapsed()).unwrap_or(now);
        let deadline = self.shared.deadline_after(requested_at);
        let status = self.shared.table().insert(lease, deadline, Instant::now());
        self.shared.heartbeat_now.notify_one();
        LeaseHandle { inner: Arc::new(HandleInner { lease, shared: self.shared.clone() }), status }
    }

    /// Sends a heartbeat now instead of at the next interval.
    pub fn heartbeat_now(&self) {
        self.shared.heartbeat_now.notify_one();
    }

    /// Returns a watch whose value changes each time the scheduler does not know this boot and asks the process to
    /// register again.
    pub fn registration_requests(&self) -> watch::Receiver<u64> {
        self.shared.registration_requests.subscribe()
    }

    /// Ends the heartbeats.
    pub fn stop(&self) {
        self.shared.stop.send_replace(true);
    }
}

struct HandleInner {
    lease: LeaseId,
    shared: Arc<Shared>,
}

impl Drop for HandleInner {
    fn drop(&mut self) {
        self.shared.table().remove(self.lease);
    }
}

/// Handle of a held lease. When the last clone is dropped, heartbeats do not list the lease any more and it expires.
#[derive(Clone)]
pub struct LeaseHandle {
    inner: Arc<HandleInner>,
    status: watch::Receiver<LeaseStatus>,
}

impl std::fmt::Debug for LeaseHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseHandle").field("lease", &self.inner.lease).field("status", &self.status()).finish()
    }
}

impl LeaseHandle {
    /// Id of the lease.
    pub fn id(&self) -> LeaseId {
        self.inner.lease
    }

    /// Records that the work made a step: a token, a prefill chunk, a committed step.
    pub fn record_step(&self) {
        self.inner.shared.table().record_step(self.inner.lease, Instant::now());
    }

    /// Returns the current status. This method checks the deadline itself, so that a process that continues after a
    /// SIGSTOP does not act before its heartbeat thread runs again.
    pub fn status(&self) -> LeaseStatus {
        let status = *self.status.borrow();
        if status != LeaseStatus::Live {
            return status;
        }
        let overdue = match self.inner.shared.table().deadline(self.inner.lease) {
            Some(deadline) => deadline <= self.inner.shared.now(),
            None => true,
        };
        if overdue { LeaseStatus::Suspended } else { LeaseStatus::Live }
    }

    /// Waits until the lease is lost.
    pub async fn lost(&self) {
        let mut status = self.status.clone();
        if status.wait_for(|s| *s == LeaseStatus::Lost).await.is_err() {
            tracing::debug!("lease keeper dropped");
        }
    }

    /// Waits while the lease is suspended, then returns `Live` or `Lost`.
    pub async fn settled(&self) -> LeaseStatus {
        let mut status = self.status.clone();
        loop {
            match self.status() {
                LeaseStatus::Suspended => {}
                settled => return settled,
            }
            tokio::select! {
                changed = status.changed() => {
                    if changed.is_err() {
                        return LeaseStatus::Lost;
                    }
                }
                () = tokio::time::sleep(DEADLINE_CHECK_INTERVAL) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::messages::HeartbeatReply;

    thread_local! {
        static SLEPT: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
    }

    fn slept() -> Duration {
        SLEPT.get()
    }

    fn keeper() -> LeaseKeeper {
        LeaseKeeper {
            shared: Arc::new(Shared {
                table: Mutex::default(),
                heartbeat_now: Notify::new(),
                registration_requests: watch::Sender::new(0),
                stop: watch::Sender::new(false),
                ttl: Duration::from_secs(6),
                margin: Duration::from_secs(1),
                slept,
            }),
        }
    }

    #[test]
    fn lease_is_suspended_after_the_machine_slept() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Live);
        SLEPT.set(Duration::from_secs(3600));
        assert_eq!(lease.status(), LeaseStatus::Suspended, "monotonic time stopped, the lease continued");
        let held = keeper.shared.table().held(Instant::now());
        assert!(held[0].step_age_ms < 1000, "the age of a step excludes the sleep: {held:?}");
        let extended = HeartbeatReply { extended: vec![lease.id()], ..HeartbeatReply::default() };
        heartbeat::apply(&keeper.shared, Ok(extended), keeper.shared.now());
        assert_eq!(lease.status(), LeaseStatus::Live);
        let taken_after = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(taken_after.status(), LeaseStatus::Live);
    }

    #[test]
    fn deadline_counts_from_the_send_time() {
        let keeper = keeper();
        let long_ago = Instant::now() - Duration::from_secs(5);
        let lease = keeper.hold(LeaseId::fresh(), long_ago);
        assert_eq!(lease.status(), LeaseStatus::Suspended, "5 s ago + 6 s TTL - 1 s margin is now");
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Live);
    }

    #[test]
    fn suspended_lease_resumes_and_lost_lease_does_not() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now() - Duration::from_secs(9));
        keeper.shared.table().suspend_overdue(Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Suspended);
        let extended = HeartbeatReply { extended: vec![lease.id()], ..HeartbeatReply::default() };
        keeper.shared.table().apply(&extended, Instant::now() + Duration::from_secs(5));
        assert_eq!(lease.status(), LeaseStatus::Live);
        let lost = HeartbeatReply { lost: vec![lease.id()], ..HeartbeatReply::default() };
        keeper.shared.table().apply(&lost, Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Lost);
        keeper.shared.table().apply(&extended, Instant::now() + Duration::from_secs(5));
        assert_eq!(lease.status(), LeaseStatus::Lost);
    }

    #[test]
    fn lease_is_listed_until_its_last_handle_is_dropped() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        let clone = lease.clone();
        drop(lease);
        assert_eq!(keeper.shared.table().held(Instant::now()).len(), 1);
        drop(clone);
        assert!(keeper.shared.table().held(Instant::now()).is_empty());
    }
}
