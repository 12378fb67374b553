//! Deletion of ended tasks, with everything that belongs to them, and of nodes and runners that are gone.
//!
//! Tasks are deleted in small batches, each in its own transaction: rows that another transaction has locked are left for
//! a later batch, and no other request waits for longer than a batch. The tasks are found through an index on the time of
//! their end. Of a task whose result was merged, the merge is kept, because runners rebuild a repository's main branch
//! from the merges. Predecessors of tasks that have not ended are kept,
//! and failed predecessors of kept tasks, so that a retry knows them.

use cfq_proto::http::GcReply;
use sqlx::PgConnection;

use super::error::Doing;
use super::main_branch::record_merges;
use super::{Store, StoreError};

/// Maximum number of tasks that one transaction deletes.
const MAX_TASKS_PER_BATCH: i64 = 50;

/// Rows of ended tasks, in an order in which no deleted row is referred to. `$1` are the tasks.
const DELETIONS: [&str; 16] = [
    "delete from task_dependencies where task = any($1)",
    // An edge of an open task stays: it was added after the tasks were chosen, and the foreign key refuses the deletion.
    "delete from task_dependencies d using tasks t
     where d.predecessor = any($1) and t.id = d.task and t.ended_at is not null",
    "delete from reported_defects where task = any($1)",
    "delete from artifacts where task = any($1)",
    "delete from reviews where task = any($1)",
    "delete from iterations where task = any($1)",
    "delete from steps where task = any($1)",
    "delete from internal_pr_moves where pr in (select number from internal_prs where task = any($1))",
    "delete from internal_prs where task = any($1)",
    "delete from questions where task = any($1)",
    "delete from events where task = any($1)",
    "delete from attempts where job in (select id from jobs where task = any($1))",
    "update tasks set waits_for = null where id = any($1) and waits_for is not null",
    "delete from jobs where task = any($1)",
    "delete from blob_refs where task = any($1)",
    "delete from tasks where id = any($1)",
];

/// Before which time, in seconds since 1970, rows are deleted; `None` keeps them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expiry {
    /// Time of the end of a task.
    pub tasks_ended_before: Option<f64>,
    /// Time of the last heartbeat of a node or runner.
    pub nodes_seen_before: Option<f64>,
}

impl Store {
    /// Counts what [`Self::delete_expired_tasks`] and [`Self::delete_lost_nodes`] would delete.
    pub async fn count_expired(&self, expiry: &Expiry) -> Result<GcReply, StoreError> {
        let row = sqlx::query!(
            r#"with expired as (
                   select id, next_event from tasks where ended_at < to_timestamp($1)
                     and not exists (select from task_dependencies d join tasks t on t.id = d.task
                                     where d.predecessor = tasks.id and (t.ended_at is null or t.ended_at >= to_timestamp($1)
                                   and tasks.state in ('failed', 'cancelled')))
               )
               select (select count(*) from expired) as "tasks!",
                      (select coalesce(sum(next_event), 0)::bigint from expired) as "events!",
                      (select coalesce(sum(size), 0)::bigint from blobs where hash in (
                           select r.hash from blob_refs r left join expired e on e.id = r.task group by r.hash
                           having bool_and(e.id is not null))) as "blob_bytes!",
                      (select count(*) from nodes where last_seen < to_timestamp($2)) as "nodes!",
                      (select count(*) from runners where last_seen < to_timestamp($2)) as "runners!""#,
            expiry.tasks_ended_before,
            expiry.nodes_seen_before
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting expired rows")?;
        Ok(GcReply {
            tasks: unsigned(row.tasks),
            events: unsigned(row.events),
            blob_bytes: unsigned(row.blob_bytes),
            nodes: unsigned(row.nodes),
            runners: unsigned(row.runners),
            ..GcReply::default()
        })
    }

    /// Marks the ended tasks that an earlier version of cfq left without the time of their end.
    pub async fn mark_ended_tasks(&self) -> Result<(), StoreError> {
        sqlx::query!(
            r#"update tasks set ended_at = updated_at
               where ended_at is null and state in ('merged', 'accepted', 'failed', 'cancelled')"#
        )
        .execute(&self.pool)
        .await
        .doing("finding ended tasks")?;
        Ok(())
    }

    /// Deletes one batch of tasks that ended before this time, the earliest first. `None` if there is none.
    pub async fn delete_expired_tasks(&self, ended_before: f64) -> Result<Option<GcReply>, StoreError> {
        let mut tx = self.begin().await?;
        let tasks = sqlx::query_scalar!(
            r#"select id from tasks where ended_at < to_timestamp($1)
                 and not exists (select from task_dependencies d join tasks t on t.id = d.task
                                 where d.predecessor = tasks.id and (t.ended_at is null or t.ended_at >= to_timestamp($1)
                                   and tasks.state in ('failed', 'cancelled')))
               order by ended_at limit $2 for update skip locked"#,
            ended_before,
            MAX_TASKS_PER_BATCH
        )
        .fetch_all(&mut *tx)
        .await
        .doing("finding expired tasks")?;
        if tasks.is_empty() {
            return super::roll_back(tx, None).await;
        }
        record_merges(&mut tx, &tasks).await?;
        let events = record_deleted_events(&mut tx, &tasks).await?;
        let blobs = sqlx::query_scalar!("select distinct hash from blob_refs where task = any($1)", &tasks)
            .fetch_all(&mut *tx)
            .await
            .doing("finding the blobs of expired tasks")?;
        for deletion in DELETIONS {
            sqlx::query(deletion).bind(&tasks).execute(&mut *tx).await.doing("deleting expired tasks")?;
        }
        let blob_bytes = delete_unreferenced(&mut tx, &blobs).await?;
        tx.commit().await.doing("deleting expired tasks")?;
        Ok(Some(GcReply { tasks: tasks.len() as u64, events, blob_bytes, ..GcReply::default() }))
    }

    /// Deletes nodes and runners whose last heartbeat was before this time and that hold nothing. A cordoned node
    /// is kept, so that the cordon lasts.
    pub async fn delete_lost_nodes(&self, seen_before: f64) -> Result<GcReply, StoreError> {
        let nodes = sqlx::query!(
            r#"delete from nodes where last_seen < to_timestamp($1)
                 and (cordoned_at is null or exists (select from machines where name = nodes.id and revoked_at is not null))
                 and not exists (select from jobs where jobs.node = nodes.id and jobs.state in ('placed', 'running'))"#,
            seen_before
        )
        .execute(&self.pool)
        .await
        .doing("deleting lost nodes")?;
        let runners = sqlx::query!(
            r#"delete from runners where last_seen < to_timestamp($1)
                 and not exists (select from tasks where tasks.runner = runners.id and tasks.lease is not null)"#,
            seen_before
        )
        .execute(&self.pool)
        .await
        .doing("deleting lost runners")?;
        Ok(GcReply { nodes: nodes.rows_affected(), runners: runners.rows_affected(), ..GcReply::default() })
    }
}

/// Records the position of the last event of these tasks, for readers of the global feed that have not read so far.
/// Returns the number of the events.
async fn record_deleted_events(connection: &mut PgConnection, tasks: &[uuid::Uuid]) -> Result<u64, StoreError> {
    let events = sqlx::query_scalar!(r#"select count(*) as "count!" from events where task = any($1)"#, tasks)
        .fetch_one(&mut *connection)
        .await
        .doing("counting expired events")?;
    sqlx::query!(
        r#"update event_feed set deleted_xid = last.xid, deleted_id = last.id
           from (select xid, id from events where task = any($1) order by xid desc, id desc limit 1) as last
           where (deleted_xid, deleted_id) < (last.xid, last.id)"#,
        tasks
    )
    .execute(connection)
    .await
    .doing("recording which events are deleted")?;
    Ok(unsigned(events))
}

/// Deletes those of the blobs that belong to no task or call any more, and returns their size. The rows are locked before the
/// references are read: a transaction that adds a reference holds a lock on the blob's row until it ends.
pub(super) async fn delete_unreferenced(connection: &mut PgConnection, blobs: &[String]) -> Result<u64, StoreError> {
    sqlx::query!("select hash from blobs where hash = any($1) order by hash for update", blobs)
        .fetch_all(&mut *connection)
        .await
        .doing("locking blobs")?;
    let sizes = sqlx::query_scalar!(
        r#"delete from blobs where hash = any($1) and not exists (select from blob_refs r where r.hash = blobs.hash)
           returning size"#,
        blobs
    )
    .fetch_all(connection)
    .await
    .doing("deleting blobs")?;
    Ok(sizes.into_iter().map(unsigned).sum())
}

fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
