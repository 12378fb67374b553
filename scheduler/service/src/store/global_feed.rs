//! The feed of all tasks' events. Event ids are assigned before the commit, so an event can become visible after another
//! one with a larger id. The feed is therefore read in (transaction, id) order, and only up to the oldest running
//! transaction: below it, no further event can appear.
//!
//! Positions belong to an *epoch* of the database. After a restore, transactions and ids are assigned again, so the
//! restored database gets another epoch, and a reader that has a position of an earlier one gets a `reset` frame.

use cfq_proto::event::{Event, EventBody};
use cfq_proto::ids::{TaskId, TaskNumber};
use sqlx::types::Json;

use super::earlier_boot::forget_machine_boots;
use super::error::Doing;
use super::events::MAX_EVENTS_PER_QUERY;
use super::{Store, StoreError};

/// Position in the global feed within one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct FeedCursor {
    pub xid: i64,
    pub id: i64,
}

/// Position in the global feed; its text form is the id of a server-sent event. Versions of cfq before epochs sent
/// positions without one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FeedPosition {
    pub cursor: FeedCursor,
    pub epoch: Option<String>,
}

impl std::fmt::Display for FeedPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.cursor.xid, self.cursor.id)?;
        self.epoch.iter().try_for_each(|epoch| write!(f, "-{epoch}"))
    }
}

impl std::str::FromStr for FeedPosition {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(3, '-');
        let first = parts.next().unwrap_or_default();
        // A single number is an id.
        let (xid, id) = parts.next().map_or(("0", first), |id| (first, id));
        let cursor = FeedCursor { xid: xid.parse()?, id: id.parse()? };
        Ok(Self { cursor, epoch: parts.next().map(str::to_owned) })
    }
}

/// The current epoch of the database's feeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedEpoch {
    pub name: String,
    /// Whether the database was never restored, so that positions without an epoch belong to this one.
    pub is_first: bool,
}

/// Events after a position, and what a reader needs to know whether it missed some.
#[derive(Debug, Clone)]
pub struct FeedPage {
    pub epoch: FeedEpoch,
    /// Position of the last deleted event.
    pub deleted: FeedCursor,
    /// The next transaction id; all positions are below it.
    pub next_xid: i64,
    pub events: Vec<(FeedCursor, Event)>,
}

impl Store {
    /// Events of all tasks after `cursor`, each with its position, at most `MAX_EVENTS_PER_QUERY`.
    pub async fn feed_page(&self, cursor: FeedCursor) -> Result<FeedPage, StoreError> {
        let rows = sqlx::query!(
            r#"select f.epoch, f.is_first, f.deleted_xid::text::bigint as "deleted_xid!", f.deleted_id,
                      pg_snapshot_xmax(pg_current_snapshot())::text::bigint as "next_xid!",
                      e.xid::text::bigint as "xid?", e.id as "id?", e.task as "task?", e.number as "number?",
                      e.task_seq as "task_seq?", extract(epoch from e.at)::float8 as "at?",
                      e.body as "body?: Json<EventBody>"
               from event_feed f left join lateral (
                   select * from events
                   where (xid, id) > ($1::text::xid8, $2) and xid < pg_snapshot_xmin(pg_current_snapshot())
                   order by xid, id limit $3) e on true
               order by e.xid, e.id"#,
            cursor.xid.to_string(),
            cursor.id,
            MAX_EVENTS_PER_QUERY
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the event feed")?;
        let Some(first) = rows.first() else {
            return Err(StoreError::Unreadable { what: "event feed", text: "the table event_feed is empty".into() });
        };
        let mut page = FeedPage {
            epoch: FeedEpoch { name: first.epoch.clone(), is_first: first.is_first },
            deleted: FeedCursor { xid: first.deleted_xid, id: first.deleted_id },
            next_xid: first.next_xid,
            events: Vec::with_capacity(rows.len()),
        };
        for r in rows {
            if let (Some(xid), Some(id), Some(task), Some(number), Some(task_seq), Some(at), Some(body)) =
                (r.xid, r.id, r.task, r.number, r.task_seq, r.at, r.body)
            {
                let (task, number) = (TaskId(task), TaskNumber(number));
                page.events.push((FeedCursor { xid, id }, Event { id, task, number, task_seq, at, body: body.0 }));
            }
        }
        Ok(page)
    }

    /// The epoch, and the `task_seq` of the task's last event; `None` if there is no such task.
    pub async fn task_feed_end(&self, task: TaskId) -> Result<Option<(FeedEpoch, i64)>, StoreError> {
        let row = sqlx::query!("select epoch, is_first, next_event from event_feed, tasks where tasks.id = $1", task.0)
            .fetch_optional(&self.pool)
            .await
            .doing("reading the end of a task's feed")?;
        Ok(row.map(|r| (FeedEpoch { name: r.epoch, is_first: r.is_first }, r.next_event)))
    }

    /// Starts another epoch if this database is a restored copy: if the Postgres cluster, its timeline or the database
    /// within it is another one than when the epoch started. Boots that replace those of a
    /// restored copy count no loss.
    pub async fn check_epoch(&self) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        let restored = sqlx::query_scalar!(
            r#"with now as (
                   select concat_ws('/', (select system_identifier from pg_control_system()),
                                    substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8),
                                    (select oid from pg_database where datname = current_database())) as database
               )
               update event_feed f set database = now.database, is_first = f.is_first and f.database is null,
                   epoch = case when f.database is null then f.epoch else substr(gen_random_uuid()::text, 1, 8) end,
                   deleted_xid = case when f.database is null then f.deleted_xid else '0' end,
                   deleted_id = case when f.database is null then f.deleted_id else 0 end
               from now where f.database is distinct from now.database
               returning not f.is_first as "restored!""#
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking the epoch of the event feed")?;
        if restored == Some(true) {
            forget_machine_boots(&mut tx).await?;
        }
        tx.commit().await.doing("checking the epoch of the event feed")?;
        if restored == Some(true) {
            tracing::warn!(
                "the database was restored or copied; positions in event feeds have changed, and readers get a reset"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_is_read_with_and_without_an_epoch() {
        let parse = |text: &str| text.parse::<FeedPosition>();
        for text in ["7-12-1f3a9c2e", "7-12"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("12").unwrap().cursor, FeedCursor { xid: 0, id: 12 });
        assert_eq!(parse("7-12-1f3a9c2e").unwrap().epoch.as_deref(), Some("1f3a9c2e"));
        assert!(parse("seven").is_err() && parse("").is_err());
    }
}
