//! Blobs: bytes addressed by their hash. A value whose encoding exceeds [`MAX_INLINE_BYTES`] is stored as a blob, and
//! the message holds a [`BlobRef`] instead of the value.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::IdError;

/// Maximum size of an encoded value inside a message, in bytes. NATS' default payload limit is 1 MiB; a message carries
/// several values and its envelope.
pub const MAX_INLINE_BYTES: usize = 256 * 1024;

/// Size of one chunk of a blob, in bytes; each message carries one chunk. Base64 makes it 256 KiB.
pub const CHUNK_BYTES: usize = 192 * 1024;

/// SHA-256 hash of a blob's bytes, in lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct BlobHash(String);

impl BlobHash {
    /// Hashes `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = BlobHasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// Returns the 64 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Computes a [`BlobHash`] incrementally.
#[derive(Debug, Default)]
pub struct BlobHasher(Sha256);

impl BlobHasher {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash of all bytes added.
    pub fn finish(self) -> BlobHash {
        BlobHash(self.0.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

impl FromStr for BlobHash {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        if text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            Ok(Self(text.to_owned()))
        } else {
            Err(IdError { kind: "blob hash", text: text.to_owned(), expected: "64 lower-case hex digits" })
        }
    }
}

impl TryFrom<String> for BlobHash {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<BlobHash> for String {
    fn from(hash: BlobHash) -> String {
        hash.0
    }
}

impl fmt::Display for BlobHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Address of a blob. The bytes are committed in Postgres before any message refers to the blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BlobRef {
    /// Hash of the bytes.
    pub hash: BlobHash,
    /// Length in bytes.
    pub size: u64,
}

/// A value inside the message if it is small, otherwise the address of its JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Payload<T> {
    /// The value itself.
    Inline(T),
    /// Address of the value's JSON.
    Blob(BlobRef),
}

impl<T> Payload<T> {
    /// Returns the value.
    ///
    /// # Errors
    /// The blob's address if the value is not inside the message.
    pub fn inline(self) -> Result<T, BlobRef> {
        match self {
            Self::Inline(value) => Ok(value),
            Self::Blob(blob) => Err(blob),
        }
    }
}
