//! A connection to NATS as one identity: typed requests, publications, subscriptions and work pulls.
//!
//! After the first success it reconnects for ever; what was asked meanwhile times out and is asked again by the caller.
//! Work is pulled with plain request subjects instead of the JetStream context, since a node is granted exactly the pull
//! and the acknowledgement of its own consumer and nothing else of that API.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{ConnectErrorKind, ConnectOptions, Event, Message, ServerError, Subscriber};
use bytes::Bytes;
use cfq_proto::envelope::{self, EnvelopeError};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::refusal::{Heard, Refusal, Refusals};

/// Where NATS is and which key proves who we are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsConfig {
    pub url: String,
    /// File that holds the nkey seed; none where the server asks for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed_file: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot read the nkey seed in {path}")]
    Seed {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot connect to NATS at {url}")]
    Connect {
        url: String,
        #[source]
        source: async_nats::ConnectError,
    },
    /// The server is there and will not have us: waiting does not help.
    #[error(
        "the NATS server at {url} refuses {}; another server may have taken that port, or the key is not one it knows",
        key.as_ref().map_or_else(|| "a connection without a key".to_owned(), |key| format!("the key in {}", key.display()))
    )]
    Unwelcome {
        url: String,
        key: Option<PathBuf>,
        #[source]
        source: async_nats::ConnectError,
    },
    /// The server said so: asking again does not help.
    #[error("the NATS server does not let this client speak on {subject}")]
    Forbidden { subject: String },
    /// Nobody answered in time, or nobody listens: asking again may help.
    #[error("no answer on {subject}")]
    NoAnswer { subject: String },
    #[error("cannot send on {subject}: {reason}")]
    Send { subject: String, reason: String },
    #[error("cannot listen on {subject}: {reason}")]
    Listen { subject: String, reason: String },
    #[error("bad message on {subject}")]
    Message {
        subject: String,
        #[source]
        source: EnvelopeError,
    },
    #[error("blob {hash}: {reason}")]
    Blob { hash: String, reason: String },
    #[error("cannot start the heartbeat thread")]
    Thread {
        #[source]
        source: std::io::Error,
    },
}

/// A server that accepts and then says nothing is given up after this.
const CONNECT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct Session {
    client: async_nats::Client,
    request: Duration,
    refusals: Refusals,
}

impl Session {
    /// One try, which takes a few seconds at most: fails if the key cannot be read, nobody answers, or we are refused.
    pub async fn connect(config: &NatsConfig, identity: Identity, timing: &Timing) -> Result<Self, LinkError> {
        crate::outbound::install_crypto();
        let mut options = ConnectOptions::new();
        if let Some(path) = &config.seed_file {
            let seed =
                std::fs::read_to_string(path).map_err(|source| LinkError::Seed { path: path.clone(), source })?;
            options = options.nkey(seed.trim().to_owned());
        }
        let name = identity.inbox_prefix().trim_start_matches("_INBOX_").to_owned();
        let refusals = Refusals::new();
        let teller = refusals.clone();
        let client = options
            .name(name)
            .custom_inbox_prefix(identity.inbox_prefix())
            .request_timeout(Some(timing.request()))
            .connection_timeout(CONNECT)
            .ping_interval(Duration::from_secs(10))
            .max_reconnects(None)
            .reconnect_delay_callback(|tries| Duration::from_millis((50 * tries as u64).min(1_000)))
            .event_callback(move |event| {
                let told = matches!(&event, Event::ServerError(ServerError::Other(said)) if teller.tell(said));
                async move {
                    if !told {
                        tracing::info!(%event, "nats connection");
                    }
                }
            })
            .connect(&config.url)
            .await
            .map_err(|source| match source.kind() {
                ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
                    LinkError::Unwelcome { url: config.url.clone(), key: config.seed_file.clone(), source }
                }
                _ => LinkError::Connect { url: config.url.clone(), source },
            })?;
        Ok(Self { client, request: timing.request(), refusals })
    }

    /// What the server refuses this session from now on.
    pub fn refusals(&self) -> Heard {
        self.refusals.listen()
    }

    pub fn client(&self) -> &async_nats::Client {
        &self.client
    }

    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// One try. [`LinkError::NoAnswer`] after the configured request time; [`LinkError::Forbidden`] as soon as the server
    /// says so.
    pub async fn request<Q: Serialize, A: DeserializeOwned>(&self, subject: &str, body: &Q) -> Result<A, LinkError> {
        let bytes = encode(subject, body)?;
        let mut refusals = self.refusals();
        let asked = self.client.request(subject.to_owned(), bytes.into());
        // The client's own limit starts when the request is written; this one also covers a full send queue.
        let answer = tokio::select! {
            answer = tokio::time::timeout(self.request * 2, asked) => answer,
            forbidden = forbidden(&mut refusals, subject) => return Err(forbidden),
        };
        let answer = match answer {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => {
                tracing::debug!(subject, %error, "request failed");
                return Err(LinkError::NoAnswer { subject: subject.to_owned() });
            }
            Err(_) => return Err(LinkError::NoAnswer { subject: subject.to_owned() }),
        };
        decode(subject, &answer.payload)
    }

    /// Asks until somebody answers, waiting a little longer each time up to a second. Cancel by dropping the future.
    pub async fn request_until_answered<Q: Serialize, A: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Q,
    ) -> Result<A, LinkError> {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.request(subject, body).await {
                Err(LinkError::NoAnswer { .. }) => {
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(Duration::from_secs(1));
                }
                settled => return settled,
            }
        }
    }

    pub async fn publish<T: Serialize>(&self, subject: &str, body: &T) -> Result<(), LinkError> {
        let bytes = encode(subject, body)?;
        self.client
            .publish(subject.to_owned(), bytes.into())
            .await
            .map_err(|error| LinkError::Send { subject: subject.to_owned(), reason: error.to_string() })
    }

    /// Everything published so far has reached the server.
    pub async fn flush(&self) -> Result<(), LinkError> {
        self.client
            .flush()
            .await
            .map_err(|error| LinkError::Send { subject: "(flush)".to_owned(), reason: error.to_string() })
    }

    pub async fn subscribe<T: DeserializeOwned>(&self, subject: &str) -> Result<Incoming<T>, LinkError> {
        let listening = self.client.subscribe(subject.to_owned()).await;
        self.incoming(subject, listening)
    }

    /// Of all subscribers of the same `group`, one gets each message.
    pub async fn queue_subscribe<T: DeserializeOwned>(
        &self,
        subject: &str,
        group: &str,
    ) -> Result<Incoming<T>, LinkError> {
        let listening = self.client.queue_subscribe(subject.to_owned(), group.to_owned()).await;
        self.incoming(subject, listening)
    }

    fn incoming<T>(
        &self,
        subject: &str,
        listening: Result<Subscriber, async_nats::SubscribeError>,
    ) -> Result<Incoming<T>, LinkError> {
        let subscriber =
            listening.map_err(|error| LinkError::Listen { subject: subject.to_owned(), reason: error.to_string() })?;
        Ok(Incoming { subscriber, session: self.clone(), body: std::marker::PhantomData })
    }

    /// One message of a pull consumer, or `None` if none came within `expires`.
    pub async fn pull<T: DeserializeOwned>(
        &self,
        stream: &str,
        consumer: &str,
        expires: Duration,
    ) -> Result<Option<Delivery<T>>, LinkError> {
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}");
        let inbox = self.client.new_inbox();
        let listen =
            |error: async_nats::SubscribeError| LinkError::Listen { subject: inbox.clone(), reason: error.to_string() };
        let mut replies = self.client.subscribe(inbox.clone()).await.map_err(listen)?;
        let mut refusals = self.refusals();
        let ask = serde_json::json!({ "batch": 1, "expires": expires.as_nanos() as u64 }).to_string();
        self.client
            .publish_with_reply(subject.clone(), inbox, ask.into())
            .await
            .map_err(|error| LinkError::Send { subject: subject.clone(), reason: error.to_string() })?;
        let reply = tokio::select! {
            reply = tokio::time::timeout(expires + Duration::from_secs(1), replies.next()) => reply,
            forbidden = forbidden(&mut refusals, &subject) => return Err(forbidden),
        };
        let Ok(Some(message)) = reply else { return Ok(None) };
        match message.status.map(|s| s.as_u16()) {
            // No messages, or the wait is over.
            Some(404 | 408) => Ok(None),
            // No such consumer, or it was replaced.
            Some(_) => Err(LinkError::NoAnswer { subject }),
            None => Ok(Some(Delivery { body: envelope::decode(&message.payload), message, session: self.clone() })),
        }
    }
}

async fn forbidden(refusals: &mut Heard, subject: &str) -> LinkError {
    refusals.heard(&Refusal::Publish { subject: subject.to_owned() }).await;
    LinkError::Forbidden { subject: subject.to_owned() }
}

fn encode<T: Serialize>(subject: &str, body: &T) -> Result<Vec<u8>, LinkError> {
    envelope::encode(body).map_err(|source| LinkError::Message { subject: subject.to_owned(), source })
}

fn decode<T: DeserializeOwned>(subject: &str, bytes: &[u8]) -> Result<T, LinkError> {
    envelope::decode(bytes).map_err(|source| LinkError::Message { subject: subject.to_owned(), source })
}

/// A subscription to messages of one type.
#[derive(Debug)]
pub struct Incoming<T> {
    subscriber: Subscriber,
    session: Session,
    body: std::marker::PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Incoming<T> {
    /// The next message, also one that cannot be read; `None` when the connection was closed for good.
    pub async fn next(&mut self) -> Option<Received<T>> {
        let message = self.subscriber.next().await?;
        Some(Received { body: envelope::decode(&message.payload), message, session: self.session.clone() })
    }
}

#[derive(Debug)]
pub struct Received<T> {
    pub body: Result<T, EnvelopeError>,
    message: Message,
    session: Session,
}

impl<T> Received<T> {
    pub fn subject(&self) -> &str {
        self.message.subject.as_str()
    }

    /// Answers, if an answer was asked for.
    pub async fn reply<A: Serialize>(&self, body: &A) -> Result<(), LinkError> {
        match &self.message.reply {
            Some(reply) => self.session.publish(reply.as_str(), body).await,
            None => Ok(()),
        }
    }
}

/// A message of a work queue; it comes again unless it is acknowledged.
#[derive(Debug)]
pub struct Delivery<T> {
    pub body: Result<T, EnvelopeError>,
    message: Message,
    session: Session,
}

impl<T> Delivery<T> {
    /// Returns when the server has confirmed the acknowledgement.
    pub async fn double_ack(&self) -> Result<(), LinkError> {
        let Some(reply) = &self.message.reply else { return Ok(()) };
        let ack = Bytes::from_static(b"+ACK");
        let confirmed =
            tokio::time::timeout(self.session.request, self.session.client.request(reply.clone(), ack)).await;
        match confirmed {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(LinkError::NoAnswer { subject: reply.to_string() }),
        }
    }
}
