//! Transfer of values that are too large for one message. A value is sent through the scheduler in chunks, under a live
//! lease of the sender. All chunks are committed before the message that refers to the value is sent; received bytes
//! are checked against the hash.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cfq_proto::blob::{BlobHash, BlobRef, CHUNK_BYTES, MAX_INLINE_BYTES, Payload};
use cfq_proto::ids::LeaseId;
use cfq_proto::messages::{BlobGet, BlobGetReply, BlobPut, BlobPutReply};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

use crate::link_error::LinkError;
use crate::session::Session;

/// Maximum size of a blob, in bytes.
pub const MAX_BLOB_BYTES: u64 = 1 << 30;

/// Wait before a chunk is sent or requested again while the scheduler is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Creates the payload for a value: a small value is put inline, a larger one is first stored as a blob. `subject` is
/// the sender's own `blob_put` subject.
///
/// # Errors
/// [`LinkError::Blob`] if the value cannot be encoded or is refused; see also [`Session::request`].
pub async fn put<T: Serialize>(
    session: &Session,
    subject: &str,
    lease: LeaseId,
    value: T,
) -> Result<Payload<T>, LinkError> {
    let bytes = serde_json::to_vec(&value)
        .map_err(|error| LinkError::Blob { hash: "(new)".to_owned(), reason: error.to_string() })?;
    if bytes.len() <= MAX_INLINE_BYTES {
        return Ok(Payload::Inline(value));
    }
    let blob = BlobRef { hash: BlobHash::of(&bytes), size: bytes.len() as u64 };
    for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        let put = BlobPut {
            lease,
            hash: blob.hash.clone(),
            size: blob.size,
            index: index as u32,
            data: BASE64_STANDARD.encode(chunk),
        };
        loop {
            match session.request_until_answered(subject, &put).await? {
                BlobPutReply::Kept => break,
                BlobPutReply::Refused { reason } => {
                    return Err(LinkError::Blob { hash: blob.hash.to_string(), reason });
                }
                BlobPutReply::Unavailable { .. } => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        }
    }
    Ok(Payload::Blob(blob))
}

/// Returns the value of a payload, downloading its blob if the value is not inline. `subject` is the requester's own
/// `blob_get` subject.
///
/// # Errors
/// [`LinkError::Blob`] if the blob is missing, too large or damaged; see also [`Session::request`].
pub async fn get<T: DeserializeOwned>(
    session: &Session,
    subject: &str,
    lease: LeaseId,
    payload: Payload<T>,
) -> Result<T, LinkError> {
    let blob = match payload.inline() {
        Ok(value) => return Ok(value),
        Err(blob) => blob,
    };
    let failed = |reason: String| LinkError::Blob { hash: blob.hash.to_string(), reason };
    if blob.size > MAX_BLOB_BYTES {
        return Err(failed(format!("{} bytes exceed the maximum of {MAX_BLOB_BYTES}", blob.size)));
    }
    let mut bytes = Vec::new();
    let mut index = 0;
    while (bytes.len() as u64) < blob.size {
        let request = BlobGet { lease, hash: blob.hash.clone(), index };
        match session.request_until_answered(subject, &request).await? {
            BlobGetReply::Chunk { data, .. } => {
                let chunk = BASE64_STANDARD.decode(data).map_err(|error| failed(error.to_string()))?;
                if chunk.is_empty() {
                    return Err(failed("the blob ends before its size".to_owned()));
                }
                bytes.extend_from_slice(&chunk);
                index += 1;
            }
            BlobGetReply::Refused { reason } => return Err(failed(reason)),
            BlobGetReply::Unavailable { .. } => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
    if BlobHash::of(&bytes) != blob.hash {
        return Err(failed("content does not match the hash".to_owned()));
    }
    serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))
}
