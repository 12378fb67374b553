//! Content-addressed bytes in chunks. A blob exists once all its chunks are there and hash to its name; only a live lease
//! of a task it belongs to may add or read it.
//!
//! A chunk is acknowledged only after its size was checked, the last one only after the whole blob's hash was, and one for
//! a blob that is there already only if it is the same bytes: who cannot show a piece of a blob gets no right to read it.

use cfq_proto::blob::{BlobHash, BlobHasher, CHUNK};
use cfq_proto::ids::{LeaseId, TaskId};
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
        if size == 0 || size > cfq_link::blobs::LARGEST {
            return Ok(Put::Refused(format!("{size} bytes: a blob has 1 to {} bytes", cfq_link::blobs::LARGEST)));
        }
        let chunks = size.div_ceil(CHUNK as u64);
        let before = u64::from(index) * CHUNK as u64;
        let expected = size.saturating_sub(before).min(CHUNK as u64);
        if u64::from(index) >= chunks {
            return Ok(Put::Refused(format!(
                "a blob of {size} bytes has {chunks} chunks, this one says it is {index}"
            )));
        }
        if data.len() as u64 != expected {
            let why = format!("chunk {index} of a blob of {size} bytes has {expected} bytes, not {}", data.len());
            return Ok(Put::Refused(why));
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
            let why = format!("blob {hash} is known with {} bytes, not {size}", row.size);
            return nothing(tx, Put::Refused(why)).await;
        }
        if row.complete {
            if !is_chunk(&mut tx, hash, index, data).await? {
                let why = format!("chunk {index} is not what blob {hash} has there");
                return nothing(tx, Put::Refused(why)).await;
            }
        } else {
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
    // Chunk by chunk: a whole blob may be larger than any value Postgres can make, or this process should hold.
    let mut hasher = BlobHasher::default();
    for index in 0..chunks as i32 {
        let data =
            sqlx::query_scalar!("select data from blob_chunks where hash = $1 and index = $2", hash.as_str(), index)
                .fetch_one(&mut *connection)
                .await
                .doing("hashing a blob")?;
        hasher.update(&data);
    }
    let digest = hasher.finish();
    if digest != *hash {
        let why =
            format!("the bytes that came for blob {hash} hash to {digest}: nothing of them is kept, send it anew");
        return Ok(Put::Refused(why));
    }
    sqlx::query!("update blobs set complete = true where hash = $1", hash.as_str())
        .execute(connection)
        .await
        .doing("completing a blob")?;
    Ok(Put::Kept)
}

async fn is_chunk(connection: &mut PgConnection, hash: &BlobHash, index: u32, data: &[u8]) -> Result<bool, StoreError> {
    let same = sqlx::query_scalar!(
        r#"select data = $3 as "same!" from blob_chunks where hash = $1 and index = $2"#,
        hash.as_str(),
        index as i32,
        data
    )
    .fetch_optional(connection)
    .await
    .doing("comparing a chunk")?;
    Ok(same.unwrap_or(false))
}

pub(super) async fn add_ref(connection: &mut PgConnection, hash: &BlobHash, task: TaskId) -> Result<(), StoreError> {
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
