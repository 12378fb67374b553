//! What a runner does for a task, as an event for users.

use cfq_proto::event::EventBody;
use cfq_proto::http::ActivityView;
use cfq_proto::ids::{RunnerId, TaskId};
use cfq_proto::messages::{ActivityReport, FenceReply};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::pg_text;
use super::error::Doing;
use super::events::append;
use super::tasks::{TaskRow, lock_task};
use super::{Store, StoreError, roll_back};

/// Maximum number of events that are read: after more changes of the priority, an activity is not shown any more.
const MAX_EVENTS: i64 = 8;
/// Maximum length of the text of an activity, in bytes.
const MAX_ACTIVITY_BYTES: usize = 400;

impl Store {
    /// Appends what the runner does to the task's events. A repeated report is the same event.
    pub async fn record_activity(&self, runner: &RunnerId, report: &ActivityReport) -> Result<FenceReply, StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, report.fence.task).await?;
        // A report that arrives after its step says nothing any more.
        let is_current = |task: &TaskRow| task.is_held_by(runner, &report.fence) && task.next_seq == report.seq;
        let Some(task) = task.filter(is_current) else {
            return roll_back(tx, FenceReply::Stale).await;
        };
        let is_in_model_call = sqlx::query_scalar!(
            r#"select exists (select from jobs where task = $1 and state in ('queued', 'placed', 'running')) as "open!""#,
            task.id.0
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a model call")?;
        if is_in_model_call {
            return roll_back(tx, FenceReply::Stale).await;
        }
        let text = pg_text(&report.activity);
        let activity = text[..text.floor_char_boundary(MAX_ACTIVITY_BYTES)].to_owned();
        let body = EventBody::RunnerActivity { runner: runner.to_string(), activity };
        if last_event(&mut tx, task.id).await?.is_some_and(|(last, _)| last == body) {
            return roll_back(tx, FenceReply::Committed).await;
        }
        append(&mut tx, task.id, &body).await?;
        tx.commit().await.doing("recording an activity")?;
        Ok(FenceReply::Committed)
    }

    /// What the runner does for a task that it holds: its last event, if that says so. The priority changes without the
    /// runner.
    pub(super) async fn activity(&self, task: TaskId) -> Result<Option<ActivityView>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        Ok(last_event(&mut connection, task).await?.and_then(|(body, elapsed_ms)| match body {
            EventBody::RunnerActivity { activity, .. } => Some(ActivityView { text: activity, elapsed_ms }),
            _ => None,
        }))
    }
}

/// The last event of a task other than a changed priority, and the time since then in ms.
async fn last_event(connection: &mut PgConnection, task: TaskId) -> Result<Option<(EventBody, u64)>, StoreError> {
    let last = sqlx::query!(
        r#"select body as "body: Json<EventBody>", (extract(epoch from now() - at) * 1000)::bigint as "elapsed_ms!"
           from events where task = $1 order by task_seq desc limit $2"#,
        task.0,
        MAX_EVENTS
    )
    .fetch_all(connection)
    .await
    .doing("reading the last events of a task")?;
    let of_runner = |body: &EventBody| !matches!(body, EventBody::PriorityChanged { .. });
    let last = last.into_iter().find(|event| of_runner(&event.body.0));
    Ok(last.map(|event| (event.body.0, event.elapsed_ms.max(0) as u64)))
}
