//! Subscription to one kind of requests as a member of the schedulers' queue group, which the scheduler leaves and joins.

use async_nats::{Message, Subscriber};
use cfq_link::{LinkError, Session};
use futures::StreamExt;
use tokio::sync::watch;

/// NATS queue group: each request is delivered to one of its members.
const QUEUE_GROUP: &str = "scheduler";

pub(super) struct GroupSubscription {
    session: Session,
    subject: String,
    /// Whether to be a member.
    member: watch::Receiver<bool>,
    subscriber: Option<Subscriber>,
    /// True while the membership ends and the requests that were delivered before are read.
    leaving: bool,
}

impl GroupSubscription {
    /// Joins the group, unless `member` says otherwise.
    pub async fn new(session: Session, subject: String, member: watch::Receiver<bool>) -> Result<Self, LinkError> {
        let mut this = Self { session, subject, member, subscriber: None, leaving: false };
        if *this.member.borrow_and_update() {
            this.join().await?;
        }
        Ok(this)
    }

    async fn join(&mut self) -> Result<(), LinkError> {
        let joined = self.session.client().queue_subscribe(self.subject.clone(), QUEUE_GROUP.to_owned()).await;
        let error = |error: async_nats::SubscribeError| LinkError::Listen {
            subject: self.subject.clone(),
            reason: error.to_string(),
        };
        self.subscriber = Some(joined.map_err(error)?);
        Ok(())
    }

    /// Returns the next request; waits while this scheduler is not a member. `None` once the connection is closed
    /// permanently. Dropping the future loses no request.
    pub async fn next(&mut self) -> Option<Message> {
        loop {
            let is_member = *self.member.borrow_and_update();
            match &mut self.subscriber {
                None if is_member => {
                    if let Err(error) = self.join().await {
                        tracing::warn!(%error, "cannot answer requests");
                        return None;
                    }
                }
                None => self.member.changed().await.ok()?,
                Some(subscriber) if self.leaving => match subscriber.next().await {
                    Some(message) => return Some(message),
                    None => (self.subscriber, self.leaving) = (None, false),
                },
                Some(subscriber) if !is_member => {
                    if let Err(error) = subscriber.drain().await {
                        tracing::warn!(%error, "cannot leave the group of schedulers");
                        return None;
                    }
                    self.leaving = true;
                }
                Some(subscriber) => tokio::select! {
                    message = subscriber.next() => return message,
                    changed = self.member.changed() => {
                        if changed.is_err() {
                            // The follower has ended, because the scheduler stops.
                            return subscriber.next().await;
                        }
                    }
                },
            }
        }
    }
}
