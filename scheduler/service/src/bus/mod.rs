//! Answers nodes and runners over NATS. Any scheduler may answer (they share a queue group), because every write is fenced;
//! a request whose answer is lost comes again with the same body.
//!
//! Each verb has its own subscription and its own bound on requests in work, and beats have database connections that
//! nothing else takes, so that they never wait behind blobs or feeds.

mod node;
mod runner;
pub mod stream;

use std::sync::Arc;
use std::time::Instant;

use cfq_link::stop::Stop;
use cfq_link::{LinkError, Session};
use cfq_proto::envelope::EnvelopeError;
use cfq_proto::{envelope, subject};
use futures::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::link::Link;
use crate::metrics::Metrics;
use crate::store::{Store, StoreError};

/// Schedulers share the work of answering.
const GROUP: &str = "scheduler";

#[derive(Debug, Clone)]
pub struct Bus {
    pub store: Store,
    /// The same database over connections of its own.
    pub beats: Store,
    pub link: Link,
    pub session: Session,
    pub metrics: Metrics,
    pub concurrency: usize,
}

impl Bus {
    /// Subscribes to everything, then answers until told to stop; what is in work then is finished.
    pub async fn run(self, mut stop: Stop) -> Result<(), LinkError> {
        let mut loops = JoinSet::new();
        let bus = Arc::new(self);
        node::serve(&bus, &mut loops, &stop).await?;
        runner::serve(&bus, &mut loops, &stop).await?;
        bus.session.flush().await?;
        tracing::info!("answering nodes and runners");
        stop.raised().await;
        while loops.join_next().await.is_some() {}
        Ok(())
    }

    /// Answers `verb` of every sender of `kind` with what `handler` makes of (sender, body). No answer (`None`) makes the
    /// sender ask again.
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
        let listening = self.session.client().queue_subscribe(subject.clone(), GROUP.to_owned()).await;
        let mut incoming = listening.map_err(|error| LinkError::Listen { subject, reason: error.to_string() })?;
        let (bus, mut stop) = (self.clone(), stop.clone());
        loops.spawn(async move {
            let room = Arc::new(Semaphore::new(bus.concurrency));
            loop {
                let Ok(permit) = room.clone().acquire_owned().await else { break };
                let message = tokio::select! {
                    biased;
                    () = stop.raised() => break,
                    next = incoming.next() => match next {
                        Some(message) => message,
                        None => break,
                    },
                };
                let Some(sender) = subject::sender(&message.subject).map(|(id, _)| id.to_owned()) else { continue };
                let body: Q = match envelope::decode(&message.payload) {
                    Ok(body) => body,
                    Err(error) => {
                        tracing::warn!(%sender, verb, %error, cause = ?std::error::Error::source(&error), "refused a message");
                        bus.metrics.bus(verb, "unreadable", 0.0);
                        if let (Some(refusal), Some(reply)) = (refusal(verb, &error), message.reply)
                            && let Err(error) = bus.session.publish(&reply, &refusal).await
                        {
                            tracing::debug!(%sender, verb, %error, "answer not sent");
                        }
                        continue;
                    }
                };
                let (bus, handler) = (bus.clone(), handler.clone());
                tokio::spawn(async move {
                    let began = Instant::now();
                    let answer = handler(bus.clone(), sender.clone(), body).await;
                    let outcome = if answer.is_some() { "answered" } else { "unanswered" };
                    bus.metrics.bus(verb, outcome, began.elapsed().as_secs_f64());
                    if let (Some(answer), Some(reply)) = (answer, message.reply)
                        && let Err(error) = bus.session.publish(&reply, &answer).await
                    {
                        tracing::debug!(%sender, verb, %error, "answer not sent");
                    }
                    drop(permit);
                });
            }
            // All permits back: nothing is in work any more.
            let all = u32::try_from(bus.concurrency).unwrap_or(u32::MAX);
            if room.acquire_many(all).await.is_err() {
                tracing::debug!(verb, "closed");
            }
        });
        Ok(())
    }
}

/// What a sender hears whose message cannot be read; whoever speaks another version reads at least this envelope's. One side
/// may be brought to the other's version any minute; what is no message of this version will never be one. The answer to a
/// beat has no words.
fn refusal(verb: &str, error: &EnvelopeError) -> Option<serde_json::Value> {
    let kind = match (verb, error) {
        ("beat", _) => return None,
        ("hello", _) => "refused",
        ("lease", _) | (_, EnvelopeError::Version { .. }) => "unavailable",
        ("step", EnvelopeError::Malformed(_)) => "illegal",
        (_, EnvelopeError::Malformed(_)) => "refused",
    };
    Some(serde_json::json!({ "type": kind, "reason": error.to_string() }))
}

/// Why a request could not be answered now, in words; what is a bug is logged as one.
fn reason(error: &StoreError, doing: &str) -> String {
    if error.may_retry() {
        tracing::debug!(doing, %error, cause = ?std::error::Error::source(error), "database not available");
    } else {
        tracing::error!(doing, %error, cause = ?std::error::Error::source(error), "request failed");
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use cfq_proto::envelope::EnvelopeError;
    use cfq_proto::messages::{BlobGetReply, BlobPutReply, FenceReply, HelloReply, JobReply, LeaseReply, StepReply};
    use serde::de::DeserializeOwned;

    fn heard<T: DeserializeOwned>(verb: &str) -> T {
        serde_json::from_value(super::refusal(verb, &EnvelopeError::Version { found: 9 }).unwrap()).unwrap()
    }

    #[test]
    fn what_is_no_message_is_refused_for_good_where_the_answer_has_a_word_for_it() {
        let malformed = || EnvelopeError::Malformed(serde_json::from_str::<u8>("x").unwrap_err());
        let heard = |verb| super::refusal(verb, &malformed()).unwrap();
        for verb in ["accept", "refuse", "result", "job_cancel", "release", "give_up"] {
            assert!(matches!(serde_json::from_value(heard(verb)).unwrap(), FenceReply::Refused { .. }), "{verb}");
        }
        assert!(matches!(serde_json::from_value(heard("step")).unwrap(), StepReply::Illegal { .. }));
        assert!(matches!(serde_json::from_value(heard("blob_put")).unwrap(), BlobPutReply::Refused { .. }));
        assert!(matches!(serde_json::from_value(heard("blob_get")).unwrap(), BlobGetReply::Refused { .. }));
        assert!(matches!(serde_json::from_value(heard("lease")).unwrap(), LeaseReply::Unavailable { .. }));
        assert!(matches!(serde_json::from_value(heard("job")).unwrap(), JobReply::Refused { .. }));
    }

    #[test]
    fn a_sender_of_another_version_hears_why_in_the_type_it_waits_for() {
        let HelloReply::Refused { reason } = heard("hello") else { panic!("refused") };
        assert!(reason.contains("version 9"), "{reason}");
        for verb in ["accept", "refuse", "result", "job_cancel", "release", "give_up"] {
            assert!(matches!(heard(verb), FenceReply::Unavailable { .. }), "{verb}");
        }
        assert!(matches!(heard("lease"), LeaseReply::Unavailable { .. }));
        assert!(matches!(heard("step"), StepReply::Unavailable { .. }));
        assert!(matches!(heard("job"), JobReply::Unavailable { .. }));
        assert!(matches!(heard("job_look"), JobReply::Unavailable { .. }));
        assert!(matches!(heard("blob_put"), BlobPutReply::Unavailable { .. }));
        assert!(matches!(heard("blob_get"), BlobGetReply::Unavailable { .. }));
        assert_eq!(super::refusal("beat", &EnvelopeError::Version { found: 9 }), None);
    }
}
