//! Answers the requests of nodes and runners over NATS. Any scheduler may answer a request (all schedulers share one
//! queue group), because every write is fenced; while one leads, the others leave the group (see [`presence`]). A sender
//! that receives no reply repeats the request with the same body. A request that is read after its sender's deadline is
//! dropped (see [`request_age`]). One that is still in progress shortly before its sender's deadline is answered with
//! `unavailable` and continues; its sender repeats it. For the exceptions see [`in_progress_reply`].
//!
//! Each verb has its own subscription and its own concurrency limit, and heartbeats have separate database connections,
//! so that they never wait behind blobs or feeds.

mod group;
mod node;
pub mod presence;
mod request_age;
mod runner;
pub mod stream;

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::Message;
use cfq_link::stop::Stop;
use cfq_link::{LinkError, Session, clock};
use cfq_proto::envelope::{Deadline, EnvelopeError};
use cfq_proto::messages::{RefusedReason, UnavailableReason};
use cfq_proto::{envelope, subject};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::heartbeat_failures::HeartbeatFailures;
use crate::link::Link;
use crate::metrics::Metrics;
use crate::store::{Store, StoreError};
use group::GroupSubscription;
use node::FORMER_REGISTER;
pub use request_age::SenderClocks;

/// The part of a request's timeout that is left for the reply to a request in progress: one fifth.
const REPLY_MARGIN: u64 = 5;

/// State shared by all request handlers.
#[derive(Debug, Clone)]
pub struct Bus {
    pub store: Store,
    /// Store for heartbeats: the same database through a separate connection pool.
    pub heartbeats: Store,
    pub link: Link,
    pub session: Session,
    pub metrics: Metrics,
    pub concurrency: usize,
    pub heartbeat_failures: HeartbeatFailures,
    /// Whether this scheduler answers requests now.
    pub answers: watch::Receiver<bool>,
    pub sender_clocks: Arc<Mutex<SenderClocks>>,
}

impl Bus {
    /// Subscribes to all verbs, then answers until `stop` is raised; requests in progress are finished first.
    pub async fn run(self, mut stop: Stop) -> Result<(), LinkError> {
        let mut loops = JoinSet::new();
        let bus = Arc::new(self);
        node::serve(&bus, &mut loops, &stop).await?;
        runner::serve(&bus, &mut loops, &stop).await?;
        bus.session.flush().await?;
        tracing::info!("answering requests of nodes and runners");
        stop.raised().await;
        while loops.join_next().await.is_some() {}
        Ok(())
    }

    /// Subscribes to the requests with this verb from all senders of this kind (node or runner). Each reply is the
    /// handler's result for (sender, body). If the handler returns `None`, no reply is sent, and the sender repeats the
    /// request.
    async fn answer<Q, A, F, Fut>(
        self: &Arc<Self>,
        loops: &mut JoinSet<()>,
        stop: &Stop,
        kind: &'static str,
        verb: &'static str,
        handler: F,
    ) -> Result<(), LinkError>
    where
        Q: DeserializeOwned + Send + 'static,
        A: Serialize + Send + Sync + 'static,
        F: Fn(Arc<Self>, String, Q) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Option<A>> + Send + 'static,
    {
        let subject = format!("cfq.v1.{kind}.*.{verb}");
        let mut requests = GroupSubscription::new(self.session.clone(), subject, self.answers.clone()).await?;
        let (bus, mut stop) = (self.clone(), stop.clone());
        loops.spawn(async move {
            let permits = Arc::new(Semaphore::new(bus.concurrency));
            loop {
                let Ok(permit) = permits.clone().acquire_owned().await else { break };
                let message = tokio::select! {
                    biased;
                    () = stop.raised() => break,
                    next = requests.next() => match next {
                        Some(message) => message,
                        None => break,
                    },
                };
                let Some(sender) = subject::sender(&message.subject).map(|(id, _)| id.to_owned()) else { continue };
                if message.reply.as_ref().is_some_and(|reply| !subject::is_inbox_of(kind, &sender, reply)) {
                    tracing::warn!(
                        %sender, verb, reply = ?message.reply,
                        "request refused: its reply subject is not an inbox of the sender"
                    );
                    bus.metrics.observe_nats(verb, "foreign_reply", 0.0);
                    continue;
                }
                let (body, limit): (Q, Option<Duration>) = match envelope::decode_request(&message.payload) {
                    Ok((body, None)) => (body, None),
                    Ok((body, Some(deadline))) => {
                        let Some(left) = bus.time_left(kind, &sender, deadline) else {
                            tracing::info!(%sender, verb, "request dropped: it arrived after its sender stopped waiting");
                            bus.metrics.observe_nats(verb, "expired", 0.0);
                            continue;
                        };
                        (body, Some(left.saturating_sub(Duration::from_millis(deadline.timeout_ms / REPLY_MARGIN))))
                    }
                    Err(error) => {
                        tracing::warn!(
                            %sender, verb, %error, cause = ?std::error::Error::source(&error),
                            "unreadable message refused"
                        );
                        bus.metrics.observe_nats(verb, "unreadable", 0.0);
                        if let Some(refusal) = decode_refusal(verb, &error) {
                            bus.reply(&message, verb, &refusal).await;
                        }
                        continue;
                    }
                };
                let (bus, handler) = (bus.clone(), handler.clone());
                tokio::spawn(async move {
                    let began = Instant::now();
                    let mut handled = pin!(handler(bus.clone(), sender.clone(), body));
                    let outcome = tokio::select! {
                        biased;
                        answer = &mut handled => match answer {
                            Some(answer) => {
                                bus.reply(&message, verb, &answer).await;
                                "answered"
                            }
                            None => "unanswered",
                        },
                        Some(reply) = in_progress_reply(verb, limit) => {
                            bus.metrics.observe_nats(verb, "in_progress", began.elapsed().as_secs_f64());
                            bus.reply(&message, verb, &reply).await;
                            handled.await;
                            drop(permit);
                            return;
                        }
                    };
                    bus.metrics.observe_nats(verb, outcome, began.elapsed().as_secs_f64());
                    drop(permit);
                });
            }
            // Once all permits can be acquired, no request is in progress any more.
            let all = u32::try_from(bus.concurrency).unwrap_or(u32::MAX);
            if permits.acquire_many(all).await.is_err() {
                tracing::debug!(verb, "permits were closed");
            }
        });
        Ok(())
    }
}

impl Bus {
    fn time_left(&self, kind: &'static str, sender: &str, deadline: Deadline) -> Option<Duration> {
        // Plain data: consistent even if a thread panicked while it held the lock.
        let mut clocks = self.sender_clocks.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.time_left(kind, sender, deadline, clock::process_ms())
    }

    async fn reply<A: Serialize>(&self, request: &Message, verb: &str, answer: &A) {
        if let Some(inbox) = &request.reply
            && let Err(error) = self.session.publish(inbox, answer).await
        {
            tracing::debug!(subject = %request.subject, verb, %error, "reply not sent");
        }
    }
}

/// Waits for the limit of a request, then returns the reply to it if it is still in progress. `None` at once for
/// - heartbeats and registrations, whose replies have no field for it;
/// - lease requests: after `unavailable` a runner sends another one, and the grant that the first one may still get would
///   be lost;
/// - reads, whose repetition would take as long again.
async fn in_progress_reply(verb: &str, limit: Option<Duration>) -> Option<serde_json::Value> {
    let is_read = matches!(verb, "main_get" | "job_get" | "blob_get");
    let has_reply = !is_read && !matches!(verb, "heartbeat" | "register" | FORMER_REGISTER | "lease");
    let limit = limit.filter(|_| has_reply)?;
    tokio::time::sleep(limit).await;
    let reason = UnavailableReason::Other("the request is still in progress".to_owned());
    Some(serde_json::json!({ "type": "unavailable", "reason": reason }))
}

/// Reply to a request that cannot be decoded, as JSON of the verb's reply type. A version mismatch is answered with
/// `unavailable` if the type has it, because either side may be upgraded at any time. A malformed request is refused
/// permanently, except for `lease`, whose type has only `unavailable`. `None` for heartbeats, because their reply has
/// no field for a reason.
fn decode_refusal(verb: &str, error: &EnvelopeError) -> Option<serde_json::Value> {
    let kind = match (verb, error) {
        ("heartbeat", _) => return None,
        ("register", _) => "refused",
        ("lease", _) | (_, EnvelopeError::Version { .. }) => "unavailable",
        ("step", EnvelopeError::Malformed(_)) => "illegal",
        (_, EnvelopeError::Malformed(_)) => "refused",
    };
    Some(serde_json::json!({ "type": kind, "reason": error.to_string() }))
}

/// Logs why a request failed: at debug level if a retry can help, else as an error.
fn log_failure(error: &StoreError, doing: &str) {
    if error.may_retry() {
        tracing::debug!(doing, %error, cause = ?std::error::Error::source(error), "database unavailable");
    } else {
        tracing::error!(doing, %error, cause = ?std::error::Error::source(error), "request failed");
    }
}

/// Logs why a request cannot be carried out now, and returns the reason for the reply.
fn unavailable(error: &StoreError, doing: &str) -> UnavailableReason {
    log_failure(error, doing);
    match error {
        StoreError::Unavailable { doing, .. } | StoreError::TooSlow { doing } => {
            UnavailableReason::Database { doing: (*doing).to_owned() }
        }
        StoreError::NotLeader { .. } => UnavailableReason::NotLeader,
        StoreError::Password { .. }
        | StoreError::Refused { .. }
        | StoreError::Unreadable { .. }
        | StoreError::Newer { .. }
        | StoreError::Altered { .. }
        | StoreError::Migration { .. } => UnavailableReason::Other(error.to_string()),
    }
}

/// Logs why a request can never be carried out, and returns the reason for the reply.
fn refusal(error: &StoreError, doing: &str) -> RefusedReason {
    log_failure(error, doing);
    match error {
        StoreError::Refused { doing, .. } => RefusedReason::Database { doing: (*doing).to_owned() },
        StoreError::Unreadable { what, text } => {
            RefusedReason::UnreadableRow { what: (*what).to_owned(), text: text.clone() }
        }
        StoreError::Password { .. }
        | StoreError::Unavailable { .. }
        | StoreError::TooSlow { .. }
        | StoreError::Newer { .. }
        | StoreError::Altered { .. }
        | StoreError::Migration { .. }
        | StoreError::NotLeader { .. } => RefusedReason::Other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::envelope::EnvelopeError;
    use cfq_proto::messages::{
        BlobGetReply, BlobPutReply, FenceReply, JobReply, LeaseReply, MainReply, RegisterReply, StepReply,
    };
    use serde::de::DeserializeOwned;

    fn version_reply<T: DeserializeOwned>(verb: &str) -> T {
        serde_json::from_value(super::decode_refusal(verb, &EnvelopeError::Version { found: 9 }).unwrap()).unwrap()
    }

    #[test]
    fn malformed_message_is_refused_for_good_where_the_reply_allows_it() {
        let malformed = || EnvelopeError::Malformed(serde_json::from_str::<u8>("x").unwrap_err());
        let reply = |verb| super::decode_refusal(verb, &malformed()).unwrap();
        for verb in ["accept", "refuse", "result", "job_cancel", "release", "abandon"] {
            assert!(matches!(serde_json::from_value(reply(verb)).unwrap(), FenceReply::Refused { .. }), "{verb}");
        }
        assert!(matches!(serde_json::from_value(reply("step")).unwrap(), StepReply::Illegal { .. }));
        assert!(matches!(serde_json::from_value(reply("blob_put")).unwrap(), BlobPutReply::Refused { .. }));
        assert!(matches!(serde_json::from_value(reply("blob_get")).unwrap(), BlobGetReply::Refused { .. }));
        assert!(matches!(serde_json::from_value(reply("lease")).unwrap(), LeaseReply::Unavailable { .. }));
        assert!(matches!(serde_json::from_value(reply("job_submit")).unwrap(), JobReply::Refused { .. }));
    }

    #[test]
    fn version_mismatch_is_reported_in_the_reply_type_of_each_verb() {
        let RegisterReply::Refused { reason, retry_ms: None } = version_reply("register") else { panic!("refused") };
        assert!(reason.contains("version 9"), "{reason}");
        for verb in ["accept", "refuse", "result", "job_cancel", "release", "abandon"] {
            assert!(matches!(version_reply(verb), FenceReply::Unavailable { .. }), "{verb}");
        }
        assert!(matches!(version_reply("lease"), LeaseReply::Unavailable { .. }));
        assert!(matches!(version_reply("step"), StepReply::Unavailable { .. }));
        assert!(matches!(version_reply("job_submit"), JobReply::Unavailable { .. }));
        assert!(matches!(version_reply("job_get"), JobReply::Unavailable { .. }));
        assert!(matches!(version_reply("main_get"), MainReply::Unavailable { .. }));
        assert!(matches!(version_reply("blob_put"), BlobPutReply::Unavailable { .. }));
        assert!(matches!(version_reply("blob_get"), BlobGetReply::Unavailable { .. }));
        assert_eq!(super::decode_refusal("heartbeat", &EnvelopeError::Version { found: 9 }), None);
    }
}
