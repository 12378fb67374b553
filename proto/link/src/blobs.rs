//! Moving what is too large for a message: through the scheduler, in chunks, under a live lease. A value is committed
//! before the message that names it is sent; what arrives is checked against its hash.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cfq_proto::blob::{BlobHash, BlobRef, CHUNK, Carried, INLINE_LIMIT};
use cfq_proto::ids::LeaseId;
use cfq_proto::messages::{BlobGet, BlobGetReply, BlobPut, BlobPutReply};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

use crate::session::{LinkError, Session};

/// Largest blob taken or given, in bytes.
pub const LARGEST: u64 = 1 << 30;

/// Inline when small, else stored first. `subject` is the sender's own `blob_put`.
pub async fn put<T: Serialize>(
    session: &Session,
    subject: &str,
    lease: LeaseId,
    value: T,
) -> Result<Carried<T>, LinkError> {
    let fault = |reason: String| LinkError::Blob { hash: "(new)".to_owned(), reason };
    let bytes = serde_json::to_vec(&value).map_err(|e| fault(e.to_string()))?;
    if bytes.len() <= INLINE_LIMIT {
        return Ok(Carried::Inline(value));
    }
    let blob = BlobRef { hash: BlobHash::of(&bytes), size: bytes.len() as u64 };
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
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
                BlobPutReply::Unavailable { .. } => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }
    Ok(Carried::Blob(blob))
}

/// The value itself. `subject` is the asker's own `blob_get`.
pub async fn get<T: DeserializeOwned>(
    session: &Session,
    subject: &str,
    lease: LeaseId,
    carried: Carried<T>,
) -> Result<T, LinkError> {
    let blob = match carried.inline() {
        Ok(value) => return Ok(value),
        Err(blob) => blob,
    };
    let fault = |reason: String| LinkError::Blob { hash: blob.hash.to_string(), reason };
    if blob.size > LARGEST {
        return Err(fault(format!("{} bytes are more than the {LARGEST} cfq moves", blob.size)));
    }
    let mut bytes = Vec::new();
    let mut index = 0;
    while (bytes.len() as u64) < blob.size {
        let ask = BlobGet { lease, hash: blob.hash.clone(), index };
        match session.request_until_answered(subject, &ask).await? {
            BlobGetReply::Chunk { data, .. } => {
                let chunk = BASE64_STANDARD.decode(data).map_err(|e| fault(e.to_string()))?;
                if chunk.is_empty() {
                    return Err(fault("ends early".to_owned()));
                }
                bytes.extend_from_slice(&chunk);
                index += 1;
            }
            BlobGetReply::Refused { reason } => return Err(fault(reason)),
            BlobGetReply::Unavailable { .. } => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
    if BlobHash::of(&bytes) != blob.hash {
        return Err(fault("content does not match the hash".to_owned()));
    }
    serde_json::from_slice(&bytes).map_err(|e| fault(e.to_string()))
}
