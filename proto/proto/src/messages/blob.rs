//! Messages that move blobs in chunks, under a live lease.

use serde::{Deserialize, Serialize};

use super::UnavailableReason;
use crate::blob::BlobHash;
use crate::ids::LeaseId;

/// One chunk of a blob to store. The blob exists once all its chunks are stored and the hash matches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlobPut {
    /// Live lease that permits the request.
    pub lease: LeaseId,
    /// Hash of the whole blob.
    pub hash: BlobHash,
    /// Size of the whole blob, in bytes.
    pub size: u64,
    /// Index of the chunk, from 0; every chunk but the last has [`crate::blob::CHUNK_BYTES`] bytes.
    pub index: u32,
    /// Bytes of the chunk, in Base64.
    pub data: String,
}

/// Reply to [`BlobPut`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlobPutReply {
    /// This chunk is committed.
    Kept,
    /// The chunk is not stored, because the lease is not live, or because the bytes do not match the size or the hash.
    /// If the hash does not match, the other chunks of the blob are deleted too.
    Refused {
        /// Why the chunk is refused, as text.
        reason: String,
    },
    /// The chunk cannot be stored now: the sender repeats the request.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}

/// Request for one chunk of a blob.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlobGet {
    /// Live lease that permits the request.
    pub lease: LeaseId,
    /// Hash of the whole blob.
    pub hash: BlobHash,
    /// Index of the chunk, from 0.
    pub index: u32,
}

/// Reply to [`BlobGet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlobGetReply {
    /// The requested chunk.
    Chunk {
        /// Size of the whole blob, in bytes.
        size: u64,
        /// Bytes of the chunk, in Base64.
        data: String,
    },
    /// There is no such blob, or the lease may not read it.
    Refused {
        /// Why the request is refused, as text.
        reason: String,
    },
    /// The chunk cannot be read now: the sender repeats the request.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}
