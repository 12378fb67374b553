//! Content-addressed bytes in chunks. A blob exists once all its chunks are there and hash to its name; only a live lease
//! of a task it belongs to may add or read it.

use cfq_proto::blob::{BlobHash, BlobRef, CHUNK, Carried, INLINE_LIMIT};
use cfq_proto::ids::{LeaseId, TaskId};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::error::Doing;
use super::{Store, StoreError, nothing};

/// What became of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Put {
    Kept,
    Refused(String),
}

impl Store {
    /// Keeps one chunk; with the last one the hash is checked. Repeating a chunk is answered alike.
    pub async fn blob_put(
        &self,
        lease: LeaseId,
        hash: &BlobHash,
        size: u64,
        index: u32,
        data: &[u8],
    ) -> Result<Put, StoreError> {
        let Some(task) = self.task_of_lease(lease).await? else {
            return Ok(Put::Refused("the lease is not live".into()));
        };
        let refused = |why: &str| Ok(Put::Refused(why.to_owned()));
        if size == 0 || size > cfq_link::blobs::LARGEST {
            return Ok(Put::Refused(format!("{size} bytes: a blob has 1 to {} bytes", cfq_link::blobs::LARGEST)));
        }
        let chunks = size.div_ceil(CHUNK as u64);
        let expected =
            if u64::from(index) + 1 == chunks { size - u64::from(index) * CHUNK as u64 } else { CHUNK as u64 };
        if u64::from(index) >= chunks || data.len() as u64 != expected {
            return refused("the chunk does not belong to a blob of that size");
        }
        let mut tx = self.begin().await?;
        sqlx::query!(
            "insert into blobs (hash, size, chunks) values ($1, $2, $3) on conflict do nothing",
            hash.as_str(),
            size as i64,
            chunks as i32
        )
        .execute(&mut *tx)
        .await
        .doing("announcing a blob")?;
        // Locked, so that two senders of the same last chunk do not both count the other's as missing.
        let row = sqlx::query!("select size, complete from blobs where hash = $1 for update", hash.as_str())
            .fetch_one(&mut *tx)
            .await
            .doing("finding a blob")?;
        if row.size != size as i64 {
            return nothing(tx, Put::Refused("a blob of that hash has another size".into())).await;
        }
        if !row.complete {
            let verdict = keep_chunk(&mut tx, hash, index, data, chunks as i64).await?;
            if let Put::Refused(why) = verdict {
                // Whatever was sent under this name is not it: start anew.
                sqlx::query!("delete from blobs where hash = $1", hash.as_str())
                    .execute(&mut *tx)
                    .await
                    .doing("dropping a false blob")?;
                tx.commit().await.doing("dropping a false blob")?;
                return Ok(Put::Refused(why));
            }
        }
        add_ref(&mut tx, hash, task).await?;
        tx.commit().await.doing("committing a chunk")?;
        Ok(Put::Kept)
    }

    /// One chunk and the blob's size; `None` if there is no such blob or the lease may not see it.
    pub async fn blob_get(
        &self,
        lease: LeaseId,
        hash: &BlobHash,
        index: u32,
    ) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let Some(task) = self.task_of_reader(lease).await? else { return Ok(None) };
        let row = sqlx::query!(
            r#"select b.size, c.data from blobs b join blob_chunks c on c.hash = b.hash
               join blob_refs r on r.hash = b.hash
               where b.hash = $1 and c.index = $2 and b.complete and r.task = $3"#,
            hash.as_str(),
            i32::try_from(index).unwrap_or(i32::MAX),
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading a chunk")?;
        Ok(row.map(|r| (r.size.max(0) as u64, r.data)))
    }

    async fn task_of_lease(&self, lease: LeaseId) -> Result<Option<TaskId>, StoreError> {
        let task = sqlx::query_scalar!(
            r#"select id as "id!" from tasks where lease = $1
               union all select task from jobs where lease = $1 and state = 'running'"#,
            lease.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the task of a lease")?;
        Ok(task.map(TaskId))
    }

    /// A node reads the prompt before it accepts, so that it can count and refuse: its job is still placed then.
    async fn task_of_reader(&self, lease: LeaseId) -> Result<Option<TaskId>, StoreError> {
        let task = sqlx::query_scalar!(
            r#"select id as "id!" from tasks where lease = $1
               union all select task from jobs where lease = $1 and state in ('placed', 'running')"#,
            lease.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the task of a reader's lease")?;
        Ok(task.map(TaskId))
    }

    /// A value by its carrier, for readers inside the scheduler.
    pub(super) async fn carried<T: DeserializeOwned>(
        connection: &mut PgConnection,
        carried: Carried<T>,
    ) -> Result<T, StoreError> {
        match carried.inline() {
            Ok(value) => Ok(value),
            Err(blob) => load(connection, &blob).await,
        }
    }
}

async fn keep_chunk(
    connection: &mut PgConnection,
    hash: &BlobHash,
    index: u32,
    data: &[u8],
    chunks: i64,
) -> Result<Put, StoreError> {
    sqlx::query!(
        r#"insert into blob_chunks (hash, index, data) values ($1, $2, $3)
           on conflict (hash, index) do update set data = excluded.data"#,
        hash.as_str(),
        index as i32,
        data
    )
    .execute(&mut *connection)
    .await
    .doing("writing a chunk")?;
    let here = sqlx::query_scalar!(r#"select count(*) as "here!" from blob_chunks where hash = $1"#, hash.as_str())
        .fetch_one(&mut *connection)
        .await
        .doing("counting chunks")?;
    if here < chunks {
        return Ok(Put::Kept);
    }
    // Postgres hashes it, so that a large blob is not moved here only to be looked at.
    let digest = sqlx::query_scalar!(
        r#"select encode(sha256(string_agg(data, ''::bytea order by index)), 'hex') as "digest!"
           from blob_chunks where hash = $1"#,
        hash.as_str()
    )
    .fetch_one(&mut *connection)
    .await
    .doing("hashing a blob")?;
    if digest != hash.as_str() {
        return Ok(Put::Refused("the bytes do not match the hash".into()));
    }
    sqlx::query!("update blobs set complete = true where hash = $1", hash.as_str())
        .execute(connection)
        .await
        .doing("completing a blob")?;
    Ok(Put::Kept)
}

async fn add_ref(connection: &mut PgConnection, hash: &BlobHash, task: TaskId) -> Result<(), StoreError> {
    sqlx::query!("insert into blob_refs (hash, task) values ($1, $2) on conflict do nothing", hash.as_str(), task.0)
        .execute(connection)
        .await
        .doing("noting whose a blob is")?;
    Ok(())
}

/// Before a row names a blob: false if it is not here whole, or was never this task's to name.
pub(super) async fn refer(connection: &mut PgConnection, hash: &BlobHash, task: TaskId) -> Result<bool, StoreError> {
    let found = sqlx::query_scalar!(
        r#"select true as "here!" from blobs b join blob_refs r on r.hash = b.hash
           where b.hash = $1 and b.complete and r.task = $2"#,
        hash.as_str(),
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("finding a blob")?;
    Ok(found.is_some())
}

/// Inline when small, else kept as a blob of the task.
pub(super) async fn carry<T: Serialize>(
    connection: &mut PgConnection,
    task: TaskId,
    value: T,
) -> Result<Carried<T>, StoreError> {
    let bytes = serde_json::to_vec(&value)
        .map_err(|e| StoreError::Unreadable { what: "value to carry", text: e.to_string() })?;
    if bytes.len() <= INLINE_LIMIT {
        return Ok(Carried::Inline(value));
    }
    let blob = BlobRef { hash: BlobHash::of(&bytes), size: bytes.len() as u64 };
    let chunks = bytes.len().div_ceil(CHUNK) as i32;
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
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
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
    Ok(Carried::Blob(blob))
}

pub(super) async fn load<T: DeserializeOwned>(connection: &mut PgConnection, blob: &BlobRef) -> Result<T, StoreError> {
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
