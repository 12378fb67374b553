//! Errors of a [`Session`](crate::Session).

use std::path::PathBuf;

use cfq_proto::envelope::EnvelopeError;

use crate::server_version::MIN_NATS_VERSION;
use crate::tls::CertificateFileError;

/// A failed operation on a [`Session`](crate::Session).
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The file with the nkey seed cannot be read.
    #[error("cannot read the nkey seed in {path}")]
    Seed {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Another process on this machine holds the lock on the file with the nkey seed.
    #[error(
        "another process uses the credentials in {path}: stop that process, or give this one another id with \
         credentials of its own"
    )]
    CredentialsTaken { path: PathBuf },
    /// The file with the certificate authority of the server cannot be used.
    #[error(transparent)]
    Certificate(CertificateFileError),
    /// No connection to the server: a retry may help.
    #[error("cannot connect to NATS at {url}")]
    Connect {
        url: String,
        #[source]
        source: async_nats::ConnectError,
    },
    /// The server rejects the client's key: a retry does not help.
    #[error(
        "the NATS server at {url} {}",
        key.as_ref().map_or_else(
            || "requires a key, and none is configured; or it is not cfq's server, but another one on the same port"
                .to_owned(),
            |key| format!(
                "refuses the key in {}: it does not know the key, or it is not cfq's server, but another one on the \
                 same port",
                key.display()
            )
        )
    )]
    AuthRejected {
        url: String,
        key: Option<PathBuf>,
        #[source]
        source: async_nats::ConnectError,
    },
    /// The server is older than [`MIN_NATS_VERSION`]: a retry does not help.
    #[error("the NATS server at {url} has version {version}: install nats-server {MIN_NATS_VERSION} or newer there")]
    ServerTooOld { url: String, version: String },
    /// The server rejects the publication: a retry does not help.
    #[error("the NATS server does not permit this client to publish on {subject}")]
    Forbidden { subject: String },
    /// No reply in time, or no subscriber: a retry may help.
    #[error("no reply on {subject}")]
    NoReply { subject: String },
    /// The message is larger than the server permits: a retry does not help.
    #[error("a message of {bytes} bytes on {subject} is larger than the NATS server permits, {max_bytes} bytes")]
    TooLarge { subject: String, bytes: usize, max_bytes: usize },
    /// The message could not be sent.
    #[error("cannot publish on {subject}: {reason}")]
    Send { subject: String, reason: String },
    /// The subscription failed.
    #[error("cannot subscribe to {subject}: {reason}")]
    Listen { subject: String, reason: String },
    /// The message cannot be encoded or decoded.
    #[error("invalid message on {subject}")]
    Message {
        subject: String,
        #[source]
        source: EnvelopeError,
    },
    /// A blob cannot be transferred, or its content does not match its hash.
    #[error("blob {hash}: {reason}")]
    Blob { hash: String, reason: String },
    /// The heartbeat thread cannot be started.
    #[error("cannot start the heartbeat thread")]
    Thread {
        #[source]
        source: std::io::Error,
    },
}
