//! Reading and writing a [`Payload`] inside the scheduler: the value is inline, or a blob of the task.

use cfq_proto::blob::{BlobHash, BlobRef, CHUNK_BYTES, MAX_INLINE_BYTES, Payload};
use cfq_proto::ids::TaskId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::StoreError;
use super::blobs::add_ref;
use super::error::Doing;

/// The value of a payload, read from its blob if it is not inline.
pub(super) async fn load<T: DeserializeOwned>(
    connection: &mut PgConnection,
    payload: Payload<T>,
) -> Result<T, StoreError> {
    match payload.inline() {
        Ok(value) => Ok(value),
        Err(blob) => load_blob(connection, &blob).await,
    }
}

/// Stores a value as a payload: inline up to [`MAX_INLINE_BYTES`] bytes of JSON, else as a blob of the task.
pub(super) async fn store<T: Serialize>(
    connection: &mut PgConnection,
    task: TaskId,
    value: T,
) -> Result<Payload<T>, StoreError> {
    let bytes = serde_json::to_vec(&value)
        .map_err(|e| StoreError::Unreadable { what: "value for a payload", text: e.to_string() })?;
    if bytes.len() <= MAX_INLINE_BYTES {
        return Ok(Payload::Inline(value));
    }
    let blob = BlobRef { hash: BlobHash::of(&bytes), size: bytes.len() as u64 };
    let chunks = bytes.len().div_ceil(CHUNK_BYTES) as i32;
    sqlx::query!(
        r#"insert into blobs (hash, size, chunks, complete) values ($1, $2, $3, true)
           on conflict (hash) do update set complete = true"#,
        blob.hash.as_str(),
        blob.size as i64,
        chunks
    )
    .execute(&mut *connection)
    .await
    .doing("writing a blob")?;
    for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        sqlx::query!(
            r#"insert into blob_chunks (hash, index, data) values ($1, $2, $3)
               on conflict (hash, index) do update set data = excluded.data"#,
            blob.hash.as_str(),
            index as i32,
            chunk
        )
        .execute(&mut *connection)
        .await
        .doing("writing a blob")?;
    }
    add_ref(connection, &blob.hash, task).await?;
    Ok(Payload::Blob(blob))
}

/// Parses the JSON in a complete blob.
pub(super) async fn load_blob<T: DeserializeOwned>(
    connection: &mut PgConnection,
    blob: &BlobRef,
) -> Result<T, StoreError> {
    let chunks = sqlx::query_scalar!(
        r#"select c.data from blob_chunks c join blobs b on b.hash = c.hash
           where b.hash = $1 and b.complete order by c.index"#,
        blob.hash.as_str()
    )
    .fetch_all(connection)
    .await
    .doing("reading a blob")?;
    serde_json::from_slice(&chunks.concat())
        .map_err(|e| StoreError::Unreadable { what: "blob", text: format!("{}: {e}", blob.hash) })
}
