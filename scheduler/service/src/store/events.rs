//! The append-only event record, and the feed of one task: `task_seq` is assigned under the lock on the task's row, so
//! events become visible in the order of `task_seq`, and a read "after n" skips no event.

use cfq_proto::event::{Event, EventBody};
use cfq_proto::ids::{TaskId, TaskNumber};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::AsJson;
use super::error::Doing;
use super::{Store, StoreError};

/// Maximum number of events that one query returns.
pub(super) const MAX_EVENTS_PER_QUERY: i64 = 500;

/// Appends one event of a task; its number is assigned under the lock on the task's row. A call of an API client has no
/// events.
pub(super) async fn append(connection: &mut PgConnection, task: TaskId, body: &EventBody) -> Result<(), StoreError> {
    sqlx::query!(
        r#"with numbered as (
               update tasks set next_event = next_event + 1, updated_at = now() where id = $1 and state <> 'call'
               returning number, next_event
           )
           insert into events (task, number, task_seq, body) select $1, number, next_event, $2 from numbered"#,
        task.0,
        AsJson(body) as _
    )
    .execute(connection)
    .await
    .doing("appending an event")?;
    Ok(())
}

impl Store {
    /// Events of a task with a `task_seq` above `after`, oldest first; at most `MAX_EVENTS_PER_QUERY`. The next page
    /// starts after the last `task_seq`.
    pub async fn task_events(&self, task: TaskId, after: i64) -> Result<Vec<Event>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, number, task_seq, extract(epoch from at)::float8 as "at!", body as "body: Json<EventBody>"
               from events where task = $1 and task_seq > $2 order by task_seq limit $3"#,
            task.0,
            after,
            MAX_EVENTS_PER_QUERY
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading a task's events")?;
        let event = |id, number, task_seq, at, body: Json<EventBody>| Event {
            id,
            task,
            number: TaskNumber(number),
            task_seq,
            at,
            body: body.0,
        };
        Ok(rows.into_iter().map(|r| event(r.id, r.number, r.task_seq, r.at, r.body)).collect())
    }
}
