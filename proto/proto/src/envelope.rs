//! The envelope of every message on NATS: JSON, versioned, readable with the stock tools.
//!
//! Unknown fields inside a body are ignored, so an additive change needs no new version. A breaking change is a new
//! version; a version this build does not know is refused aloud, never guessed at.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version this build speaks.
pub const VERSION: u16 = 1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    pub v: u16,
    pub body: T,
}

#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    #[error("message is version {found}, this build speaks {VERSION}: bring both sides to the same cfq version")]
    Version { found: u16 },
    #[error("message is not what the subject carries")]
    Malformed(#[source] serde_json::Error),
}

#[derive(Deserialize)]
struct VersionOnly {
    v: u16,
}

pub fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, EnvelopeError> {
    serde_json::to_vec(&Envelope { v: VERSION, body }).map_err(EnvelopeError::Malformed)
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, EnvelopeError> {
    let version: VersionOnly = serde_json::from_slice(bytes).map_err(EnvelopeError::Malformed)?;
    if version.v != VERSION {
        return Err(EnvelopeError::Version { found: version.v });
    }
    let envelope: Envelope<T> = serde_json::from_slice(bytes).map_err(EnvelopeError::Malformed)?;
    Ok(envelope.body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::BeatReply;

    #[test]
    fn an_unknown_version_is_refused_aloud() {
        let text = br#"{"v":2,"body":{}}"#;
        let error = decode::<BeatReply>(text).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let text = br#"{"v":1,"later":true,"body":{"extended":[],"lost":[],"hello_again":true,"new_field":7}}"#;
        assert!(decode::<BeatReply>(text).unwrap().hello_again);
    }
}
