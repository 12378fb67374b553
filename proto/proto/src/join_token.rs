//! Join tokens: with one, a machine joins a cluster once. The token names the server's certificate authority, so that the
//! machine can check the server before it sends anything.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Beginning of every token, by which people and secret scanners recognize it.
const PREFIX: &str = "cfqj_";
/// Format version, the first byte of a token.
const VERSION: u8 = 1;
/// Size of an encoded token, in bytes: version, id, secret, fingerprint.
const BYTES: usize = 1 + 16 + 32 + 32;

/// SHA-256 of a certificate in DER.
pub type Fingerprint = [u8; 32];

/// A text that is not a join token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinTokenError {
    /// The text does not have the form of a token.
    #[error("not a join token: a join token begins with {PREFIX}; create one on the server with `cfq token create`")]
    Form,
    /// The text begins as a token, but is damaged or incomplete.
    #[error("the join token is incomplete or damaged: copy the whole line again")]
    Damaged,
    /// The token has a version that this build does not know.
    #[error("the join token is of another version of cfq: install the version of the server on this machine")]
    Version,
}

/// A join token. `Debug` does not print the secret; `Display` prints the whole token.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Id, by which the server finds the token.
    pub id: Uuid,
    secret: [u8; 32],
    /// Fingerprint of the certificate authority that the server's certificate must be issued by.
    pub authority: Fingerprint,
}

impl JoinToken {
    /// Creates a token. The `secret` must be random.
    pub fn new(id: Uuid, secret: [u8; 32], authority: Fingerprint) -> Self {
        Self { id, secret, authority }
    }

    /// SHA-256 of the secret, as the server stores it. The secret is random, so a hash without salt is enough.
    pub fn secret_hash(&self) -> [u8; 32] {
        Sha256::digest(self.secret).into()
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id)
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.push(VERSION);
        bytes.extend_from_slice(self.id.as_bytes());
        bytes.extend_from_slice(&self.secret);
        bytes.extend_from_slice(&self.authority);
        write!(f, "{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for JoinToken {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let encoded = text.trim().strip_prefix(PREFIX).ok_or(JoinTokenError::Form)?;
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(encoded).map_err(|_| JoinTokenError::Damaged)?;
        match bytes.first() {
            Some(&VERSION) => {}
            Some(_) => return Err(JoinTokenError::Version),
            None => return Err(JoinTokenError::Damaged),
        }
        let bytes: [u8; BYTES] = bytes.try_into().map_err(|_| JoinTokenError::Damaged)?;
        let part = |from: usize| -> [u8; 32] { std::array::from_fn(|i| bytes[from + i]) };
        let id: [u8; 16] = std::array::from_fn(|i| bytes[1 + i]);
        Ok(Self { id: Uuid::from_bytes(id), secret: part(17), authority: part(49) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        JoinToken::new(Uuid::from_bytes([7; 16]), [8; 32], [9; 32])
    }

    #[test]
    fn token_is_read_as_it_was_printed() {
        let text = concat!(
            "cfqj_AQcHBwcHBwcHBwcHBwcHBwcICAgICAgICAgICAgICAgICAgICAgICAg",
            "ICAgICAgICAkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJ"
        );
        assert_eq!(token().to_string(), text, "printed tokens of version 1 must stay valid");
        assert_eq!(format!(" {text}\n").parse::<JoinToken>().unwrap(), token());
    }

    #[test]
    fn damaged_token_is_told_apart_from_other_text() {
        let text = token().to_string();
        let other_version = text.replacen("cfqj_A", "cfqj_B", 1);
        for (wrong, error) in [
            ("", JoinTokenError::Form),
            ("secret", JoinTokenError::Form),
            (&text[..text.len() - 2], JoinTokenError::Damaged),
            (&text[..5], JoinTokenError::Damaged),
            ("cfqj_*", JoinTokenError::Damaged),
            (&format!("{text}AA"), JoinTokenError::Damaged),
            (&other_version, JoinTokenError::Version),
        ] {
            assert_eq!(wrong.parse::<JoinToken>().unwrap_err(), error, "{wrong}");
        }
    }

    #[test]
    fn debug_output_does_not_contain_the_secret() {
        let text = format!("{:?}", token());
        assert!(!text.contains("cfqj_") && !text.contains("8, 8"), "{text}");
    }
}
