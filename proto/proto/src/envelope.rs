//! Envelope of every message on NATS: versioned JSON, readable with standard tools.
//!
//! Unknown fields inside a body are ignored, so an additive change needs no new version. A breaking change requires a
//! new version; a message with a version that this build does not know is rejected with an error.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the protocol in this build.
pub const PROTOCOL_VERSION: u16 = 1;

/// A message as it is sent: the body with the protocol version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// Version of the protocol.
    pub v: u16,
    /// The message.
    pub body: T,
    /// Requests only: how long the sender waits for the reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
}

/// End of a sender's wait for a reply, on a clock of the sender. The clocks of two machines differ, so a receiver only
/// compares the times of several requests with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// Identifies the sender's clock: a random id of the process.
    pub clock: Uuid,
    /// Time at which the request was sent, in milliseconds on that clock. It is monotonic, and includes the time that
    /// the machine was suspended.
    pub sent_ms: u64,
    /// Time after which the sender does not wait for the reply any more, in milliseconds.
    pub timeout_ms: u64,
}

/// A message that could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// The message has another protocol version than this build.
    #[error(
        "message has protocol version {found}, but this build supports {PROTOCOL_VERSION}: install the same version of \
         cfq on both sides"
    )]
    Version {
        /// Version of the message.
        found: u16,
    },
    /// The JSON does not match the type.
    #[error("message does not match the type expected on its subject")]
    Malformed(#[source] serde_json::Error),
}

#[derive(Deserialize)]
struct VersionOnly {
    v: u16,
}

/// Encodes a message with its envelope.
///
/// # Errors
/// [`EnvelopeError::Malformed`] if the body cannot be written as JSON.
pub fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, EnvelopeError> {
    serde_json::to_vec(&Envelope { v: PROTOCOL_VERSION, body, deadline: None }).map_err(EnvelopeError::Malformed)
}

/// Encodes a request with its envelope and deadline.
///
/// # Errors
/// See [`encode`].
pub fn encode_request<T: Serialize>(body: &T, deadline: Deadline) -> Result<Vec<u8>, EnvelopeError> {
    let envelope = Envelope { v: PROTOCOL_VERSION, body, deadline: Some(deadline) };
    serde_json::to_vec(&envelope).map_err(EnvelopeError::Malformed)
}

/// Decodes a message; the version is checked before the body.
///
/// # Errors
/// [`EnvelopeError::Version`] for another version, [`EnvelopeError::Malformed`] for a body that is not a `T`.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, EnvelopeError> {
    decode_request(bytes).map(|(body, _)| body)
}

/// Decodes a request and its deadline, which requests of earlier builds do not have.
///
/// # Errors
/// See [`decode`].
pub fn decode_request<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Option<Deadline>), EnvelopeError> {
    let version: VersionOnly = serde_json::from_slice(bytes).map_err(EnvelopeError::Malformed)?;
    if version.v != PROTOCOL_VERSION {
        return Err(EnvelopeError::Version { found: version.v });
    }
    let envelope: Envelope<T> = serde_json::from_slice(bytes).map_err(EnvelopeError::Malformed)?;
    Ok((envelope.body, envelope.deadline))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::HeartbeatReply;

    #[test]
    fn unknown_version_is_rejected() {
        let text = br#"{"v":2,"body":{}}"#;
        let error = decode::<HeartbeatReply>(text).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn request_has_a_deadline_and_another_message_has_none() {
        let deadline = Deadline { clock: Uuid::from_u128(7), sent_ms: 12, timeout_ms: 500 };
        let bytes = encode_request(&HeartbeatReply::default(), deadline).unwrap();
        assert_eq!(decode_request(&bytes).unwrap(), (HeartbeatReply::default(), Some(deadline)));
        let bytes = encode(&HeartbeatReply::default()).unwrap();
        assert_eq!(decode_request(&bytes).unwrap(), (HeartbeatReply::default(), None));
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let text = br#"{"v":1,"later":true,"body":{"extended":[],"lost":[],"register_again":true,"new_field":7}}"#;
        assert!(decode::<HeartbeatReply>(text).unwrap().register_again);
    }
}
