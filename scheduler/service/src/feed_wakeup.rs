//! Wakes the event feeds when an event is committed (by this process, or by another scheduler, which sends a hint over
//! NATS after its commit) and when a token frame arrives (NATS). Wake-ups only reduce latency; each feed also polls the
//! database.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cfq_link::Session;
use cfq_link::session::Incoming;
use cfq_link::stop::Stop;
use cfq_proto::ids::{LeaseId, TaskId};
use cfq_proto::job::JobRole;
use cfq_proto::messages::TokenFrame;
use cfq_proto::subject;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use uuid::Uuid;

use crate::call_watch::CallWatches;
use crate::link::Link;
use crate::running_text::RunningTexts;
use crate::store::{Committed, Store};

/// Capacity of each channel, in messages. A feed that falls further behind misses messages. Missed events are read from
/// the database; missed token frames are visible as a gap in the frames' offsets.
const CHANNEL_MESSAGES: usize = 4_096;
/// Maximum size of the set of attempts whose first token is already recorded. A larger set is cleared; the next frame
/// of each attempt then records the first token again, which changes nothing.
const MAX_RECORDED_LEASES: usize = 4_096;
/// Maximum number of first tokens that are recorded at the same time. Each takes a database connection, and a node can
/// send frames of attempts that do not exist.
const MAX_FIRST_TOKEN_WRITES: usize = 4;
/// Minimum time between two hints to the other schedulers.
const HINT_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of tasks, and of calls, that one hint names.
const MAX_TASKS_PER_HINT: usize = 256;
/// Wait before a failed NATS subscription is opened again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Broadcast channels that wake the feeds of this process. Clones share the channels.
#[derive(Debug, Clone)]
pub struct FeedWakeup {
    /// Channel of committed events. Each message is the task that may have new events; `None` means that messages may
    /// have been missed, so every feed must query the database.
    events: broadcast::Sender<Option<TaskId>>,
    tokens: broadcast::Sender<Arc<TokenFrame>>,
    /// What the jobs of tasks have generated so far, for feeds that are opened later.
    texts: RunningTexts,
    /// Handlers of API clients' calls; they do not read the channels, whose messages are mostly those of tasks.
    calls: CallWatches,
    /// Id of this process in its hints.
    scheduler: Uuid,
}

impl Default for FeedWakeup {
    fn default() -> Self {
        Self {
            events: broadcast::Sender::new(CHANNEL_MESSAGES),
            tokens: broadcast::Sender::new(CHANNEL_MESSAGES),
            texts: RunningTexts::default(),
            calls: CallWatches::default(),
            scheduler: Uuid::now_v7(),
        }
    }
}

impl FeedWakeup {
    pub fn events(&self) -> broadcast::Receiver<Option<TaskId>> {
        self.events.subscribe()
    }

    pub fn tokens(&self) -> broadcast::Receiver<Arc<TokenFrame>> {
        self.tokens.subscribe()
    }

    /// What the jobs of tasks have generated so far.
    pub fn texts(&self) -> &RunningTexts {
        &self.texts
    }

    /// Handlers of API clients' calls.
    pub fn calls(&self) -> &CallWatches {
        &self.calls
    }

    #[cfg(test)]
    pub fn send_tokens(&self, frame: TokenFrame) {
        self.on_task_tokens(Arc::new(frame));
    }

    fn on_task_tokens(&self, frame: Arc<TokenFrame>) {
        // A feed that is opened in between receives the frame twice; it recognizes this by the offset.
        if frame.role != JobRole::Client {
            self.texts.append(&frame);
        }
        // `send` fails if no feed is open, which is not an error.
        drop(self.tokens.send(frame));
    }

    /// Wakes the feeds of this process for the tasks of its own transactions, and the other schedulers with hints, until
    /// `stop` is raised. Hints are sent at most every `HINT_INTERVAL`; the feeds of this process do not wait for that.
    pub async fn follow_commits(self, store: Store, link: Link, mut stop: Stop) {
        let mut committed = store.committed_tasks();
        let mut unsent = UnsentHint::default();
        let mut next_hint = Instant::now();
        loop {
            tokio::select! {
                changed = committed.recv() => match changed {
                    Ok(Committed::Task(task)) => {
                        self.wake(Some(task));
                        unsent.add_task(Some(task));
                    }
                    Ok(Committed::Call(call)) => {
                        self.calls.on_changed(Some(call));
                        unsent.add_call(call);
                    }
                    Err(RecvError::Lagged(_)) => {
                        self.wake_all();
                        unsent.add_task(None);
                    }
                    Err(RecvError::Closed) => return,
                },
                () = tokio::time::sleep_until(next_hint.into()), if !unsent.is_empty() => {
                    let hint = unsent.take(self.scheduler);
                    link.publish_hint(subject::HINT_EVENTS, &hint).await;
                    next_hint = Instant::now() + HINT_INTERVAL;
                }
                () = stop.raised() => return,
            }
        }
    }

    /// Wakes the feeds of this process for the events that other schedulers commit, until `stop` is raised.
    pub async fn follow_hints(self, session: Session, mut stop: Stop) {
        let Some(mut hints) = subscribe::<EventsHint>(&session, subject::HINT_EVENTS, &mut stop).await else { return };
        loop {
            let hint = tokio::select! {
                next = hints.next() => match next { Some(hint) => hint, None => return },
                () = stop.raised() => return,
            };
            match hint.body {
                Ok(hint) if hint.scheduler == self.scheduler => {}
                Ok(hint) if hint.tasks.is_empty() && hint.calls.is_empty() => self.wake_all(),
                Ok(hint) => {
                    hint.tasks.into_iter().for_each(|task| self.wake(Some(task)));
                    hint.calls.into_iter().for_each(|call| self.calls.on_changed(Some(call)));
                }
                Err(error) => tracing::debug!(%error, "unreadable hint about events ignored"),
            }
        }
    }

    fn wake_all(&self) {
        self.calls.on_changed(None);
        self.wake(None);
    }

    fn wake(&self, task: Option<TaskId>) {
        // `send` fails if no feed is open, which is not an error.
        drop(self.events.send(task));
    }

    /// Forwards token frames to the feeds until `stop` is raised. The first frame of each attempt is recorded in the
    /// database, because a task's working time starts at its first token.
    pub async fn follow_tokens(self, session: Session, store: Store, mut stop: Stop) {
        let Some(mut frames) = subscribe::<TokenFrame>(&session, &subject::tokens_of("*"), &mut stop).await else {
            return;
        };
        let mut first_tokens = FirstTokens::default();
        // Leases of attempts whose first token could not be recorded. The next frame of such an attempt triggers
        // another try.
        let (failed, mut failures) = tokio::sync::mpsc::channel(CHANNEL_MESSAGES);
        loop {
            let frame = tokio::select! {
                next = frames.next() => match next { Some(frame) => frame, None => return },
                Some(lease) = failures.recv() => {
                    first_tokens.forget(lease);
                    continue;
                }
                () = stop.raised() => return,
            };
            let Ok(frame) = frame.body else { continue };
            if let Some(permit) = first_tokens.begin(frame.fence.lease) {
                let (store, fence, failed) = (store.clone(), frame.fence, failed.clone());
                tokio::spawn(async move {
                    let _permit = permit;
                    if let Err(error) = store.record_first_token(&fence).await {
                        tracing::debug!(job = %fence.job, attempt = fence.attempt, %error, "first token not recorded");
                        if failed.send(fence.lease).await.is_err() {
                            tracing::debug!("token frame reader stopped");
                        }
                    }
                });
            }
            let frame = Arc::new(frame);
            if !self.calls.on_tokens(&frame) {
                self.on_task_tokens(frame);
            }
        }
    }
}

/// The attempts whose first token is recorded, or is being recorded.
struct FirstTokens {
    leases: HashSet<LeaseId>,
    writes: Arc<Semaphore>,
}

impl Default for FirstTokens {
    fn default() -> Self {
        Self { leases: HashSet::new(), writes: Arc::new(Semaphore::new(MAX_FIRST_TOKEN_WRITES)) }
    }
}

impl FirstTokens {
    /// The right to record the first token of this attempt; `None` if that is done, or if too many are being recorded,
    /// in which case a later frame of the attempt asks again.
    fn begin(&mut self, lease: LeaseId) -> Option<OwnedSemaphorePermit> {
        if self.leases.contains(&lease) {
            return None;
        }
        let permit = self.writes.clone().try_acquire_owned().ok()?;
        if self.leases.len() >= MAX_RECORDED_LEASES {
            self.leases.clear();
        }
        self.leases.insert(lease);
        Some(permit)
    }

    fn forget(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
    }
}

/// Hint from one scheduler to the others: transactions that may have added events, or changed calls of API clients, were
/// committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EventsHint {
    /// The sender; it has woken its own feeds already.
    scheduler: Uuid,
    /// The tasks. If these and `calls` are empty, they are not known, so every feed must query the database.
    tasks: Vec<TaskId>,
    /// The calls of API clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    calls: Vec<TaskId>,
}

/// Tasks and calls of the next hint.
#[derive(Debug, Default)]
struct UnsentHint {
    tasks: BTreeSet<TaskId>,
    calls: BTreeSet<TaskId>,
    /// Whether there were too many to name.
    is_overflown: bool,
}

impl UnsentHint {
    fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.calls.is_empty() && !self.is_overflown
    }

    /// Adds a task; `None` stands for all tasks and calls.
    fn add_task(&mut self, task: Option<TaskId>) {
        self.tasks.extend(task);
        self.is_overflown |= task.is_none() || self.tasks.len() > MAX_TASKS_PER_HINT;
    }

    fn add_call(&mut self, call: TaskId) {
        self.calls.insert(call);
        self.is_overflown |= self.calls.len() > MAX_TASKS_PER_HINT;
    }

    /// The hint to send, after which none is due.
    fn take(&mut self, scheduler: Uuid) -> EventsHint {
        let Self { tasks, calls, is_overflown } = std::mem::take(self);
        match is_overflown {
            true => EventsHint { scheduler, tasks: Vec::new(), calls: Vec::new() },
            false => EventsHint { scheduler, tasks: tasks.into_iter().collect(), calls: calls.into_iter().collect() },
        }
    }
}

/// Subscribes, and repeats that until it succeeds; `None` if `stop` was raised first.
async fn subscribe<T: DeserializeOwned>(session: &Session, subject: &str, stop: &mut Stop) -> Option<Incoming<T>> {
    loop {
        match session.subscribe::<T>(subject).await {
            Ok(incoming) => return Some(incoming),
            Err(error) => tracing::warn!(subject, %error, "cannot subscribe, retrying"),
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            () = stop.raised() => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::subject::Identity;

    use super::*;
    use crate::testing::TestEnv;

    /// Maximum wait for a wake-up, before another task is submitted: the subscription may not have been in place.
    const WAIT: Duration = Duration::from_millis(500);

    #[tokio::test]
    async fn commit_wakes_the_feeds_of_this_scheduler_and_of_others() {
        let env = TestEnv::new().await;
        let identity = Identity::Scheduler;
        let session = Session::connect(&env.nats(&identity), identity, env.store.timing()).await.unwrap();
        let (here, there, link) = (FeedWakeup::default(), FeedWakeup::default(), Link::default());
        link.set(session.clone());
        let (_stopper, stop) = cfq_link::stop::channel();
        let (mut own, mut other) = (here.events(), there.events());
        tokio::spawn(here.follow_commits(env.store.clone(), link, stop.clone()));
        tokio::spawn(there.follow_hints(session, stop));
        let mut submitted = Vec::new();
        for _ in 0..20 {
            submitted.push(env.submit().await.0);
            let Ok(woken) = tokio::time::timeout(WAIT, other.recv()).await else { continue };
            assert!(submitted.contains(&woken.unwrap().unwrap()));
            assert!(submitted.contains(&own.recv().await.unwrap().unwrap()));
            return;
        }
        panic!("no hint arrived");
    }

    #[test]
    fn hint_names_the_tasks_and_calls_until_there_are_too_many() {
        let mut unsent = UnsentHint::default();
        let (scheduler, task, call) = (Uuid::now_v7(), TaskId::fresh(), TaskId::fresh());
        unsent.add_task(Some(task));
        unsent.add_task(Some(task));
        unsent.add_call(call);
        let named = EventsHint { scheduler, tasks: vec![task], calls: vec![call] };
        assert_eq!(unsent.take(scheduler), named);
        assert!(unsent.is_empty());
        let all = EventsHint { scheduler, tasks: vec![], calls: vec![] };
        (0..=MAX_TASKS_PER_HINT).for_each(|_| unsent.add_task(Some(TaskId::fresh())));
        assert_eq!(unsent.take(scheduler), all);
        (0..=MAX_TASKS_PER_HINT).for_each(|_| unsent.add_call(TaskId::fresh()));
        unsent.add_task(Some(task));
        assert_eq!(unsent.take(scheduler), all);
        unsent.add_task(None);
        assert_eq!((unsent.is_empty(), unsent.take(scheduler), unsent.is_empty()), (false, all, true));
    }

    #[test]
    fn frames_of_many_attempts_start_few_writes() {
        let mut first_tokens = FirstTokens::default();
        let leases: Vec<LeaseId> = (0..100).map(|_| LeaseId::fresh()).collect();
        let mut permits: Vec<_> = leases.iter().filter_map(|lease| first_tokens.begin(*lease)).collect();
        assert_eq!(permits.len(), MAX_FIRST_TOKEN_WRITES);
        assert!(first_tokens.begin(leases[0]).is_none(), "it is being recorded");
        permits.pop();
        assert!(first_tokens.begin(leases[0]).is_none(), "it is recorded");
        assert!(first_tokens.begin(leases[50]).is_some(), "the next frame of an attempt asks again");
    }
}
