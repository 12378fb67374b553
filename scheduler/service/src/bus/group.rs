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
    /// True after the membership has ended, while the requests that arrived before are read.
    left: bool,
}

impl GroupSubscription {
    /// Joins the group, unless `member` says otherwise.
    pub async fn new(session: Session, subject: String, member: watch::Receiver<bool>) -> Result<Self, LinkError> {
        let mut this = Self { session, subject, member, subscriber: None, left: false };
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
                Some(subscriber) if self.left => match subscriber.next().await {
                    Some(message) => return Some(message),
                    None => (self.subscriber, self.left) = (None, false),
                },
                Some(subscriber) if !is_member => {
                    // Not `drain`: a subscription that is drained when the connection is lost becomes a member of the
                    // group again on the next connection, and its requests are dropped. A request that the server
                    // delivers before it reads this is lost, and its sender repeats it.
                    if let Err(error) = subscriber.unsubscribe().await {
                        tracing::warn!(%error, "cannot leave the group of schedulers");
                        return None;
                    }
                    self.left = true;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    use cfq_link::NatsConfig;
    use cfq_proto::subject::Identity;
    use cfq_proto::timing::Timing;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::testing::TestEnv;

    const TIMEOUT: Duration = Duration::from_secs(20);
    /// Number of requests after the connection was lost. If a subscription that has ended got half of them, the chance
    /// that it got none would be less than one in a million.
    const REQUESTS: u32 = 20;

    /// A TCP proxy. Once it is armed, it closes the connection as soon as the client unsubscribes.
    async fn proxy_that_fails_at_unsubscribe(target: &str, is_armed: Arc<AtomicBool>) -> String {
        let target = target.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&target).await else { return };
                let is_armed = is_armed.clone();
                tokio::spawn(async move {
                    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                        (client.into_split(), server.into_split());
                    let mut bytes = [0; 4096];
                    let until_unsubscribed = async {
                        loop {
                            let count = from_client.read(&mut bytes).await.unwrap_or(0);
                            let is_unsubscribe = bytes[..count].windows(6).any(|text| text == b"UNSUB ");
                            if count == 0 || is_unsubscribe && is_armed.swap(false, Relaxed) {
                                return;
                            }
                            if to_server.write_all(&bytes[..count]).await.is_err() {
                                return;
                            }
                        }
                    };
                    tokio::select! {
                        () = until_unsubscribed => {}
                        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
                    }
                });
            }
        });
        url
    }

    async fn in_time<T>(what: impl Future<Output = T>) -> T {
        tokio::time::timeout(TIMEOUT, what).await.expect("finished before the timeout")
    }

    /// The connection is lost while the scheduler leaves the group. On the next connection, it is no member; when it
    /// joins again, it gets every request.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn subscription_that_ended_gets_no_request_after_a_reconnect() {
        let env = TestEnv::new().await;
        let direct = env.nats(&Identity::Scheduler);
        let timing = Timing::default();
        let is_armed = Arc::new(AtomicBool::new(false));
        let url = proxy_that_fails_at_unsubscribe(&direct.url, is_armed.clone()).await;
        let proxied = NatsConfig { url, ..direct.clone() };
        let session = Session::connect(&proxied, Identity::Scheduler, &timing).await.unwrap();
        let other = Session::connect(&direct, Identity::Scheduler, &timing).await.unwrap();
        let subject = format!("cfq.v1.node.{}.test", uuid::Uuid::now_v7().simple());
        let (member, is_member) = watch::channel(true);
        let mut group = GroupSubscription::new(session.clone(), subject.clone(), is_member).await.unwrap();
        session.round_trip().await.unwrap();
        other.client().publish(subject.clone(), "first".into()).await.unwrap();
        assert_eq!(&in_time(group.next()).await.unwrap().payload[..], b"first");

        let connections = session.client().statistics();
        let connects = || connections.connects.load(Relaxed);
        let before = connects();
        is_armed.store(true, Relaxed);
        member.send_replace(false);
        // This future does not complete: there is no request, and the scheduler is no member.
        let mut left = Box::pin(group.next());
        in_time(async {
            while connects() == before || session.round_trip().await.is_err() {
                let _pending = futures::FutureExt::now_or_never(left.as_mut());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        let mut members = other.client().queue_subscribe(subject.clone(), QUEUE_GROUP.to_owned()).await.unwrap();
        other.round_trip().await.unwrap();
        for _ in 0..REQUESTS {
            other.client().publish(subject.clone(), "to the other".into()).await.unwrap();
            in_time(members.next()).await.unwrap();
        }
        assert!(futures::FutureExt::now_or_never(left.as_mut()).is_none(), "it has left");
        drop(left);

        members.unsubscribe().await.unwrap();
        other.round_trip().await.unwrap();
        member.send_replace(true);
        let received = async {
            // The first call of `next` joins the group.
            assert!(tokio::time::timeout(Duration::from_millis(50), group.next()).await.is_err());
            session.round_trip().await.unwrap();
            for _ in 0..REQUESTS {
                other.client().publish(subject.clone(), "to both".into()).await.unwrap();
                assert_eq!(&group.next().await.unwrap().payload[..], b"to both");
            }
        };
        in_time(received).await;
    }
}
