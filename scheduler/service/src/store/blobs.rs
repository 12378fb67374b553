//! Content-addressed blobs, stored in chunks. A blob is complete once all its chunks are stored and their hash is the
//! blob's name. Only the holder of a live lease of a task, or of one of its jobs, may write blobs of that task or read
//! them.
//!
//! A chunk is acknowledged only after its size was checked, and the last missing chunk only after the hash of the whole
//! blob was checked. If the blob is already complete, a chunk is acknowledged only if it equals the stored chunk, so
//! that a sender that knows only the hash does not get the right to read the blob.

use cfq_link::blobs::MAX_BLOB_BYTES;
use cfq_proto::blob::{BlobHash, BlobHasher, CHUNK_BYTES};
use cfq_proto::ids::{LeaseId, NodeId, RunnerId, TaskId};
use sqlx::PgConnection;

use super::error::Doing;
use super::{Store, StoreError, roll_back};

/// A lease, as its sender names it. Only the process that holds a lease may use it: others may know its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlobLease {
    /// The lease of a runner on a task.
    Runner(RunnerId, LeaseId),
    /// The lease of a node on a job.
    Node(NodeId, LeaseId),
}

/// Result of writing a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutOutcome {
    /// The chunk is stored.
    Kept,
    /// The chunk is not stored, for this reason.
    Refused(String),
}

impl Store {
    /// Stores one chunk. The last missing chunk completes the blob after its hash was checked. A repeated chunk gets
    /// the same reply.
    pub async fn blob_put(
        &self,
        lease: &BlobLease,
        hash: &BlobHash,
        size: u64,
        index: u32,
        data: &[u8],
    ) -> Result<PutOutcome, StoreError> {
        let Some(task) = self.task_of_lease(lease).await? else {
            return Ok(PutOutcome::Refused("the lease is not live".into()));
        };
        if size == 0 || size > MAX_BLOB_BYTES {
            return Ok(PutOutcome::Refused(format!("a blob has 1 to {MAX_BLOB_BYTES} bytes, not {size}")));
        }
        let chunks = size.div_ceil(CHUNK_BYTES as u64);
        let before = u64::from(index) * CHUNK_BYTES as u64;
        let expected = size.saturating_sub(before).min(CHUNK_BYTES as u64);
        if u64::from(index) >= chunks {
            return Ok(PutOutcome::Refused(format!(
                "a blob of {size} bytes has {chunks} chunks, numbered from 0; there is no chunk {index}"
            )));
        }
        if data.len() as u64 != expected {
            let reason = format!("chunk {index} of a blob of {size} bytes has {expected} bytes, not {}", data.len());
            return Ok(PutOutcome::Refused(reason));
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
        .doing("creating a blob")?;
        // The row is locked, so that of two senders of the last missing chunks, at least one sees all chunks and
        // completes the blob.
        let row = sqlx::query!("select size, complete from blobs where hash = $1 for update", hash.as_str())
            .fetch_optional(&mut *tx)
            .await
            .doing("finding a blob")?;
        // The blob was deleted with an ended task since the statement before; a repeated request creates it.
        let Some(row) = row else { return Err(StoreError::TooSlow { doing: "finding a blob" }) };
        if row.size != size as i64 {
            let reason = format!("blob {hash} has {} bytes, not {size}", row.size);
            return roll_back(tx, PutOutcome::Refused(reason)).await;
        }
        if row.complete {
            if !chunk_matches(&mut tx, hash, index, data).await? {
                let reason = format!("chunk {index} differs from the stored chunk of blob {hash}");
                return roll_back(tx, PutOutcome::Refused(reason)).await;
            }
        } else {
            let stored = store_chunk(&mut tx, hash, index, data, chunks as i64).await?;
            if let PutOutcome::Refused(reason) = stored {
                // The stored chunks do not have the blob's hash: the sender has to start again.
                sqlx::query!("delete from blobs where hash = $1", hash.as_str())
                    .execute(&mut *tx)
                    .await
                    .doing("deleting a corrupt blob")?;
                tx.commit().await.doing("deleting a corrupt blob")?;
                return Ok(PutOutcome::Refused(reason));
            }
        }
        add_ref(&mut tx, hash, task).await?;
        tx.commit().await.doing("committing a chunk")?;
        Ok(PutOutcome::Kept)
    }

    /// The blob's size and one chunk; `None` if there is no such chunk or the lease may not read it.
    pub async fn blob_get(
        &self,
        lease: &BlobLease,
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

    /// The task of a lease that may write blobs.
    async fn task_of_lease(&self, lease: &BlobLease) -> Result<Option<TaskId>, StoreError> {
        self.task_of_holder(lease, &["running"]).await
    }

    /// The task of a lease that may read blobs. A node reads the prompt while its job is only placed, so that it can
    /// count the tokens and refuse.
    async fn task_of_reader(&self, lease: &BlobLease) -> Result<Option<TaskId>, StoreError> {
        self.task_of_holder(lease, &["placed", "running"]).await
    }

    async fn task_of_holder(&self, lease: &BlobLease, job_states: &[&str]) -> Result<Option<TaskId>, StoreError> {
        let task = match lease {
            BlobLease::Runner(runner, lease) => {
                sqlx::query_scalar!("select id from tasks where lease = $1 and runner = $2", lease.0, runner.as_str())
                    .fetch_optional(&self.pool)
                    .await
            }
            BlobLease::Node(node, lease) => {
                sqlx::query_scalar!(
                    "select task from jobs where lease = $1 and node = $2 and state = any($3)",
                    lease.0,
                    node.as_str(),
                    job_states as &[&str]
                )
                .fetch_optional(&self.pool)
                .await
            }
        };
        Ok(task.doing("finding the task of a lease")?.map(TaskId))
    }
}

/// Writes a chunk. If it is the last missing one, checks the hash and completes the blob.
async fn store_chunk(
    connection: &mut PgConnection,
    hash: &BlobHash,
    index: u32,
    data: &[u8],
    chunks: i64,
) -> Result<PutOutcome, StoreError> {
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
    let stored = sqlx::query_scalar!(r#"select count(*) as "stored!" from blob_chunks where hash = $1"#, hash.as_str())
        .fetch_one(&mut *connection)
        .await
        .doing("counting chunks")?;
    if stored < chunks {
        return Ok(PutOutcome::Kept);
    }
    // The blob is hashed chunk by chunk: a whole blob may be larger than the largest value in Postgres, or than this
    // process should hold in memory.
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
        let reason =
            format!("the chunks of blob {hash} have the hash {digest} and were discarded: send the blob again");
        return Ok(PutOutcome::Refused(reason));
    }
    sqlx::query!("update blobs set complete = true where hash = $1", hash.as_str())
        .execute(connection)
        .await
        .doing("completing a blob")?;
    Ok(PutOutcome::Kept)
}

/// Whether the stored chunk has these bytes.
async fn chunk_matches(
    connection: &mut PgConnection,
    hash: &BlobHash,
    index: u32,
    data: &[u8],
) -> Result<bool, StoreError> {
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

/// Records that a blob belongs to a task, so that holders of the task's leases may read it.
pub(super) async fn add_ref(connection: &mut PgConnection, hash: &BlobHash, task: TaskId) -> Result<(), StoreError> {
    sqlx::query!("insert into blob_refs (hash, task) values ($1, $2) on conflict do nothing", hash.as_str(), task.0)
        .execute(connection)
        .await
        .doing("writing a blob reference")?;
    Ok(())
}

/// Whether a blob is complete and belongs to this task. Checked before writing a row that refers to the blob.
pub(super) async fn has(connection: &mut PgConnection, hash: &BlobHash, task: TaskId) -> Result<bool, StoreError> {
    let found = sqlx::query_scalar!(
        r#"select true as "found!" from blobs b join blob_refs r on r.hash = b.hash
           where b.hash = $1 and b.complete and r.task = $2"#,
        hash.as_str(),
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("finding a blob")?;
    Ok(found.is_some())
}
