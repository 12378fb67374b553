//! Keeping leases: one thread of its own, with its own runtime and connection, so that busy cores cannot silence it.
//!
//! Every beat lists what is held and how old the last step of each is; the answer extends exactly those. A holder's own
//! deadline is the *send* time of the last confirmed beat + TTL - margin, on monotonic time: past it the lease is suspended
//! (state kept, nothing published). A later confirmation resumes it; the scheduler's word that it is lost ends it.
//!
//! Monotonic time stands still while a machine sleeps, but the lease runs on elsewhere: deadlines count the sleep too. The
//! age of a step does not, because nothing stood still that could have moved.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cfq_proto::ids::{BootId, LeaseId};
use cfq_proto::messages::{Beat, BeatReply, Held};
use cfq_proto::node::{Device, Ledger};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use tokio::sync::{Notify, watch};

use crate::session::{LinkError, NatsConfig, Session};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseStatus {
    /// Act and publish.
    Live,
    /// Keep the state, publish nothing.
    Suspended,
    /// Somebody else's: drop everything.
    Lost,
}

/// What a node adds to its beats.
#[derive(Debug, Clone, Default)]
pub struct BeatExtras {
    pub ledger: Option<Ledger>,
    pub devices: Option<Vec<Device>>,
}

struct Entry {
    /// With the machine's sleep, see [`Shared::now`].
    deadline: Instant,
    /// Without it.
    last_step: Instant,
    status: watch::Sender<LeaseStatus>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<LeaseId, Entry>,
}

impl Table {
    fn held(&self, now: Instant) -> Vec<Held> {
        self.entries
            .iter()
            .filter(|(_, e)| *e.status.borrow() != LeaseStatus::Lost)
            .map(|(lease, e)| Held { lease: *lease, step_age_ms: now.duration_since(e.last_step).as_millis() as u64 })
            .collect()
    }

    fn confirmed(&mut self, reply: &BeatReply, deadline: Instant) {
        for lease in &reply.extended {
            if let Some(entry) = self.entries.get_mut(lease) {
                entry.deadline = entry.deadline.max(deadline);
                entry.status.send_if_modified(|s| {
                    *s == LeaseStatus::Suspended && {
                        *s = LeaseStatus::Live;
                        true
                    }
                });
            }
        }
        for lease in &reply.lost {
            if let Some(entry) = self.entries.get_mut(lease) {
                entry.status.send_replace(LeaseStatus::Lost);
            }
        }
    }

    /// Suspends what is past its deadline; returns the next one.
    fn suspend_overdue(&mut self, now: Instant) -> Option<Instant> {
        let mut next = None;
        for entry in self.entries.values_mut() {
            if entry.deadline <= now {
                entry.status.send_if_modified(|s| {
                    *s == LeaseStatus::Live && {
                        *s = LeaseStatus::Suspended;
                        true
                    }
                });
            } else if *entry.status.borrow() == LeaseStatus::Live {
                next = Some(next.map_or(entry.deadline, |n: Instant| n.min(entry.deadline)));
            }
        }
        next
    }
}

struct Shared {
    table: Mutex<Table>,
    /// Beat at once: something was taken, or the ledger changed.
    nudge: Notify,
    hello: watch::Sender<u64>,
    stop: watch::Sender<bool>,
    ttl: Duration,
    margin: Duration,
    /// How long the machine slept so far.
    slept: fn() -> Duration,
}

impl Shared {
    /// Monotonic time that goes on while the machine sleeps; only for comparing deadlines.
    fn now(&self) -> Instant {
        Instant::now() + (self.slept)()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is plain data: it is whole even if a holder panicked.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Owns the heartbeat thread; dropping it ends the beats.
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
    /// `extras` is asked before every beat, on the heartbeat thread: it must not block.
    pub fn start(
        nats: NatsConfig,
        identity: Identity,
        boot: BootId,
        beat_subject: String,
        timing: Timing,
        extras: impl Fn() -> BeatExtras + Send + 'static,
    ) -> Result<Self, LinkError> {
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            nudge: Notify::new(),
            hello: watch::Sender::new(0),
            stop: watch::Sender::new(false),
            ttl: timing.lease_ttl(),
            margin: timing.lease_margin(),
            slept: crate::clock::slept,
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| LinkError::Thread { source })?;
        let for_thread = shared.clone();
        std::thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    let mut stop = for_thread.stop.subscribe();
                    tokio::select! {
                        () = beats(&for_thread, nats, identity, boot, beat_subject, timing, extras) => {}
                        _ = stop.wait_for(|s| *s) => {}
                    }
                });
            })
            .map_err(|source| LinkError::Thread { source })?;
        Ok(Self { shared })
    }

    /// Takes up a lease. `asked_at` is when the request that granted it was sent.
    pub fn hold(&self, lease: LeaseId, asked_at: Instant) -> HeldLease {
        let now = self.shared.now();
        let asked_at = now.checked_sub(asked_at.elapsed()).unwrap_or(now);
        let entry = Entry {
            deadline: asked_at + self.shared.ttl.saturating_sub(self.shared.margin),
            last_step: Instant::now(),
            status: watch::Sender::new(LeaseStatus::Live),
        };
        let status = entry.status.subscribe();
        self.shared.table().entries.insert(lease, entry);
        self.shared.nudge.notify_one();
        HeldLease { inner: Arc::new(HeldInner { lease, shared: self.shared.clone() }), status }
    }

    /// Beats now instead of at the next interval.
    pub fn nudge(&self) {
        self.shared.nudge.notify_one();
    }

    /// Changes each time the scheduler says it does not know this boot.
    pub fn hello_wanted(&self) -> watch::Receiver<u64> {
        self.shared.hello.subscribe()
    }

    pub fn stop(&self) {
        self.shared.stop.send_replace(true);
    }
}

struct HeldInner {
    lease: LeaseId,
    shared: Arc<Shared>,
}

impl Drop for HeldInner {
    fn drop(&mut self) {
        self.shared.table().entries.remove(&self.lease);
    }
}

/// A lease in hand. When the last clone is dropped it is not listed any more and ends by itself.
#[derive(Clone)]
pub struct HeldLease {
    inner: Arc<HeldInner>,
    status: watch::Receiver<LeaseStatus>,
}

impl std::fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldLease").field("lease", &self.inner.lease).field("status", &self.status()).finish()
    }
}

impl HeldLease {
    pub fn id(&self) -> LeaseId {
        self.inner.lease
    }

    /// The work moved: a token, a prefill chunk, a committed step.
    pub fn step(&self) {
        if let Some(entry) = self.inner.shared.table().entries.get_mut(&self.inner.lease) {
            entry.last_step = Instant::now();
        }
    }

    /// Also looks at the deadline itself, so that a process that was stopped and goes on does not act in the moment
    /// before its heartbeat thread runs.
    pub fn status(&self) -> LeaseStatus {
        let said = *self.status.borrow();
        if said != LeaseStatus::Live {
            return said;
        }
        let overdue = match self.inner.shared.table().entries.get(&self.inner.lease) {
            Some(entry) => entry.deadline <= self.inner.shared.now(),
            None => true,
        };
        if overdue { LeaseStatus::Suspended } else { LeaseStatus::Live }
    }

    /// Returns when the lease is lost for good.
    pub async fn lost(&self) {
        let mut status = self.status.clone();
        if status.wait_for(|s| *s == LeaseStatus::Lost).await.is_err() {
            tracing::debug!("lease keeper gone");
        }
    }

    /// Returns `Live` or `Lost`, waiting while it is suspended.
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
                // The deadline may have been moved without a change of the word.
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
        }
    }
}

async fn beats(
    shared: &Shared,
    nats: NatsConfig,
    identity: Identity,
    boot: BootId,
    subject: String,
    timing: Timing,
    extras: impl Fn() -> BeatExtras,
) {
    let session = loop {
        match Session::connect(&nats, identity.clone(), &timing).await {
            Ok(session) => break session,
            Err(error) => {
                tracing::warn!(%error, "heartbeat cannot connect");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    };
    loop {
        let (sent, sent_at) = (Instant::now(), shared.now());
        let next_deadline = shared.table().suspend_overdue(sent_at);
        let BeatExtras { ledger, devices } = extras();
        let beat = Beat { boot, held: shared.table().held(sent), ledger, devices };
        // A lost answer must leave time for another beat before the lease runs out.
        let answer = async {
            let asked = session.request::<_, BeatReply>(&subject, &beat);
            match tokio::time::timeout(timing.lease_ttl() / 2, asked).await {
                Ok(answer) => answer,
                Err(_) => Err(LinkError::NoAnswer { subject: subject.clone() }),
            }
        };
        let overdue = async {
            match next_deadline {
                Some(at) => tokio::time::sleep(at.saturating_duration_since(sent_at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(answer);
        tokio::select! {
            reply = &mut answer => settle(shared, reply, sent_at),
            () = overdue => {
                shared.table().suspend_overdue(shared.now());
                let reply = answer.await;
                settle(shared, reply, sent_at);
            }
        }
        let wake = (sent + timing.beat()).into();
        tokio::select! {
            () = tokio::time::sleep_until(wake) => {}
            // Several changes in a row make one beat.
            () = async { shared.nudge.notified().await; tokio::time::sleep(Duration::from_millis(5)).await } => {}
        }
    }
}

fn settle(shared: &Shared, reply: Result<BeatReply, LinkError>, sent: Instant) {
    match reply {
        Ok(reply) => {
            let deadline = sent + shared.ttl.saturating_sub(shared.margin);
            shared.table().confirmed(&reply, deadline);
            if reply.hello_again {
                shared.hello.send_modify(|n| *n += 1);
            }
        }
        Err(error) => tracing::warn!(%error, "beat not confirmed"),
    }
    shared.table().suspend_overdue(shared.now());
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static ASLEEP: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
    }

    fn asleep() -> Duration {
        ASLEEP.get()
    }

    #[test]
    fn a_machine_that_slept_does_not_take_its_lease_for_live() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Live);
        ASLEEP.set(Duration::from_secs(3600));
        assert_eq!(lease.status(), LeaseStatus::Suspended, "monotonic time stood still, the lease did not");
        let held = keeper.shared.table().held(Instant::now());
        assert!(held[0].step_age_ms < 1000, "but its work did not stand still: {held:?}");
        let extended = BeatReply { extended: vec![lease.id()], ..BeatReply::default() };
        settle(&keeper.shared, Ok(extended), keeper.shared.now());
        assert_eq!(lease.status(), LeaseStatus::Live);
        let taken_after = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(taken_after.status(), LeaseStatus::Live);
    }

    fn keeper() -> LeaseKeeper {
        LeaseKeeper {
            shared: Arc::new(Shared {
                table: Mutex::default(),
                nudge: Notify::new(),
                hello: watch::Sender::new(0),
                stop: watch::Sender::new(false),
                ttl: Duration::from_secs(6),
                margin: Duration::from_secs(1),
                slept: asleep,
            }),
        }
    }

    #[test]
    fn the_deadline_counts_from_the_send_time() {
        let keeper = keeper();
        let long_ago = Instant::now() - Duration::from_secs(5);
        let lease = keeper.hold(LeaseId::fresh(), long_ago);
        assert_eq!(lease.status(), LeaseStatus::Suspended, "5 s ago + 6 s TTL - 1 s margin is now");
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Live);
    }

    #[test]
    fn a_suspended_lease_resumes_and_a_lost_one_does_not() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now() - Duration::from_secs(9));
        keeper.shared.table().suspend_overdue(Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Suspended);
        let extended = BeatReply { extended: vec![lease.id()], ..BeatReply::default() };
        keeper.shared.table().confirmed(&extended, Instant::now() + Duration::from_secs(5));
        assert_eq!(lease.status(), LeaseStatus::Live);
        let lost = BeatReply { lost: vec![lease.id()], ..BeatReply::default() };
        keeper.shared.table().confirmed(&lost, Instant::now());
        assert_eq!(lease.status(), LeaseStatus::Lost);
        keeper.shared.table().confirmed(&extended, Instant::now() + Duration::from_secs(5));
        assert_eq!(lease.status(), LeaseStatus::Lost);
    }

    #[test]
    fn a_dropped_lease_is_not_listed() {
        let keeper = keeper();
        let lease = keeper.hold(LeaseId::fresh(), Instant::now());
        let again = lease.clone();
        drop(lease);
        assert_eq!(keeper.shared.table().held(Instant::now()).len(), 1);
        drop(again);
        assert!(keeper.shared.table().held(Instant::now()).is_empty());
    }
}
