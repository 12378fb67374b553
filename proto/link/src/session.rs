//! A connection to NATS as one identity: typed requests, publications and subscriptions.
//!
//! After the first successful connection, the client reconnects without limit; requests sent while it is disconnected
//! time out and are repeated by the caller.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{ConnectErrorKind, ConnectOptions, Event, Message, ServerError, Subscriber};
use cfq_proto::envelope::{self, Deadline, EnvelopeError};
use cfq_proto::subject::{self, Identity};
use cfq_proto::timing::Timing;
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::link_error::LinkError;
use crate::permission_violation::{PermissionViolation, ViolationWatch, Violations};
use crate::server_version::is_too_old;

/// Address of NATS and the client's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsConfig {
    /// URL of the NATS server: `nats://host:port`, or `tls://host:port` for a server that must use TLS.
    pub url: String,
    /// File with the certificate authority (PEM) that the server's certificate must be issued by; if absent, one of those
    /// that the system trusts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// File that holds the nkey seed; `None` if the server requires none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed_file: Option<PathBuf>,
}

/// Time limit of a message to oneself.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_secs(1);
/// Connection timeout, for a server that accepts the TCP connection but does not answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the client's pings: a server that does not answer two of them is considered lost.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// Connection to NATS as one identity. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Session {
    client: async_nats::Client,
    request_timeout: Duration,
    violations: Violations,
}

impl Session {
    /// Connects to the server, in a single attempt that takes a few seconds at most.
    ///
    /// # Errors
    /// [`LinkError::Seed`] if the key cannot be read, [`LinkError::AuthRejected`] if the server rejects it,
    /// [`LinkError::ServerTooOld`] if its version is too old, [`LinkError::Connect`] if there is no connection.
    pub async fn connect(config: &NatsConfig, identity: Identity, timing: &Timing) -> Result<Self, LinkError> {
        crate::outbound::install_crypto();
        let mut options = ConnectOptions::new();
        if let Some(path) = &config.seed_file {
            let seed =
                std::fs::read_to_string(path).map_err(|source| LinkError::Seed { path: path.clone(), source })?;
            options = options.nkey(seed.trim().to_owned());
        }
        if let Some(path) = &config.ca_file {
            let tls = crate::tls::trust_only(path).map_err(LinkError::Certificate)?;
            // The server's greeting is not encrypted, and could name other servers.
            options = options.tls_client_config(tls).require_tls(true).ignore_discovered_servers();
        }
        let name = identity.inbox_prefix().trim_start_matches("_INBOX_").to_owned();
        let violations = Violations::new();
        let handler = violations.clone();
        let client = options
            .name(name)
            .custom_inbox_prefix(identity.inbox_prefix())
            // Requests have a time limit of their own, which also covers the wait in a full send queue.
            .request_timeout(None)
            .connection_timeout(CONNECT_TIMEOUT)
            .ping_interval(PING_INTERVAL)
            .max_reconnects(None)
            .reconnect_delay_callback(|tries| Duration::from_millis((50 * tries as u64).min(1_000)))
            .event_callback(move |event| {
                let is_violation =
                    matches!(&event, Event::ServerError(ServerError::Other(message)) if handler.handle(message));
                async move {
                    if !is_violation {
                        tracing::info!(%event, "nats connection");
                    }
                }
            })
            .connect(&config.url)
            .await
            .map_err(|source| match source.kind() {
                ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
                    LinkError::AuthRejected { url: config.url.clone(), key: config.seed_file.clone(), source }
                }
                _ => LinkError::Connect { url: config.url.clone(), source },
            })?;
        let version = client.server_info().version;
        if is_too_old(&version) {
            return Err(LinkError::ServerTooOld { url: config.url.clone(), version });
        }
        Ok(Self { client, request_timeout: timing.request_timeout(), violations })
    }

    /// Returns a receiver of the permission violations that this session's server reports from now on.
    pub fn permission_violations(&self) -> ViolationWatch {
        self.violations.watch()
    }

    /// Returns the underlying NATS client, for JetStream administration and queue subscriptions.
    pub fn client(&self) -> &async_nats::Client {
        &self.client
    }

    /// True while the connection is up.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Sends a request once and waits for the reply.
    ///
    /// # Errors
    /// [`LinkError::NoReply`] after the configured request timeout, [`LinkError::Forbidden`] as soon as the server
    /// rejects the subject, [`LinkError::TooLarge`] for a body that cannot be sent, [`LinkError::Message`] for a body or
    /// reply that cannot be encoded or decoded.
    pub async fn request<Q: Serialize, A: DeserializeOwned>(&self, subject: &str, body: &Q) -> Result<A, LinkError> {
        self.request_within(subject, body, self.request_timeout).await
    }

    /// Sends a request once and waits for the reply, for `timeout` at most. A scheduler that reads the request later
    /// drops it.
    ///
    /// # Errors
    /// See [`Self::request`].
    pub async fn request_within<Q: Serialize, A: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Q,
        timeout: Duration,
    ) -> Result<A, LinkError> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let deadline = Deadline { clock: clock::process_clock(), sent_ms: clock::process_ms(), timeout_ms };
        let bytes = envelope::encode_request(body, deadline)
            .map_err(|source| LinkError::Message { subject: subject.to_owned(), source })?;
        self.check_size(subject, &bytes)?;
        let mut violations = self.permission_violations();
        let request = self.client.request(subject.to_owned(), bytes.into());
        let reply = tokio::select! {
            reply = tokio::time::timeout(timeout, request) => reply,
            forbidden = forbidden(&mut violations, subject) => return Err(forbidden),
        };
        let reply = match reply {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => {
                tracing::debug!(subject, %error, "request failed");
                return Err(LinkError::NoReply { subject: subject.to_owned() });
            }
            Err(_) => return Err(LinkError::NoReply { subject: subject.to_owned() }),
        };
        decode(subject, &reply.payload)
    }

    /// Repeats a request until there is a reply, with a backoff of up to a second and a half. Dropping the future cancels it.
    ///
    /// # Errors
    /// See [`Self::request`], without [`LinkError::NoReply`].
    pub async fn request_until_answered<Q: Serialize, A: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Q,
    ) -> Result<A, LinkError> {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.request(subject, body).await {
                Err(LinkError::NoReply { .. }) => {
                    tokio::time::sleep(wait + clock::jitter(wait / 2)).await;
                    wait = (wait * 2).min(Duration::from_secs(1));
                }
                result => return result,
            }
        }
    }

    /// Publishes a message.
    ///
    /// # Errors
    /// [`LinkError::Message`] if the body cannot be encoded, [`LinkError::TooLarge`] or [`LinkError::Send`] if it cannot
    /// be sent.
    pub async fn publish<T: Serialize>(&self, subject: &str, body: &T) -> Result<(), LinkError> {
        let bytes = encode(subject, body)?;
        self.check_size(subject, &bytes)?;
        self.client
            .publish(subject.to_owned(), bytes.into())
            .await
            .map_err(|error| LinkError::Send { subject: subject.to_owned(), reason: error.to_string() })
    }

    fn check_size(&self, subject: &str, message: &[u8]) -> Result<(), LinkError> {
        let (bytes, max_bytes) = (message.len(), self.client.max_payload());
        if bytes > max_bytes {
            return Err(LinkError::TooLarge { subject: subject.to_owned(), bytes, max_bytes });
        }
        Ok(())
    }

    /// Waits until everything published so far has reached the server.
    ///
    /// # Errors
    /// [`LinkError::Send`] if the connection is closed.
    pub async fn flush(&self) -> Result<(), LinkError> {
        self.client
            .flush()
            .await
            .map_err(|error| LinkError::Send { subject: "(flush)".to_owned(), reason: error.to_string() })
    }

    /// Sends a message to this session itself and waits until the server has delivered it. Only a scheduler may do this.
    ///
    /// # Errors
    /// [`LinkError::NoReply`] after a second, [`LinkError::Listen`] and [`LinkError::Send`] if the connection is closed.
    pub async fn round_trip(&self) -> Result<(), LinkError> {
        let subject = subject::round_trip(&uuid::Uuid::now_v7());
        let sent_and_received = async {
            let mut received = self.subscribe::<()>(&subject).await?;
            self.publish(&subject, &()).await?;
            Ok(received.next().await)
        };
        // While the client reconnects, subscribing and publishing wait too.
        match tokio::time::timeout(ROUND_TRIP_TIMEOUT.min(self.request_timeout), sent_and_received).await {
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Err(error)) => Err(error),
            Ok(Ok(None)) | Err(_) => Err(LinkError::NoReply { subject }),
        }
    }

    /// Subscribes to a subject.
    ///
    /// # Errors
    /// [`LinkError::Listen`] if the subscription cannot be sent.
    pub async fn subscribe<T: DeserializeOwned>(&self, subject: &str) -> Result<Incoming<T>, LinkError> {
        let subscribed = self.client.subscribe(subject.to_owned()).await;
        self.incoming(subject, subscribed)
    }

    /// Subscribes as a member of a queue group: each message goes to one member.
    ///
    /// # Errors
    /// [`LinkError::Listen`] if the subscription cannot be sent.
    pub async fn queue_subscribe<T: DeserializeOwned>(
        &self,
        subject: &str,
        group: &str,
    ) -> Result<Incoming<T>, LinkError> {
        let subscribed = self.client.queue_subscribe(subject.to_owned(), group.to_owned()).await;
        self.incoming(subject, subscribed)
    }

    fn incoming<T>(
        &self,
        subject: &str,
        subscribed: Result<Subscriber, async_nats::SubscribeError>,
    ) -> Result<Incoming<T>, LinkError> {
        let subscriber =
            subscribed.map_err(|error| LinkError::Listen { subject: subject.to_owned(), reason: error.to_string() })?;
        Ok(Incoming { subscriber, session: self.clone(), body: std::marker::PhantomData })
    }
}

async fn forbidden(violations: &mut ViolationWatch, subject: &str) -> LinkError {
    violations.violated(&PermissionViolation::Publish { subject: subject.to_owned() }).await;
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
    /// Waits for the next message, including one that cannot be decoded; `None` once the connection is closed
    /// permanently.
    pub async fn next(&mut self) -> Option<Received<T>> {
        let message = self.subscriber.next().await?;
        Some(Received { body: envelope::decode(&message.payload), message, session: self.session.clone() })
    }
}

/// A received message.
#[derive(Debug)]
pub struct Received<T> {
    /// The decoded body.
    pub body: Result<T, EnvelopeError>,
    message: Message,
    session: Session,
}

impl<T> Received<T> {
    /// Subject that the message was published on.
    pub fn subject(&self) -> &str {
        self.message.subject.as_str()
    }

    /// Sends a reply if the message requests one.
    ///
    /// # Errors
    /// See [`Session::publish`].
    pub async fn reply<A: Serialize>(&self, body: &A) -> Result<(), LinkError> {
        match &self.message.reply {
            Some(reply) => self.session.publish(reply.as_str(), body).await,
            None => Ok(()),
        }
    }
}
